// Parts of mapped files, pinned where they are, so that the copy engine and kernels read them across PCIe at its full
// speed. No CUDA header.
//
// SHARPI_CUDA_PIN=0: nothing is pinned in place, as if the system refused.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/stream.h"
#include "memory/weight_stream.h"  // HostRange

namespace sharpi::cuda {

// Addresses [begin, end).
struct AddressRange {
    uintptr_t begin = 0, end = 0;
    bool operator==(const AddressRange& other) const { return begin == other.begin && end == other.end; }
    uintptr_t bytes() const { return end - begin; }
};

// Whole pages, ascending, none twice.
struct PagesToPin {
    std::vector<AddressRange> always, once;
};

// Gaps between neighbours that are pinned along.
constexpr uintptr_t kPinnedGap = uintptr_t{1} << 20;

// The pages that ranges lie in, which must not be empty. Neighbours of one class less than kPinnedGap apart are one where one of
// `mappings` has both: between two mappings there may be nothing, or what belongs to someone else. What is in both classes is in
// `always`.
PagesToPin pagesToPin(const std::vector<HostRange>& always, const std::vector<HostRange>& once, const std::vector<AddressRange>& mappings,
                      uintptr_t page);

class PinnedFiles {
public:
    explicit PinnedFiles(const DeviceInfo& device) : _device(device) {}
    // Unpins; nothing may be reading any more.
    ~PinnedFiles();
    PinnedFiles(const PinnedFiles&) = delete;
    PinnedFiles& operator=(const PinnedFiles&) = delete;

    // For as long as this object lives, and until unpinOnce(). What cannot be pinned of `always` is copied to memory that is; of
    // `once`, it stays as it is. Throws Error(OutOfMemory), and nothing is pinned then, where there is no memory for the copy.
    void pin(const std::vector<HostRange>& always, const std::vector<HostRange>& once);
    void unpinOnce();

    // Where the device reads a byte of `always`.
    const uint8_t* deviceAddress(const uint8_t* file) const;
    // Where to copy from what one copy can take of bytes at `file`, one at least: no copy may reach from one pinned range into
    // another, or out of it.
    HostRange source(const uint8_t* file, size_t bytes) const;
    // Lines for people: what was refused, and what was done instead.
    std::vector<std::string> notes() const;

private:
    struct Pin {
        AddressRange pages;
        uint8_t* copy = nullptr;          // null: pinned in place
        const uint8_t* device = nullptr;  // the first byte's address there
        bool once = false;
    };
    bool pinInPlace(const AddressRange& pages, bool once, bool writable);
    void copyToPinned(const AddressRange& pages);
    static void unpin(const Pin& pin) noexcept;
    void unpinAll() noexcept;
    const Pin* find(const uint8_t* file) const;

    DeviceInfo _device;
    std::vector<Pin> _pins;  // by address
    size_t _inPlace = 0, _copied = 0;
    std::string _refusal;    // why, the last time
};

}  // namespace sharpi::cuda
