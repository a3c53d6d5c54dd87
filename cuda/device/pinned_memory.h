// RAM that is page-locked as it is taken, so that the copy engine and kernels read it at the full speed of PCIe. In
// huge pages, where the system has them: the system looks at every page that it locks. No CUDA header.
#pragma once

#include <string>

#include "device/stream.h"
#include "memory/host_memory.h"

namespace sharpi::cuda {

class PinnedMemory : public HostMemory {
public:
    explicit PinnedMemory(const DeviceInfo& device) : _device(device) {}

    size_t granularity() const override;  // a huge page
    void* reserve(size_t bytes) override;
    // Takes all pages at once. Returns false if RAM has no room for them. If the system does not lock them, they are
    // taken all the same, and refusal() says why.
    bool commit(void* address, size_t bytes) override;
    void decommit(void* address, size_t bytes) noexcept override;

    // Why some of the memory is not page-locked; empty if all of it is. The device's kernels cannot read it then.
    const std::string& refusal() const { return _refusal; }

private:
    DeviceInfo _device;
    std::string _refusal;
};

// The same for single buffers, of the calling thread's device: the driver's own allocation takes several times as long.
HostPages pinnedPages();

}  // namespace sharpi::cuda
