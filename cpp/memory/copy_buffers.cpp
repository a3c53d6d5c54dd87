// See copy_buffers.h.
#include "memory/copy_buffers.h"

#include <algorithm>

namespace sharpi {

CopyBuffers::~CopyBuffers() {
    for (const auto& [bytes, memory] : _free) release(memory, bytes);
}

void* CopyBuffers::take(size_t bytes) {
    const std::lock_guard lock(_mutex);
    const auto found =
        std::find_if(_free.rbegin(), _free.rend(), [&](const auto& free) { return free.first == bytes; });
    if (found != _free.rend()) {
        void* const memory = found->second;
        _free.erase(std::next(found).base());
        return memory;
    }
    _free.reserve(kMostFree + 1);  // so that give() allocates nothing
    if (void* const memory = _pages.take ? _pages.take(bytes) : nullptr) return memory;
    void* const memory = ::operator new(bytes);
    try {
        _system.insert(memory);
    } catch (...) {
        ::operator delete(memory);
        throw;
    }
    return memory;
}

void CopyBuffers::give(void* memory, size_t bytes) noexcept {
    const std::lock_guard lock(_mutex);
    _free.emplace_back(bytes, memory);
    if (_free.size() <= kMostFree) return;
    release(_free.front().second, _free.front().first);
    _free.erase(_free.begin());
}

void CopyBuffers::release(void* memory, size_t bytes) noexcept {
    if (_system.erase(memory)) ::operator delete(memory);
    else _pages.give(memory, bytes);
}

}  // namespace sharpi
