// Parts of mapped files, pinned where they are, so that the copy engine and kernels read them across PCIe at its full
// speed. No CUDA header.
//
// What is pinned stays in memory. So of a model larger than that, what can do without is pinned only in part.
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

// Whole pages, ascending, none twice.
struct PagesToPin {
    std::vector<AddressRange> always, once, optional;
};

// Gaps between neighbours that are pinned along.
constexpr uintptr_t kPinnedGap = uintptr_t{1} << 20;

// The pages that ranges lie in, which must not be empty. Neighbours of one class less than kPinnedGap apart are one
// where one of `mappings` has both: between two mappings there may be nothing, or what belongs to someone else. What is
// in several classes is in `always`, or else in `optional`.
PagesToPin pagesToPin(const HostRanges& ranges, const std::vector<AddressRange>& mappings, uintptr_t page);

// Of ranges of pages, the first ones that memory has room for beside `pinned` bytes that are pinned already; the last
// may be cut. room: for pages of files. Where not all fit, a quarter of it stays free: the others come and go there,
// beside everything that the rest of the machine reads, and a machine with nothing but pinned pages finds none to give.
std::vector<AddressRange> pagesThatFit(const std::vector<AddressRange>& ranges, size_t pinned, size_t room,
                                       uintptr_t page);

class PinnedFiles {
public:
    using RoomNow = std::function<MemoryRoom()>;
    // room: what memory there is, asked before anything is pinned.
    explicit PinnedFiles(
        const DeviceInfo& device, RoomNow room = [] { return memoryRoom(); })
        : _device(device), _room(std::move(room)) {}
    // Unpins; nothing may be reading any more.
    ~PinnedFiles();
    PinnedFiles(const PinnedFiles&) = delete;
    PinnedFiles& operator=(const PinnedFiles&) = delete;

    // For as long as this object lives; `once`, until unpinOnce(). What cannot be pinned of `always` is copied to
    // memory that is; of the others, it stays as it is. Throws Error(OutOfMemory), and nothing is pinned then, where
    // there is no memory for the copy.
    void pin(const HostRanges& ranges);
    void unpinOnce();

    // Where the device reads a byte of `always`.
    const uint8_t* deviceAddress(const uint8_t* file) const;
    // Where it reads bytes of `always` or `optional`, if it can read all of them one after another; else null.
    const uint8_t* reachable(const uint8_t* file, size_t bytes) const;
    // Asks the system to bring what is not pinned of these bytes to memory, and waits for nothing.
    void expect(const uint8_t* file, size_t bytes) const;
    // Where to copy from what one copy can take of bytes at `file`, one at least: no copy may reach from one pinned
    // range into another, or out of it.
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
    size_t _optional = 0, _left = 0;  // bytes of `optional`, and those of them that were not pinned
    std::string _refusal, _whyLeft;   // why, the last time
};

}  // namespace sharpi::cuda
