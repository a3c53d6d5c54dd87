// What loading takes, step by step: for people (SHARPI_TRACE_VRAM=1), and for holding a plan against a run.
#pragma once

#include <string>
#include <vector>

#include "memory/allocator.h"

namespace sharpi {

struct TraceLine {
    std::string name;
    size_t asked = 0;      // bytes asked of the allocator since the line before
    int64_t taken = 0;     // bytes that the device's free memory fell by since then
    size_t free = 0;       // of the device, now
};

class LoadTrace {
public:
    // print: each line also goes to standard error.
    LoadTrace(Allocator& allocator, bool print) : _allocator(allocator), _print(print) {}
    // Notes what has happened since the last call, under `name`.
    void note(const std::string& name);
    void restart();
    const std::vector<TraceLine>& lines() const { return _lines; }
    static bool wanted();  // SHARPI_TRACE_VRAM=1

private:
    Allocator& _allocator;
    bool _print;
    size_t _held = 0;
    std::vector<TraceLine> _lines;
};

}  // namespace sharpi
