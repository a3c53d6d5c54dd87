// Brings single experts across PCIe while the GPU computes: the copy engine carries a file's rows into a stage, and a
// kernel packs them from there to where the expert stays, on streams of their own. The copy engine disturbs what is
// computed meanwhile less than a kernel that reads across PCIe. Order is kept by events, and the host only asks whether
// they have been reached.
//
// Nobody may use, or write to, an expert's place from start() until finished() has come to its number. Not to be called
// while the calling thread records a step.
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
    // compute: loads come after the work that it has now, such as clearing the places of experts. files: whose pages
    // are pinned; what is not is copied all the same, and waited for in start(). experts: those of all layers, as in
    // the file. Takes expertStaging(experts).bytes(). Throws Error(OutOfMemory).
    CudaExpertLoads(Allocator& allocator, cuda::Stream& compute, const cuda::PinnedFiles& files,
                    const std::vector<ExpertStacks>& experts);
    // Waits for what is on its way.
    ~CudaExpertLoads() override;

    int depth() const override { return _layout.depth; }
    // Throws Error(Internal) for more than depth() at once.
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
    Buffer _staging;  // given back after the streams have ended
    cuda::Stream _copies, _packing;
    cuda::Event _copied;
    std::array<cuda::Event, ExpertStaging::kStages> _stageFree;
    std::deque<cuda::Event> _arrived;  // of load n: element n % depth
    uint64_t _started = 0, _finished = 0;
};

}  // namespace sharpi
