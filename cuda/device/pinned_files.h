// Parts of mapped files, pinned in place, so that the copy engine and kernels read them at the full speed of PCIe. No
// CUDA header.
//
// Pinned pages stay in memory. If a model is larger than memory, its optional parts are pinned only as far as they fit.
//
// SHARPI_CUDA_PIN=0: nothing is pinned in place, as if the system refused.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "device/stream.h"
#include "memory/host_memory.h"
#include "memory/stream/host_ranges.h"

namespace sharpi::cuda {

// Addresses [begin, end).
struct AddressRange {
    uintptr_t begin = 0, end = 0;
    bool operator==(const AddressRange& other) const { return begin == other.begin && end == other.end; }
    uintptr_t bytes() const { return end - begin; }
};

// Calls body for parts of the range on several threads, so that their waits for the disk, or for the system to take
// each page, overlap.
void inParts(const AddressRange& range, const std::function<void(const AddressRange&)>& body);

// Whole pages, in ascending order. No page is in two of the lists.
struct PagesToPin {
    std::vector<AddressRange> always, once, optional;
};

// A gap of up to this size between two ranges is pinned with them.
constexpr uintptr_t kPinnedGap = uintptr_t{1} << 20;

// The pages that `ranges` lie in. Neighbours of one class that are less than kPinnedGap apart become one range if the
// same mapping holds both: what lies between two mappings may be unmapped, or belong to something else. A page of
// several classes goes to `always` if that is one of them, else to `optional`.
PagesToPin pagesToPin(const HostRanges& ranges, const std::vector<AddressRange>& mappings, uintptr_t page);

// The first of `ranges` that fit in memory beside `pinned` bytes that are pinned already. The last one may be cut.
// room: bytes for pages of files. If not all ranges fit, a quarter of the room stays free: the unpinned pages come and
// go there, like everything else that the machine reads, and a system whose pages are all pinned has none to reclaim.
std::vector<AddressRange> pagesThatFit(const std::vector<AddressRange>& ranges, size_t pinned, size_t room,
                                       uintptr_t page);

class PinnedFiles {
public:
    using RoomNow = std::function<MemoryRoom()>;
    // room: tells how much memory there is. It is asked each time before something is pinned.
    explicit PinnedFiles(
        const DeviceInfo& device, RoomNow room = [] { return memoryRoom(); })
        : _device(device), _room(std::move(room)) {}
    // Unpins everything. Nothing may still be reading it.
    ~PinnedFiles();
    PinnedFiles(const PinnedFiles&) = delete;
    PinnedFiles& operator=(const PinnedFiles&) = delete;

    // Pins for as long as this object lives, or `once` until unpinOnce(). If a part of `always` cannot be pinned, it is
    // copied to pinned memory; a part of the others stays unpinned. Throws Error(OutOfMemory) and pins nothing if there
    // is no memory for the copy.
    void pin(const HostRanges& ranges);
    void unpinOnce();

    // The device's address of bytes of `always` or `optional`. Null if it cannot read all of them in one piece.
    const uint8_t* reachable(const uint8_t* file, size_t bytes) const;
    // Asks the system to read those of these bytes that are not pinned into memory. Does not wait.
    void expect(const uint8_t* file, size_t bytes) const;
    // The longest beginning of the bytes at `file` that one copy may take, and where to copy it from; at least one
    // byte. No copy may cross the border of a pinned range.
    HostRange source(const uint8_t* file, size_t bytes) const;
    // Bytes that are pinned, in place or as copies.
    size_t bytes() const { return _inPlace + _copied; }
    // For users: what was refused, and what was done instead.
    std::vector<std::string> notes() const;

private:
    struct Pin {
        AddressRange pages;
        uint8_t* copy = nullptr;          // null: pinned in place
        const uint8_t* device = nullptr;  // the device's address of the first byte
        bool once = false;
    };
    std::string pinInPlace(const AddressRange& pages, bool once, bool writable);
    void pinWhatFits(const std::vector<AddressRange>& pages, const std::vector<AddressRange>& writable);
    void copyToPinned(const AddressRange& pages);
    static void unpin(const Pin& pin) noexcept;
    void unpinAll() noexcept;
    const Pin* find(const uint8_t* file) const;

    DeviceInfo _device;
    RoomNow _room;
    std::vector<Pin> _pins;  // by address
    size_t _inPlace = 0, _copied = 0;
    size_t _optional = 0, _left = 0;  // bytes of `optional`, and how many of them were not pinned
    std::string _refusal, _whyLeft;   // the last reasons
};

}  // namespace sharpi::cuda
