// The CPU's operations of attention; see cpu_operations.h.
#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "cpu/operations/cpu_operations.h"

namespace sharpi {

namespace {

constexpr int64_t kQueryBlock = 64;  // what attentionScratchBytes is sized for

// A norm over each head, or over the whole row.
void normHeads(CpuWork& work, float* x, const float* weight, int32_t heads, int32_t headDim, const HeadsCall& call) {
    const bool perHead = call.qkNorm == AttentionSpec::QkNorm::PerHead;
    const int64_t width = int64_t{heads} * headDim, rows = work.rows();
    work.norm(x, weight, call.eps, perHead ? rows * heads : rows, perHead ? headDim : width, x);
}

void scaleQueries(CpuWork& work, const HeadsCall& call, int64_t width) {
    float* const q = work.at(RowBuffer::Queries);
    work.forRanges(work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const float factor = call.queryScale[work.batch->positions[t]];
            for (int64_t i = t * width; i < (t + 1) * width; ++i) q[i] *= factor;
        }
    });
}

// A head's query and its gate stand together.
void splitGatedQueries(CpuWork& work, int32_t heads, int32_t headDim) {
    const float* const both = work.at(RowBuffer::GatedQueries);
    float *const q = work.at(RowBuffer::Queries), *const gates = work.floats(work.scratch().queryGate);
    const size_t bytes = sizeof(float) * static_cast<size_t>(headDim);
    work.forRanges(work.rows() * heads, std::max<int64_t>(1, CpuWork::kElementGrain / headDim),
                   [&](int64_t begin, int64_t end) {
                       for (int64_t head = begin; head < end; ++head) {
                           std::memcpy(q + head * headDim, both + 2 * head * headDim, bytes);
                           std::memcpy(gates + head * headDim, both + (2 * head + 1) * headDim, bytes);
                       }
                   });
}

// back: by the negated angles.
void rope(CpuWork& work, float* x, int32_t heads, int32_t headDim, const RopeTable& table, bool back = false) {
    const int64_t half = table.dims / 2;
    work.forRanges(work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / (int64_t{heads} * headDim)),
                   [&](int64_t begin, int64_t end) {
                       std::vector<float> negated(static_cast<size_t>(back ? half : 0));
                       for (int64_t t = begin; t < end; ++t) {
                           const float* cos = table.cos + work.batch->positions[t] * half;
                           const float* sin = table.sin + work.batch->positions[t] * half;
                           if (back) {
                               std::transform(sin, sin + half, negated.begin(), std::negate<>());
                               sin = negated.data();
                           }
                           for (int32_t h = 0; h < heads; ++h) {
                               float* const head = x + (t * heads + h) * headDim + table.begin(headDim);
                               work.kernels.rope(head, cos, sin, table.dims, table.adjacent);
                           }
                       }
                   });
}

void storeKv(CpuWork& work, const SequenceRows& rows, const KvPages& pages) {
    const int64_t width = int64_t{pages.kvHeads} * pages.headDim;
    const float *const k = work.at(RowBuffer::Keys), *const v = work.at(RowBuffer::Values);
    const size_t headBytes = pages.headDim * kvElementBytes(pages.type);
    work.forRanges(
        rows.end - rows.begin, std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
            for (int64_t t = rows.begin + begin; t < rows.begin + end; ++t) {
                const int32_t position = work.batch->positions[t];
                const int64_t page = rows.pageTables[static_cast<size_t>(pages.list)][position / pages.pageTokens];
                const int64_t token = position % pages.pageTokens;
                for (int32_t h = 0; h < pages.kvHeads; ++h) {
                    const size_t at = ((page * pages.kvHeads + h) * pages.pageTokens + token) * headBytes;
                    work.kernels.storeKv(k + t * width + h * pages.headDim, pages.headDim, pages.type, pages.k + at);
                    if (pages.valuePrefix > 0) continue;
                    work.kernels.storeKv(v + t * width + h * pages.headDim, pages.headDim, pages.type, pages.v + at);
                }
            }
        });
}

}  // namespace

void CpuOperations::prepareHeads(const HeadsCall& call, const KvPages& pages) {
    float *const q = _work.at(RowBuffer::Queries), *const k = _work.at(RowBuffer::Keys),
                 *const v = _work.at(RowBuffer::Values);
    const int64_t rows = _work.rows(), headDim = pages.headDim, keys = rows * pages.kvHeads;
    if (call.gated) splitGatedQueries(_work, call.heads, pages.headDim);
    if (call.appends && call.valuesAreKeys) std::memcpy(v, k, sizeof(float) * static_cast<size_t>(keys * headDim));
    const auto prepare = [&](float* x, const float* weight, int32_t heads) {
        const bool normed = call.qkNorm != AttentionSpec::QkNorm::None;
        if (normed && !call.normAfterRotation) normHeads(_work, x, weight, heads, pages.headDim, call);
        if (call.rope.dims > 0) rope(_work, x, heads, pages.headDim, call.rope);
        if (normed && call.normAfterRotation) normHeads(_work, x, weight, heads, pages.headDim, call);
    };
    prepare(q, call.qNorm, call.heads);
    if (call.queryScale) scaleQueries(_work, call, call.heads * headDim);
    if (!call.appends) return;
    prepare(k, call.kNorm, pages.kvHeads);
    if (call.valueNorm) _work.norm(v, nullptr, call.eps, keys, headDim, v);
    for (const SequenceRows& sequence : _work.sequences) storeKv(_work, sequence, pages);
}

