// The level between VRAM and the disk, for a model on the GPU that is larger than RAM: page-locked slots that hold the
// experts which VRAM's slots miss most, and the threads that read the others from the disk.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/pinned_memory.h"
#include "experts/ram_experts.h"

namespace sharpi {

class RamLevel {
public:
    // files: must outlive this object.
    RamLevel(const cuda::DeviceInfo& device, const std::vector<MappedFile>& files);

    FileReader& reader() { return _reader; }
    RamExperts& experts() { return _experts; }

    // Takes slots for the experts of these layers. Throws Error(OutOfMemory).
    void take(const ExpertSlotManager& layers, const SlotBudget& budget);
    size_t bytes() const { return _slots.bytes(); }
    int64_t capacity() const { return _slots.capacity(); }  // experts

    // Where kernels read bytes of a slot; null for other memory, and if the system did not lock the slots' pages.
    const uint8_t* reachable(const uint8_t* host, size_t bytes) const {
        return _pinned ? _pinned->reachable(host, bytes) : nullptr;
    }

    // Before a device's slots are filled: brings some of these experts (a layer's number, an expert), from the
    // `first` on, into the page cache, many at a time. Returns how many.
    size_t readAhead(const ExpertSlotManager& layers, const std::vector<std::pair<int32_t, int32_t>>& order,
                     size_t first);

    void addTo(ExpertCounts& counts) const;
    // For people; empty if all is as it should be.
    std::vector<std::string> notes() const;

private:
    cuda::DeviceInfo _device;
    cuda::HugePages _memory;
    Allocator _allocator;
    ExpertSlotManager _slots;
    FileReader _reader;
    RamExperts _experts;
    std::optional<cuda::PinnedRange> _pinned;  // the slots
};

}  // namespace sharpi
