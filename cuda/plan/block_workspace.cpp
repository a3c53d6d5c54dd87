// The sizes of the workspaces of kernels/blocks: host arithmetic, as in workspace.cpp.
#include <algorithm>

#include "kernels/blocks/blocks.h"

namespace sharpi::cuda {

namespace {

constexpr int64_t kPage = 64, kSegment = kSegmentPages * kPage;
constexpr size_t kMostAttentionBytes = size_t{48} << 20;  // unless one row needs more

}  // namespace

size_t indexScoreBytes(int64_t rows, int64_t blocks) {
    return sizeof(float) * static_cast<size_t>(std::min(rows, kIndexedRows) * blocks);
}

// A window may begin anywhere in its first segment.
int64_t blockSegments(int64_t blocks, const AttentionReach& reach, int64_t pages) {
    const int64_t all = (pages * kPage + kSegment - 1) / kSegment, seen = std::max(reach.window, reach.chunk);
    const int64_t ofKeys = reach.limited() ? std::min(all, (seen + kSegment - 2) / kSegment + 1) : all;
    return (blocks + kSegment - 1) / kSegment + ofKeys;
}

size_t blockAttentionBytes(int64_t rows, const HeadShape& shape, int64_t segments) {
    return sizeof(float) * static_cast<size_t>(rows * segments * shape.heads * (shape.headDim + 2));
}

size_t blockAttentionScratch(int64_t rows, const HeadShape& shape, int64_t segments) {
    const size_t one = blockAttentionBytes(1, shape, segments);
    return std::max(one, std::min(kMostAttentionBytes, blockAttentionBytes(rows, shape, segments)));
}

}  // namespace sharpi::cuda
