// Compressed keys on the CPU: the rows of blocks of tokens, and the choice among them. See cpu_blocks.h and
// cpu/kernels/blocks.cpp.
#include "cpu/operations/cpu_blocks.h"

#include <algorithm>
#include <numeric>

#include "core/rules/routing_rule.h"

namespace sharpi {

namespace {

// Keeps the keys and gates of a token.
void appendPending(CpuWork& work, const CompressCall& call, const int32_t* table, int64_t t) {
    const int64_t width = call.pending.headDim;
    const int64_t at = call.pending.rowAt(table, work.batch->positions[static_cast<size_t>(t)]);
    const size_t bytes = static_cast<size_t>(at) * kvElementBytes(call.pending.type);
    work.kernels.storeKv(work.at(RowBuffer::CompressorKeys) + t * width, width, call.pending.type,
                         call.pending.k + bytes);
    work.kernels.storeKv(work.at(RowBuffer::CompressorGates) + t * width, width, call.pending.type,
                         call.pending.v + bytes);
}

// The block's tokens; with an overlap those of the block before it come first, by their first halves.
cpu::BlockArgs tokensOf(const CompressCall& call, const int32_t* table, int64_t block) {
    const int64_t dim = call.rows.headDim, width = call.pending.headDim, size = call.blockTokens;
    cpu::BlockArgs args;
    args.headDim = dim;
    const auto add = [&](int64_t first, int64_t half) {
        for (int64_t j = 0; j < size; ++j) {
            const int64_t at = call.pending.rowAt(table, first + j) + half;
            args.keys[args.tokens] = reinterpret_cast<const float*>(call.pending.k) + at;
            args.gates[args.tokens] = reinterpret_cast<const float*>(call.pending.v) + at;
            args.offsets[args.tokens++] = call.gateOffsets + j * width + half;
        }
    };
    if (call.overlaps && block > 0) add((block - 1) * size, 0);
    add(block * size, call.overlaps ? dim : 0);
    return args;
}

// x: [headDim], overwritten.
void makeRow(CpuWork& work, const CompressCall& call, const SequenceRows& sequence, int64_t block, float* x) {
    const int64_t dim = call.rows.headDim, half = call.rope.dims / 2, position = block * call.blockTokens;
    const int32_t* const pending = sequence.pageTables[static_cast<size_t>(call.pending.list)];
    const int32_t* const rows = sequence.pageTables[static_cast<size_t>(call.rows.list)];
    work.kernels.poolBlock(tokensOf(call, pending, block), x);
    work.kernels.rmsNorm(x, call.norm, call.eps, dim, x);
    work.kernels.rope(x + call.rope.begin(dim), call.rope.cos + position * half, call.rope.sin + position * half,
                      call.rope.dims, call.rope.adjacent);
    const size_t at = static_cast<size_t>(call.rows.rowAt(rows, block)) * kvElementBytes(call.rows.type);
    work.kernels.storeKv(x, dim, call.rows.type, call.rows.k + at);
}

// The numbers [0, count) of the largest scores, ascending.
void chooseBest(const float* scores, int64_t count, int64_t best, int32_t* order, int32_t* chosen) {
    std::iota(order, order + count, 0);
    std::nth_element(order, order + best, order + count, [scores](int32_t a, int32_t b) {
        const uint32_t keyA = scoreKey(scores[a]), keyB = scoreKey(scores[b]);
        return keyA > keyB || (keyA == keyB && a < b);
    });
    std::sort(order, order + best);
    std::copy_n(order, best, chosen);
}

}  // namespace

void CpuBlocks::compress(const CompressCall& call) {
    for (const SequenceRows& sequence : _work.sequences) {
        const int32_t* const pending = sequence.pageTables[static_cast<size_t>(call.pending.list)];
        const int64_t first = _work.batch->positions[static_cast<size_t>(sequence.begin)];
        const int64_t rows = sequence.end - sequence.begin, width = call.pending.headDim;
        _work.forRanges(rows, std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) appendPending(_work, call, pending, sequence.begin + t);
        });
        // Each is made where the keys of its last token have been.
        const int64_t block = first / call.blockTokens, blocks = (first + rows) / call.blockTokens - block;
        _work.forRanges(blocks, 1, [&](int64_t begin, int64_t end) {
            for (int64_t b = block + begin; b < block + end; ++b) {
                const int64_t last = sequence.begin + (b + 1) * call.blockTokens - 1 - first;
                makeRow(_work, call, sequence, b, _work.at(RowBuffer::CompressorKeys) + last * width);
            }
        });
    }
}

void CpuBlocks::choose(const IndexCall& call) {
    const int64_t dim = call.rows.headDim, half = call.rope.dims / 2, heads = call.heads;
    float *const queries = _work.at(RowBuffer::IndexQueries), *const weights = _work.at(RowBuffer::IndexWeights);
    auto* const chosen = reinterpret_cast<int32_t*>(_work.at(RowBuffer::ChosenBlocks));
    const auto chooseRow = [&](const SequenceRows& sequence, int64_t t, float* scratch) {
        const int64_t position = _work.batch->positions[static_cast<size_t>(t)];
        const int64_t over = (position + 1) / call.rows.rowTokens;
        if (over <= call.topK) return std::iota(chosen + t * call.topK, chosen + t * call.topK + over, 0);
        for (int64_t h = t * heads; h < (t + 1) * heads; ++h) {
            _work.kernels.rope(queries + h * dim + call.rope.begin(dim), call.rope.cos + position * half,
                               call.rope.sin + position * half, call.rope.dims, call.rope.adjacent);
            weights[h] *= call.scale;
        }
        cpu::IndexArgs args;
        args.queries = queries + t * heads * dim;
        args.weights = weights + t * heads;
        args.heads = call.heads;
        args.rows = call.rows;
        args.table = sequence.pageTables[static_cast<size_t>(call.rows.list)];
        args.count = over;
        float* const scores = scratch + (dim + 15) / 16 * 256;
        _work.kernels.indexScores(args, scores, scratch);
        auto* const order = reinterpret_cast<int32_t*>(scores + (over + 15) / 16 * 16);
        chooseBest(scores, over, call.topK, order, chosen + t * call.topK);
    };
    for (const SequenceRows& sequence : _work.sequences) {
        _work.pool.run(sequence.end - sequence.begin, [&](int64_t i, int worker) {
            chooseRow(sequence, sequence.begin + i, static_cast<float*>(_work.threadScratch(worker)));
        });
    }
}

}  // namespace sharpi
