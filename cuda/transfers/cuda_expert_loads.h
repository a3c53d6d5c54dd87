// Loads single experts across PCIe while the GPU computes. The copy engine brings a file's rows to a staging buffer,
// and a kernel packs them from there into the expert's slot. Both have streams of their own. The copy engine slows the
// computation less than a kernel that reads across PCIe would. Events keep the order; the host never waits for them, it
// asks whether they are reached.
//
// From start() until finished() has reached its number, nothing else may read or write the expert's slot. A thread that
// captures a step must not call anything here.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "device/pinned_files.h"
#include "device/stream.h"
#include "experts/expert_slots.h"  // ExpertLoads
#include "experts/expert_staging.h"
#include "memory/allocator.h"

namespace sharpi {

class CudaExpertLoads : public ExpertLoads {
public:
    // compute: the stream whose device loads use; they start after the work that it has now, such as clearing the
    // slots. files: the pinned pages. start() waits for rows that are not pinned, because they need a copy first.
    // experts: those of all layers, as in the file. Takes expertStaging(experts).bytes(). Throws Error(OutOfMemory).
    CudaExpertLoads(Allocator& allocator, cuda::Stream& compute, const cuda::PinnedFiles& files,
                    const std::vector<ExpertStacks>& experts);
    // Waits for the loads under way.
    ~CudaExpertLoads() override;

    int depth() const override { return _layout.depth; }
    // Throws Error(Internal) if depth() loads are under way already.
    uint64_t start(const std::array<StreamPart, 3>& parts) override;
    uint64_t finished() override;
    void settle() override;

private:
    void loadKernels(const std::vector<ExpertStacks>& experts);
    void copy(uint8_t* to, const uint8_t* file, size_t bytes);
    void launch(const std::array<StreamPart, 3>& parts, uint8_t* stage);
    void settleQuietly() noexcept;

    const cuda::PinnedFiles& _files;
    const ExpertStaging _layout;
    Buffer _staging;  // before the streams, so that it is freed after they have ended
    // Before the events: these belong to the device that a stream's constructor makes the thread's.
    cuda::Stream _copies, _packing;
    cuda::Event _copied;
    std::array<cuda::Event, ExpertStaging::kStages> _stageFree;
    std::deque<cuda::Event> _arrived;  // element n % depth: load n is done
    uint64_t _started = 0, _finished = 0;
};

}  // namespace sharpi
