// Host memory for copies of a device's memory: of pages and states that a text may need again.
//
// A model's copies have two or three sizes, and new ones replace old ones. So a buffer that is given back serves the
// next copy of its size: taking 60 MB from the system, page by page and cleared, takes ten times as long as copying
// them, and pinning them longer still.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "memory/device_memory.h"

namespace sharpi {

// Any thread may use it.
class CopyBuffers {
public:
    // Buffers that are kept for the next copy.
    static constexpr size_t kMostFree = 4;

    explicit CopyBuffers(const HostPages& pages) : _pages(pages) {}
    ~CopyBuffers();
    CopyBuffers(const CopyBuffers&) = delete;
    CopyBuffers& operator=(const CopyBuffers&) = delete;

    // Memory with undefined contents: the device's kind of host memory, or the system's if there is none. Throws
    // std::bad_alloc.
    void* take(size_t bytes);
    void give(void* memory, size_t bytes) noexcept;

private:
    void release(void* memory, size_t bytes) noexcept;

    const HostPages _pages;
    std::mutex _mutex;
    std::set<const void*> _system;                // what did not come from _pages
    std::vector<std::pair<size_t, void*>> _free;  // the latest is the last
};

// For vectors of bytes in such buffers, or in the system's memory if it has none. Their bytes are not cleared.
template <typename T> class CopyAllocator {
public:
    static_assert(std::is_trivial_v<T>);
    using value_type = T;
    using propagate_on_container_move_assignment = std::true_type;
    using propagate_on_container_swap = std::true_type;

    CopyAllocator() = default;
    explicit CopyAllocator(std::shared_ptr<CopyBuffers> buffers) : _buffers(std::move(buffers)) {}

    T* allocate(size_t count) {
        const size_t bytes = count * sizeof(T);
        return static_cast<T*>(_buffers ? _buffers->take(bytes) : ::operator new(bytes));
    }
    void deallocate(T* memory, size_t count) noexcept {
        if (_buffers) _buffers->give(memory, count * sizeof(T));
        else ::operator delete(memory);
    }
    template <typename U> void construct(U* at) noexcept { ::new (static_cast<void*>(at)) U; }
    template <typename U, typename... Arguments> void construct(U* at, Arguments&&... arguments) {
        ::new (static_cast<void*>(at)) U(std::forward<Arguments>(arguments)...);
    }
    bool operator==(const CopyAllocator& other) const { return _buffers == other._buffers; }
    bool operator!=(const CopyAllocator& other) const { return !(*this == other); }

private:
    std::shared_ptr<CopyBuffers> _buffers;
};

using CopyVector = std::vector<uint8_t, CopyAllocator<uint8_t>>;

}  // namespace sharpi
