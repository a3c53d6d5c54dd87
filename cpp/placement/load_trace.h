// What loading takes, step by step: for people (SHARPI_TRACE_VRAM=1), and for comparing a plan with a run.
#pragma once

#include <string>
#include <vector>

#include "memory/allocator.h"

namespace sharpi {

struct TraceLine {
    std::string name;
    size_t asked = 0;   // bytes asked of the allocator since the line before
    int64_t taken = 0;  // bytes that the device's free memory fell by since then
    size_t free = 0;    // of the device, now
};

class LoadTrace {
public:
    // memory: each line also goes to standard error, after this name; null: it does not.
    LoadTrace(Allocator& allocator, const char* memory) : _allocator(allocator), _memory(memory) {}
    // Notes what has happened since the last call, under `name`.
    void note(const std::string& name);
    const std::vector<TraceLine>& lines() const { return _lines; }
    static bool wanted();  // SHARPI_TRACE_VRAM=1

private:
    Allocator& _allocator;
    const char* _memory;
    size_t _held = 0;
    std::vector<TraceLine> _lines;
};

}  // namespace sharpi
