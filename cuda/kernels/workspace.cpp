// How large the workspaces of the kernels are and how they are divided: host arithmetic, built without a toolkit too,
// because plans are made on machines that have none.
#include "core/contract.h"
#include "kernels/attention.h"
#include "kernels/router.h"
#include "kernels/rows.h"
#include "kernels/sampling.h"

namespace sharpi::cuda {

namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

size_t quantizedRowsBytes(int64_t rows, int64_t cols) {
    const auto blocks = static_cast<size_t>(rows * (cols / kContractBlock));
    return aligned(static_cast<size_t>(rows * cols)) + aligned(blocks * sizeof(float)) + aligned(blocks * sizeof(int32_t));
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
    return over;
}

// Counters, partial maxima and sums [rows, heads, pages], and outputs with headDim floats for each (see attention_decode.cu).
size_t decodeAttentionBytes(int64_t rows, const HeadShape& shape, int64_t context, int64_t pageTokens) {
    const int64_t pages = (context + pageTokens - 1) / pageTokens;
    const auto partials = static_cast<size_t>(rows * shape.heads * pages);
    return kDecodeCounterBytes + 2 * aligned(sizeof(float) * partials) + aligned(sizeof(float) * partials * static_cast<size_t>(shape.headDim));
}

namespace {

template <typename Take> ExpertGrouping takeGrouping(int64_t rows, int32_t used, int32_t experts, const Take& take) {
    const int64_t pairs = rows * used;
    ExpertGrouping over;
    over.begin = take(experts + 1);
    over.pairToken = take(pairs);
    over.pairOf = take(pairs);
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

// Keys, ids and their sorted copies; what the sort itself works in is as large as two of them and some tables.
size_t samplingScratchBytes(int64_t vocab) { return 32 * static_cast<size_t>(vocab) + (size_t{2} << 20); }

}  // namespace sharpi::cuda
