// Bringing weights across PCIe while the GPU computes: the copy engine carries a piece's file rows from pinned pages
// into a stage, and a kernel packs them from there into the ring (kernels/formats/packed.h), on streams beside the one
// that computes. Copies take turns on two streams, so that the bus goes from one to the next without a gap.
//
// Events between the streams keep all the order that a pass needs. So a pass works the same whether it runs or the
// compute stream is being captured: begin() takes the other streams into the capture, and end() joins them again.
// An event has a meaning only within its pass; passes follow each other because begin() and end() join all streams.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/pinned_files.h"
#include "device/stream.h"
#include "memory/stream/file_reader.h"
#include "memory/stream/transfers.h"
#include "plan/gpu_scratch.h"
#include "transfers/disk_pieces.h"

namespace sharpi {

class CudaTransfers : public Transfers {
public:
    explicit CudaTransfers(cuda::Stream& compute, cuda::PinnedFiles::RoomNow room = [] { return memoryRoom(); });
    // Waits for the device, then unpins everything.
    ~CudaTransfers() override;

    // Before prepare(), if the model is larger than RAM: `optional` ranges are not pinned, but read by this reader as
    // far as no copy of them is in RAM.
    void readDiskBy(FileReader& reader) { _reader = &reader; }
    void prepare(const HostRanges& ranges, void* staging, size_t stageBytes) override;
    void finishOnce() override;
    std::vector<std::string> notes() const override { return _files.notes(); }
    const uint8_t* reachable(const uint8_t* file, size_t bytes) const override { return _files.reachable(file, bytes); }
    // The pinned pages, for others that copy from them.
    const cuda::PinnedFiles& files() const { return _files; }

    void begin() override;
    void end() override;
    int looksAhead() const override { return _disk ? DiskPieces::kStages - 1 : 0; }
    void expect(const std::vector<StreamPart>& parts) override { _disk->expect(parts); }
    // What could not be pinned of `once` and `optional` ranges is waited for here, which no capture allows.
    void fetch(const std::vector<StreamPart>& parts, int buffer) override;
    void await(int buffer) override;
    void release(int buffer) override;

    // After a pass that was abandoned: waits for the work that it left running, which would disturb the next pass.
    // begin() calls this; a caller that replays a captured pass has to call it. In a capture that is being abandoned it
    // does nothing, and the next call does it.
    void settle();

private:
    struct RingBuffer {
        cuda::Event ready, released;
        bool fetched = false, isReleased = false;  // in this pass
    };
    RingBuffer& bufferAt(int buffer);
    // Bytes of a file, and where they go.
    struct Copy {
        uint8_t* to;
        const uint8_t* file;
        size_t bytes;
    };
    static void addCopy(std::vector<Copy>& copies, const Copy& next);
    void start(cuda::Stream& stream, Copy copy) const;
    void synchronize();

    // The streams come before the events: these belong to the device that a stream's constructor makes the thread's.
    cuda::Stream& _compute;
    std::array<std::unique_ptr<cuda::Stream>, 2> _copies;
    std::unique_ptr<cuda::Stream> _packing;
    cuda::PinnedFiles _files;
    FileReader* _reader = nullptr;
    std::optional<DiskPieces> _disk;  // after the streams, for its events
    uint8_t* _staging = nullptr;
    size_t _stageBytes = 0;

    cuda::Event _forked, _copied, _joined;
    std::array<RingBuffer, Transfers::kMostBuffers> _ring;
    std::array<cuda::Event, kTransferStages> _stageFree;
    int64_t _fetches = 0;  // in this pass
    bool _open = false;    // between begin() and end()
};

}  // namespace sharpi