void CpuOperations::prepareLatent(const LatentCall& call, const KvPages& pages) {
    float *const queries = _work.at(RowBuffer::Queries), *const keys = _work.at(RowBuffer::Keys);
    const float* const plain = _work.at(RowBuffer::HeadQueries);
    const int64_t rank = pages.valuePrefix, dim = pages.headDim, rotated = dim - rank, half = rotated / 2;
    const auto turn = [&](float* x, int64_t position) {
        _work.kernels.rope(x, call.rope.cos + position * half, call.rope.sin + position * half, call.rope.dims,
                           call.rope.adjacent);
    };
    const auto prepareRow = [&](int64_t t) {
        const int64_t position = _work.batch->positions[static_cast<size_t>(t)];
        for (int64_t head = t * call.heads; head < (t + 1) * call.heads; ++head) {
            float *const q = queries + head * dim, *const last = q + rank;
            const float* const from = plain + head * (call.plainDim + rotated) + call.plainDim;
            std::memcpy(last, from, sizeof(float) * static_cast<size_t>(rotated));
            turn(last, position);
            for (int64_t i = 0; call.queryScale && i < dim; ++i) q[i] *= call.queryScale[position];
        }
        float* const key = keys + t * dim;
        _work.kernels.rmsNorm(key, call.norm, call.eps, rank, key);
        turn(key + rank, position);
    };
    _work.forRanges(_work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / (call.heads * dim)),
                    [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) prepareRow(t);
                    });
    for (const SequenceRows& sequence : _work.sequences) storeKv(_work, sequence, pages);
}

void CpuOperations::attend(const HeadsCall& call, const KvPages& pages, const Weight&) {
    struct Piece {
        const SequenceRows* sequence;
        int64_t begin, end;
        int32_t kvHead;
    };
    std::vector<Piece> pieces;
    for (const SequenceRows& s : _work.sequences) {
        // The last rows see the most keys: start with them, so that the threads finish together.
        const int64_t rows = s.end - s.begin;
        for (int64_t begin = (rows - 1) / kQueryBlock * kQueryBlock; begin >= 0; begin -= kQueryBlock) {
            for (int32_t h = 0; h < pages.kvHeads; ++h) {
                pieces.push_back({&s, begin, std::min(begin + kQueryBlock, rows), h});
            }
        }
    }
    const int64_t stride = int64_t{call.heads} * pages.headDim,
                  outStride = int64_t{call.heads} * kvValueDim(pages.headDim, pages.valuePrefix);
    float *const q = _work.at(RowBuffer::Queries), *const attended = _work.floats(_work.scratch().attended);
    const auto* const chosen = reinterpret_cast<const int32_t*>(_work.at(RowBuffer::ChosenBlocks));
    _work.pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int worker) {
        const Piece& piece = pieces[i];
        cpu::AttentionArgs args;
        args.q = q + piece.sequence->begin * stride;
        args.out = attended + piece.sequence->begin * outStride;
        args.rowStride = stride;
        args.outStride = outStride;
        args.positions = _work.batch->positions.data() + piece.sequence->begin;
        args.heads = call.heads;
        args.scale = call.scale;
        args.reach = call.reach;
        args.softcap = call.softcap;
        args.sinks = call.sinks;
        args.pages = pages;
        args.pageTable = piece.sequence->pageTables[static_cast<size_t>(pages.list)];
        if (call.blocks) {
            args.blocks = *call.blocks;
            args.blockTable = piece.sequence->pageTables[static_cast<size_t>(call.blocks->list)];
            args.topK = call.topK;
            if (call.topK > 0) args.chosen = chosen + piece.sequence->begin * call.topK;
        }
        _work.kernels.attention(args, piece.kvHead, piece.begin, piece.end, _work.threadScratch(worker));
    });
    if (call.gated) {
        const float* const gates = _work.floats(_work.scratch().queryGate);
        _work.forRanges(_work.rows() * stride, CpuWork::kElementGrain, [&](int64_t begin, int64_t end) {
            _work.kernels.sigmoidMul(attended + begin, gates + begin, end - begin);
        });
    }
    if (call.rotatesBack) rope(_work, attended, call.heads, pages.headDim, call.rope, true);
    _attended = attended;
}

}  // namespace sharpi
