// The few calls through which the engine takes memory, so that every byte has one owner and can be counted, and so
// that running out can be tested. Host memory is the first implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace sharpi {

class DeviceMemory {
public:
    virtual ~DeviceMemory() = default;
    // At least 64-byte aligned, contents zero. Throws Error(OutOfMemory) naming `what` and its bytes.
    virtual void* allocate(size_t bytes, const char* what) = 0;
    virtual void free(void* data, size_t bytes) noexcept = 0;
    virtual size_t held() const = 0;  // bytes allocated and not freed
};

// Anonymous pages: the system hands them out as they are first touched, so a long context costs what is used.
class HostMemory : public DeviceMemory {
public:
    // capacity: the most that may be held at once; 0 = no limit but the system's.
    explicit HostMemory(size_t capacity = 0) : _capacity(capacity) {}
    void* allocate(size_t bytes, const char* what) override;
    void free(void* data, size_t bytes) noexcept override;
    size_t held() const override { return _held; }

private:
    size_t _capacity;
    size_t _held = 0;
};

// Owns one allocation.
class Buffer {
public:
    Buffer() = default;
    Buffer(DeviceMemory& memory, size_t bytes, const char* what)
        : _memory(&memory), _data(memory.allocate(bytes, what)), _bytes(bytes) {}
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
        if (_data) _memory->free(_data, _bytes);
        _data = nullptr;
    }
    void swap(Buffer& other) noexcept {
        std::swap(_memory, other._memory);
        std::swap(_data, other._data);
        std::swap(_bytes, other._bytes);
    }
    DeviceMemory* _memory = nullptr;
    void* _data = nullptr;
    size_t _bytes = 0;
};

}  // namespace sharpi
