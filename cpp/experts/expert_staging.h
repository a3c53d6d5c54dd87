// The staging buffers that single experts pass through on their way into slots, and how many experts may be on their
// way at once. Plain arithmetic, so that a plan counts what a run takes.
#pragma once

#include <algorithm>
#include <vector>

#include "core/matrix.h"
#include "memory/allocator.h"

namespace sharpi {

struct ExpertStaging {
    // While one stage is packed, which may wait for a kernel that fills the GPU, the others are filled.
    static constexpr int kStages = 3;
    // The most bytes of the stages, and of experts on their way: these delay what a pass itself brings across the bus.
    static constexpr size_t kBytes = size_t{64} << 20;
    static constexpr int kMaxDepth = 16;

    size_t stageBytes = 0;  // the largest expert's bytes in the file, without floats, which need no packing
    int stages = 0;
    int depth = 1;  // experts on their way; those beyond `stages` wait for a stage on the device
    size_t bytes() const { return stageBytes * static_cast<size_t>(stages); }
};

// file: the layers' experts; their addresses are not read.
inline ExpertStaging expertStaging(const std::vector<ExpertStacks>& file) {
    ExpertStaging staging;
    size_t largest = 0;
    for (const ExpertStacks& layer : file) {
        size_t all = 0, staged = 0;
        for (const Matrix* m : {&layer.gate.first, &layer.up.first, &layer.down.first}) {
            const size_t bytes = Allocator::aligned(fileBytes(*m));
            all += bytes;
            if (!info(m->type).isFloat) staged += bytes;
        }
        largest = std::max(largest, all);
        staging.stageBytes = std::max(staging.stageBytes, staged);
    }
    const auto within = [](size_t bytes, int most) {
        return static_cast<int>(
            std::clamp<size_t>(ExpertStaging::kBytes / std::max<size_t>(bytes, 1), 1, static_cast<size_t>(most)));
    };
    staging.stages = staging.stageBytes == 0 ? 0 : within(staging.stageBytes, ExpertStaging::kStages);
    staging.depth = within(largest, ExpertStaging::kMaxDepth);
    return staging;
}

}  // namespace sharpi
