// The sizes of the kernels' workspaces, and how each is divided. This is host arithmetic that needs no CUDA toolkit,
// because plans are also made on machines without one.
#include <algorithm>
#include <string>

#include "core/contract.h"
#include "core/error.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/latent_shape.h"
#include "kernels/delta/gated_delta.h"
#include "kernels/delta/mamba.h"
#include "kernels/experts/router.h"
#include "kernels/rows/rows.h"
#include "kernels/sampling/sampling.h"

namespace sharpi::cuda {

namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

// The blocks of all bundles of WideColumns.
static size_t wideBlocks(int64_t rows, int64_t cols) {
    if (rows < kMmaFromRows) return 0;
    const int64_t bundles = (std::min<int64_t>(rows, kMostWideRows) + WideColumns::kBundle - 1) / WideColumns::kBundle;
    return static_cast<size_t>(bundles * (cols / kContractBlock));
}

static size_t wideBytes(int64_t rows, int64_t cols) {
    return aligned(wideBlocks(rows, cols) * (WideColumns::kCodeBytes + WideColumns::kEndFloats * sizeof(float)));
}

size_t quantizedRowsBytes(int64_t rows, int64_t cols) {
    const auto blocks = static_cast<size_t>(rows * (cols / kContractBlock));
    return aligned(static_cast<size_t>(rows * cols)) + aligned(blocks * sizeof(float)) +
           aligned(blocks * sizeof(int32_t)) + wideBytes(rows, cols);
}

QuantizedRows quantizedRowsOver(void* buffer, int64_t rows, int64_t cols) {
    const auto blocks = static_cast<size_t>(rows * (cols / kContractBlock));
    auto* at = static_cast<uint8_t*>(buffer);
    QuantizedRows over;
    over.q = reinterpret_cast<int8_t*>(at);
    at += aligned(static_cast<size_t>(rows * cols));
    over.scale = reinterpret_cast<float*>(at);
    at += aligned(blocks * sizeof(float));
    over.sums = reinterpret_cast<int32_t*>(at);
    at += aligned(blocks * sizeof(int32_t));
    if (rows >= kMmaFromRows) {
        over.wide.codes = at;
        over.wide.ends = reinterpret_cast<float*>(at + wideBlocks(rows, cols) * WideColumns::kCodeBytes);
    }
    return over;
}

// A row's cache may be of any length, so the results of its pieces take turns in a ring. With few heads it has more
// slots, because more blocks work on each. A batch of 64 segments is long enough that joining it is rare, and short
// enough that little is left to join when the last piece is finished.
DecodeRing decodeRing(int64_t heads) {
    DecodeRing ring;
    ring.slots = 16;
    while (ring.slots < 1024 && 2 * ring.slots * heads <= 16384) ring.slots *= 2;
    ring.batch = std::min(64, ring.slots / 2);
    return ring;
}

int64_t decodeLaunchRows(int32_t kvHeads) {
    return std::max<int64_t>(1, std::min<int64_t>(kDecodeLaunchRows, 4096 / kvHeads));
}

// Counters, then maxima and sums, then headDim floats of output for each slot (see attention_decode.cu), and one more
// slot for each head. Enough for any smaller number of rows and heads, whose rings are longer.
size_t decodeAttentionBytes(int64_t rows, const HeadShape& shape) {
    const int64_t heads = std::min(rows, kDecodeLaunchRows) * shape.heads;
    const auto partials = static_cast<size_t>(std::max<int64_t>(16384, 16 * heads) + heads);
    return kDecodeCounterBytes + 2 * aligned(sizeof(float) * partials) +
           aligned(sizeof(float) * partials * static_cast<size_t>(shape.headDim));
}

// As many rows as keep the scratch below 80 MB.
int64_t latentLaunchRows(int32_t heads) {
    constexpr int64_t kLaunchHeads = 2048;
    return std::max<int64_t>(1, std::min(kDecodeLaunchRows, kLaunchHeads / heads));
}

// The longest batches: a ticket that joins one waits for all of its pieces.
DecodeRing latentRing(int64_t heads) {
    const DecodeRing ring = decodeRing(heads);
    return {ring.slots, ring.slots / 2};
}

size_t latentAttentionBytes(int64_t rows, const LatentShape& shape) {
    rows = std::min(rows, latentLaunchRows(shape.heads));
    const int64_t states = rows * shape.heads * ((shape.rank + 31) / 32);
    return decodeAttentionBytes(rows, {shape.heads, 1, shape.rank}) +
           aligned(2 * sizeof(float) * static_cast<size_t>(states));
}

namespace {

template <typename Take> ExpertGrouping takeGrouping(int64_t rows, int32_t used, int32_t experts, const Take& take) {
    const int64_t pairs = rows * used;
    ExpertGrouping over;
    over.begin = take(experts + 1);
    over.pairToken = take(pairs);
    over.pairOf = take(pairs);
    over.pairAt = take(pairs);
    over.tileExpert = take(maxExpertTiles(pairs, experts));
    over.tileBegin = take(maxExpertTiles(pairs, experts));
    over.counts = take(kMaxPairSegments * experts);
    return over;
}

}  // namespace

size_t expertGroupingBytes(int64_t rows, int32_t used, int32_t experts) {
    size_t total = 0;
    takeGrouping(rows, used, experts, [&](int64_t count) {
        total += aligned(sizeof(int32_t) * static_cast<size_t>(count));
        return nullptr;
    });
    return total;
}

ExpertGrouping expertGroupingOver(void* buffer, int64_t rows, int32_t used, int32_t experts) {
    auto* at = static_cast<uint8_t*>(buffer);
    return takeGrouping(rows, used, experts, [&](int64_t count) {
        auto* taken = reinterpret_cast<int32_t*>(at);
        at += aligned(sizeof(int32_t) * static_cast<size_t>(count));
        return taken;
    });
}

void requireHeads(const HeadShape& shape) {
    const bool known = shape.kvHeads > 0 && shape.heads > 0 && shape.heads % shape.kvHeads == 0 && shape.headDim > 0 &&
                       shape.headDim % 8 == 0 && shape.headDim <= kMaxHeadDim;
    if (known) return;
    throw Error(ErrorKind::InvalidArgument, "attention with " + std::to_string(shape.heads) + " heads over " +
                                                std::to_string(shape.kvHeads) + " of " + std::to_string(shape.headDim) +
                                                " elements cannot run on the GPU, which takes heads of 8, 16, .. " +
                                                std::to_string(kMaxHeadDim) + " elements");
}

void requireLatent(const LatentShape& shape) {
    const int32_t unit = shape.rank <= 128 ? 4 : 8;  // elements that a lane owns
    const bool row = shape.rank > 0 && shape.rank <= kMaxLatentRank && shape.rank % unit == 0 && shape.rotated > 0 &&
                     shape.rotated % 2 == 0 && shape.rotated <= kMaxLatentRotated && shape.rowDim() % 8 == 0;
    constexpr int32_t kMostHeads = 4096;  // for which attentionDecode has counters, if each is a group
    const bool heads = shape.heads > 0 && shape.heads <= kMostHeads;
    if (row && heads && shape.plainDim > 0 && shape.plainDim <= 4096) return;
    throw Error(ErrorKind::InvalidArgument,
                "latent attention with " + std::to_string(shape.heads) + " heads, latents of " +
                    std::to_string(shape.rank) + " elements and rotated keys of " + std::to_string(shape.rotated) +
                    " cannot run on the GPU, which takes latents of up to " + std::to_string(kMaxLatentRank) +
                    " and rotated keys of up to " + std::to_string(kMaxLatentRotated) +
                    " elements, together a multiple of 8, and up to " + std::to_string(kMostHeads) + " heads");
}

void requireDelta(const DeltaShape& shape) {
    const bool heads =
        shape.keyHeads > 0 && shape.valueHeads > 0 && shape.dim > 0 && shape.dim % 8 == 0 && shape.dim <= kMaxDeltaDim;
    if (heads && shape.convWidth >= 2 && shape.convWidth <= kMaxDeltaConv) return;
    throw Error(ErrorKind::InvalidArgument, "Gated DeltaNet with heads of " + std::to_string(shape.dim) +
                                                " elements and a convolution over " + std::to_string(shape.convWidth) +
                                                " inputs cannot run on the GPU, which takes heads of 8, 16, .. " +
                                                std::to_string(kMaxDeltaDim) + " elements and convolutions over 2 to " +
                                                std::to_string(kMaxDeltaConv) + " inputs");
}

void requireMamba(const MambaShape& shape) {
    const bool heads = shape.groups > 0 && shape.heads > 0 && shape.heads % shape.groups == 0 && shape.headDim > 0 &&
                       shape.headDim % 4 == 0 && shape.stateDim > 0 && shape.stateDim <= kMaxMambaState;
    if (heads && shape.convWidth >= 2 && shape.convWidth <= kMaxDeltaConv) return;
    throw Error(ErrorKind::InvalidArgument,
                "Mamba 2 with heads of " + std::to_string(shape.headDim) + " elements, states of " +
                    std::to_string(shape.stateDim) + " and a convolution over " + std::to_string(shape.convWidth) +
                    " inputs cannot run on the GPU, which takes heads of 4, 8, 12, .. elements, states of up to " +
                    std::to_string(kMaxMambaState) + " and convolutions over 2 to " + std::to_string(kMaxDeltaConv) +
                    " inputs");
}

// A window for each tile: see ConvTile in mamba.cu.
size_t mambaWindowBytes(int64_t rows, int64_t sequences, const MambaShape& shape) {
    if (rows <= kMambaTile) return 0;
    return sizeof(float) * static_cast<size_t>((rows / kMambaTile + sequences) * shape.convFloats());
}

// One count for each sequence and group.
size_t stepMambaBytes(int64_t sequences, const MambaShape& shape) {
    return sizeof(uint32_t) * static_cast<size_t>(sequences * shape.groups);
}

// One count for each sequence and key head.
size_t deltaStepBytes(int64_t sequences, const DeltaShape& shape) {
    return sizeof(uint32_t) * static_cast<size_t>(sequences * shape.keyHeads);
}

size_t prepareDeltaBytes(int64_t tiles, const DeltaShape& shape) {
    return sizeof(float) * static_cast<size_t>(tiles * shape.convFloats());
}

// Two numbers for each row.
size_t deltaTileListBytes(int64_t rows) { return aligned(static_cast<size_t>(rows) * 2 * sizeof(int32_t)); }

// Each tile and head has two operands in halves, [kDeltaChunk, dim] and [kDeltaChunk, kDeltaChunk], and two floats for
// each row.
size_t deltaChunkBytes(int64_t rows, int64_t tiles, const DeltaShape& shape, bool split) {
    const size_t padded = shape.dim <= 16 ? 16 : shape.dim <= 32 ? 32 : shape.dim <= 64 ? 64 : 128;
    const size_t left =
        (split ? 2 : 1) * sizeof(uint16_t) * kDeltaChunk * (padded + kDeltaChunk) + 2 * kDeltaChunk * sizeof(float);
    return deltaTileListBytes(rows) + static_cast<size_t>(tiles * shape.valueHeads) * left;
}

// Each tile and head has 17 floats for each row. Each tile and group has four operands in halves, [kDeltaChunk,
// stateDim], and [kDeltaChunk, kDeltaChunk] floats.
size_t mambaChunkBytes(int64_t rows, int64_t tiles, const MambaShape& shape) {
    const size_t padded = shape.stateDim <= 64 ? 64 : shape.stateDim <= 128 ? 128 : 256;
    const size_t head = 17 * kDeltaChunk * sizeof(float),
                 group = kDeltaChunk * (4 * sizeof(uint16_t) * padded + kDeltaChunk * sizeof(float));
    return deltaTileListBytes(rows) + static_cast<size_t>(tiles) * (static_cast<size_t>(shape.heads) * head +
                                                                    static_cast<size_t>(shape.groups) * group);
}

// Keys, ids and their sorted copies, for one row at a time. The sort's own scratch is as large as two of these and a
// few tables. The best candidates of each tile of kMostSampledRows rows, which share launches, take no more.
size_t samplingScratchBytes(int64_t vocab) {
    static_assert(sizeof(uint64_t) * kMostSampledRows * kFewCandidates <= 32 * kSamplingTile);
    return 32 * static_cast<size_t>(vocab) + (size_t{2} << 20);
}

}  // namespace sharpi::cuda
