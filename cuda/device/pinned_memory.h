// RAM for copies to and from a device: page-locked, so that the copy engine and kernels read it at the full speed of
// PCIe, and in huge pages, where the system has them, because the system looks at every page that it locks. No CUDA
// header.
#pragma once

#include <string>

#include "device/stream.h"
#include "memory/host_memory.h"

namespace sharpi::cuda {

// Memory in huge pages, all of which are taken at once. It is not page-locked yet.
class HugePages : public HostMemory {
public:
    size_t granularity() const override;  // a huge page
    void* reserve(size_t bytes) override;
    // Returns false if RAM has no room for the pages.
    bool commit(void* address, size_t bytes) override;
};

// Locks the pages of [begin, begin + bytes) for as long as it lives. No copy may cross the border of what is locked as
// one, so memory that copies reach as a whole is to be locked as a whole.
class PinnedRange {
public:
    PinnedRange(const DeviceInfo& device, uint8_t* begin, size_t bytes);
    ~PinnedRange();
    PinnedRange(const PinnedRange&) = delete;
    PinnedRange& operator=(const PinnedRange&) = delete;

    // Where kernels read bytes of the range; null for other memory, and if the system refused to lock it.
    const uint8_t* reachable(const uint8_t* host, size_t bytes) const;
    // Why it refused; empty if it did not.
    const std::string& refusal() const { return _refusal; }

private:
    DeviceInfo _device;
    uint8_t* _begin;
    size_t _bytes;
    const uint8_t* _onDevice = nullptr;  // the device's address of the first byte
    std::string _refusal;
};

// Page-locked memory in huge pages for single buffers, of the calling thread's device: the driver's own allocation
// takes several times as long.
HostPages pinnedPages();

}  // namespace sharpi::cuda
