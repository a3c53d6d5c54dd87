// See load_trace.h.
#include "placement/load_trace.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace sharpi {

bool LoadTrace::wanted() {
    const char* value = std::getenv("SHARPI_TRACE_VRAM");
    return value && std::strcmp(value, "1") == 0;
}

void LoadTrace::note(const std::string& name) {
    const size_t held = _allocator.held(), free = _allocator.memory().freeBytes();
    const size_t before = _lines.empty() ? free : _lines.back().free;
    _lines.push_back({name, held - _held, static_cast<int64_t>(before) - static_cast<int64_t>(free), free});
    _held = held;
    if (!_memory) return;
    const double mib = 1 << 20;
    const TraceLine& line = _lines.back();
    std::fprintf(stderr, "%s: %-16s asked %10.2f MiB, took %10.2f MiB, free %10.2f MiB\n", _memory, name.c_str(),
                 line.asked / mib, line.taken / mib, line.free / mib);
}

}  // namespace sharpi
