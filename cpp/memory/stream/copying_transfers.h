// Transfers to a device whose memory the host can write and that keeps the file's layout: each fetch copies at once.
#pragma once

#include "memory/device_memory.h"
#include "memory/stream/transfers.h"

namespace sharpi {

class CopyingTransfers : public Transfers {
public:
    explicit CopyingTransfers(DeviceMemory& memory) : _memory(memory) {}
    void prepare(const HostRanges&, void*, size_t) override {}
    void finishOnce() override {}
    void begin() override {}
    void end() override {}
    void fetch(const std::vector<StreamPart>& parts, int) override {
        for (const StreamPart& part : parts) {
            const size_t begin = rowBytes(part.to.type, part.to.cols) * static_cast<size_t>(part.rowBegin);
            _memory.upload(const_cast<uint8_t*>(part.to.data) + begin, part.file, part.bytes());
        }
    }
    void await(int) override {}
    void release(int) override {}

private:
    DeviceMemory& _memory;
};

}  // namespace sharpi
