// All device memory is taken through the allocator: every byte has a name, and is given back.
//
// Devices hand out memory in granules (2 MiB on a GPU), and a model has hundreds of tensors. So allocations are laid
// end to end in reserved addresses, and memory is put behind them granule by granule: the granule in which one
// allocation ends is also the one in which the next begins. At any moment the granules taken from the device are
// exactly those that some allocation reaches into.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory/device_memory.h"

namespace sharpi {

struct Holding {
    std::string name;
    size_t bytes = 0;
};

// Thread-safe. Free everything before destroying it; the destructor gives back what is left.
class Allocator {
public:
    static constexpr size_t kAlignment = 256;
    static constexpr size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

    // budget: the most bytes to take from the device; 0: all that is free.
    explicit Allocator(DeviceMemory& memory, size_t budget = 0);
    ~Allocator();
    Allocator(const Allocator&) = delete;
    Allocator& operator=(const Allocator&) = delete;

    // The memory is zeroed and aligned to kAlignment; nothing else is rounded up. Throws Error(OutOfMemory), with the
    // name, the bytes, what is free and the largest holders; nothing has changed then.
    void* allocate(size_t bytes, const std::string& name);
    // Throws Error(Internal) for an address that is not allocated, or no longer.
    void free(void* address);

    size_t held() const;                    // bytes allocated and not freed
    size_t taken() const;                   // bytes of the device's memory behind them, in whole granules
    size_t available() const;               // bytes that can still be taken, by the budget and the device
    std::vector<Holding> holdings() const;  // largest first, equal names summed, empty allocations left out
    DeviceMemory& memory() const { return _memory; }

private:
    struct Allocation {
        size_t bytes = 0, room = 0;  // as asked for, and aligned
        std::string name;
    };
    // The memory of one commit: the granules that one allocation fills alone, or one granule that neighbours share.
    struct Chunk {
        size_t bytes = 0;
        int users = 0;  // allocations that reach into it
    };
    // A part of an allocation's granules that is, or will be, one chunk.
    struct Piece {
        uintptr_t begin = 0;
        size_t bytes = 0;
        bool taken = false;  // a neighbour has it already
    };
    struct Pieces {
        std::array<Piece, 3> list;
        int count = 0;
        size_t missing() const;
    };
    using Ranges = std::map<uintptr_t, size_t>;  // bytes by address

    uintptr_t place(size_t bytes, size_t room);
    Ranges::iterator bestHole(size_t room);
    Ranges::iterator addRegion(size_t room);
    void removeUnused(Ranges::iterator hole) noexcept;
    Pieces piecesOf(uintptr_t begin, size_t room) const;
    bool hold(const Pieces& pieces);
    bool holdOne(const Piece& piece);
    void drop(const Piece& piece) noexcept;
    void clear(uintptr_t begin, size_t bytes, const Pieces& pieces);
    void giveBack(uintptr_t begin, size_t room);
    size_t availableNow() const;
    std::vector<Holding> holdingsNow() const;
    std::string outOfMemory(size_t bytes, const std::string& name) const;
    std::string largestHolders() const;
    std::string notHeld(uintptr_t address) const;

    DeviceMemory& _memory;
    const size_t _budget, _granularity;
    mutable std::mutex _mutex;
    size_t _held = 0, _taken = 0;
    Ranges _regions;                                // reserved addresses
    Ranges _holes;                                  // reserved addresses without an allocation; neighbours are joined
    std::map<uintptr_t, Chunk> _chunks;             // memory behind addresses
    std::map<uintptr_t, Allocation> _exactHandles;  // by address
};

// Owns one allocation.
class Buffer {
public:
    Buffer() = default;
    Buffer(Allocator& allocator, size_t bytes, const std::string& name)
        : _allocator(&allocator), _data(allocator.allocate(bytes, name)), _bytes(bytes) {}
    ~Buffer() { reset(); }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    size_t bytes() const { return _bytes; }
    template <typename T> T* as() const { return static_cast<T*>(_data); }

private:
    void reset() noexcept {
        if (_data) _allocator->free(_data);
        _data = nullptr;
    }
    void swap(Buffer& other) noexcept {
        std::swap(_allocator, other._allocator);
        std::swap(_data, other._data);
        std::swap(_bytes, other._bytes);
    }
    Allocator* _allocator = nullptr;
    void* _data = nullptr;
    size_t _bytes = 0;
};

}  // namespace sharpi
