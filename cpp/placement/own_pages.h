// Bytes on pages of a mapping of their own, which nobody writes any more.
//
// A device may pin what it uploads from for reading alone: whole pages, and what lies between neighbours of one
// mapping. No copy from the device may go to other memory among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sharpi {

class OwnPages {
public:
    // Throws Error(OutOfMemory) if the system gives no pages.
    explicit OwnPages(const std::vector<uint8_t>& bytes);
    ~OwnPages();
    OwnPages(OwnPages&& other) noexcept
        : _begin(std::exchange(other._begin, nullptr)), _bytes(std::exchange(other._bytes, 0)) {}
    OwnPages(const OwnPages&) = delete;
    OwnPages& operator=(const OwnPages&) = delete;
    const uint8_t* data() const { return static_cast<const uint8_t*>(_begin); }

private:
    void* _begin = nullptr;
    size_t _bytes = 0;  // whole pages
};

}  // namespace sharpi
