// See cpu_backend.h.
#include "engine/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace sharpi {

namespace {

constexpr size_t kAlign = 64;
constexpr int64_t kRowTile = 16;         // the blocked matmul works on tiles of 16 rows
constexpr int64_t kElementGrain = 8192;  // below this a loop is not worth waking threads for
constexpr int64_t kQueryBlock = 64;      // what attentionScratchBytes is sized for

size_t threadScratch(const CpuLimits& l) {
    const size_t bytes = std::max(cpu::matmulScratchBytes(l.maxCols),
                                  cpu::attentionScratchBytes(l.heads, l.kvHeads, l.headDim, l.pageTokens));
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

int64_t pairs(const CpuLimits& l) { return l.maxRows * l.expertsUsed; }

struct ExpertBytes {
    size_t router, hidden, out, quantized;
};

ExpertBytes expertBytes(const CpuLimits& l) {
    if (!l.expertsUsed) return {0, 0, 0, 0};
    return {sizeof(float) * l.maxRows * l.experts, sizeof(float) * pairs(l) * l.expertHidden,
            sizeof(float) * pairs(l) * l.embedding, cpu::quantizedRowsBytes(pairs(l), l.expertHidden)};
}

}  // namespace

size_t CpuBackend::scratchBytes(int threads, const CpuLimits& l) {
    const ExpertBytes e = expertBytes(l);
    return cpu::quantizedRowsBytes(l.maxRows, l.maxCols) + threadScratch(l) * threads + e.router + 2 * e.hidden + e.out +
           e.quantized;
}

CpuBackend::CpuBackend(int threads, const CpuLimits& limits)
    : _kernels(cpu::kernels()), _limits(limits), _pool(threads), _threadScratchStride(threadScratch(limits)) {
    _quantized = Buffer(_memory, cpu::quantizedRowsBytes(limits.maxRows, limits.maxCols), "quantized activations");
    _threadScratch = Buffer(_memory, _threadScratchStride * threads, "kernel scratch");
    if (limits.expertsUsed) {
        const ExpertBytes e = expertBytes(limits);
        _routerLogits = Buffer(_memory, e.router, "router logits");
        _gate = Buffer(_memory, e.hidden, "expert activations");
        _up = Buffer(_memory, e.hidden, "expert activations");
        _expertOut = Buffer(_memory, e.out, "expert outputs");
        _quantizedHidden = Buffer(_memory, e.quantized, "quantized expert activations");
    }
}

template <typename Body> void CpuBackend::forRanges(int64_t n, int64_t grain, const Body& body) {
    const int64_t pieces = std::clamp<int64_t>(n / grain, 1, _pool.threads());
    _pool.run(pieces, [&](int64_t piece, int) { body(n * piece / pieces, n * (piece + 1) / pieces); });
}

void CpuBackend::embed(const Matrix& table, const int32_t* tokens, int64_t count, float* out) {
    const size_t stride = rowBytes(table.type, table.cols);
    forRanges(count, 16, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            _kernels.dequantizeRow(table.type, table.data + tokens[t] * stride, table.cols, out + t * table.cols);
        }
    });
}

void CpuBackend::rmsNorm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) {
    forRanges(rows, std::max<int64_t>(1, kElementGrain / n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) _kernels.rmsNorm(x + r * n, weight, eps, n, y + r * n);
    });
}

cpu::QuantizedRows CpuBackend::quantize(const float* x, int64_t count, int64_t cols, const Buffer& buffer) {
    const cpu::QuantizedRows rows = cpu::quantizedRowsOver(buffer.as<void>(), count, cols);
    forRanges(count, std::max<int64_t>(1, kElementGrain / cols), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            _kernels.quantizeRow(x + t * cols, cols, rows.q + t * rows.qStride, rows.scale + t * rows.scaleStride,
                                 rows.sums + t * rows.sumStride);
        }
    });
    return rows;
}

void CpuBackend::matmuls(const std::vector<cpu::MatmulArgs>& jobs) {
    int64_t rows = 0;
    for (const auto& job : jobs) rows += job.w.rows;
    // A few pieces a thread, so that a thread that was held up does not hold up all; whole tiles, so that none is split.
    const int64_t wanted = std::max<int64_t>(kRowTile, rows / (int64_t{8} * _pool.threads()));
    const int64_t piece = (wanted + kRowTile - 1) / kRowTile * kRowTile;
    struct Piece {
        const cpu::MatmulArgs* job;
        int64_t begin, end;
    };
    std::vector<Piece> pieces;
    for (const auto& job : jobs) {
        for (int64_t begin = 0; begin < job.w.rows; begin += piece) {
            pieces.push_back({&job, begin, std::min(begin + piece, job.w.rows)});
        }
    }
    _pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int worker) {
        _kernels.matmul(*pieces[i].job, pieces[i].begin, pieces[i].end,
                        _threadScratch.as<uint8_t>() + worker * _threadScratchStride);
    });
}

void CpuBackend::linear(const float* x, int64_t count, const std::vector<Linear>& outputs) {
    const int64_t cols = outputs.front().w.cols;
    if (count > _limits.maxRows || cols > _limits.maxCols) {
        throw Error(ErrorKind::Internal, "a product of " + std::to_string(count) + " rows of " + std::to_string(cols) + " exceeds the scratch sized at loading");
    }
    const bool quantized = std::any_of(outputs.begin(), outputs.end(), [](const Linear& o) { return !info(o.w.type).isFloat; });
    cpu::QuantizedRows xQuant;
    if (quantized) xQuant = quantize(x, count, cols, _quantized);
    std::vector<cpu::MatmulArgs> jobs;
    for (const Linear& output : outputs) {
        cpu::MatmulArgs job;
        job.w = output.w;
        job.xFloat = x;
        job.xQuant = &xQuant;
        job.count = count;
        job.bias = output.bias;
        job.y = output.y;
        job.yStride = output.w.rows;
        jobs.push_back(job);
    }
    matmuls(jobs);
}

void CpuBackend::rope(float* x, const int32_t* positions, int64_t count, int32_t heads, int32_t headDim, const RopeTable& table) {
    const int64_t half = table.dims / 2;
    forRanges(count, std::max<int64_t>(1, kElementGrain / (int64_t{heads} * headDim)), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const float* cos = table.cos + positions[t] * half;
            const float* sin = table.sin + positions[t] * half;
            for (int32_t h = 0; h < heads; ++h) {
                _kernels.rope(x + (t * heads + h) * headDim, cos, sin, table.dims, table.adjacent);
            }
        }
    });
}

void CpuBackend::storeKv(const float* k, const float* v, const int32_t* positions, const SequenceRows& rows, const KvPages& pages) {
    const int64_t width = int64_t{pages.kvHeads} * pages.headDim;
    const size_t headBytes = pages.headDim * kvElementBytes(pages.type);
    forRanges(rows.end - rows.begin, std::max<int64_t>(1, kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t t = rows.begin + begin; t < rows.begin + end; ++t) {
            const int64_t page = rows.pageTable[positions[t] / pages.pageTokens];
            const int64_t slot = positions[t] % pages.pageTokens;
            for (int32_t h = 0; h < pages.kvHeads; ++h) {
                const size_t at = ((page * pages.kvHeads + h) * pages.pageTokens + slot) * headBytes;
                _kernels.storeKv(k + t * width + h * pages.headDim, pages.headDim, pages.type, pages.k + at);
                _kernels.storeKv(v + t * width + h * pages.headDim, pages.headDim, pages.type, pages.v + at);
            }
        }
    });
}

void CpuBackend::attention(const float* q, const int32_t* positions, const std::vector<SequenceRows>& sequences,
                           int32_t heads, float scale, const KvPages& pages, float* out) {
    struct Piece {
        const SequenceRows* sequence;
        int64_t begin, end;
        int32_t kvHead;
    };
    std::vector<Piece> pieces;
    for (const SequenceRows& s : sequences) {
        // The last rows see the most keys: start with them, so that the threads finish together.
        const int64_t rows = s.end - s.begin;
        for (int64_t begin = (rows - 1) / kQueryBlock * kQueryBlock; begin >= 0; begin -= kQueryBlock) {
            for (int32_t h = 0; h < pages.kvHeads; ++h) {
                pieces.push_back({&s, begin, std::min(begin + kQueryBlock, rows), h});
            }
        }
    }
    const int64_t stride = int64_t{heads} * pages.headDim;
    _pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int worker) {
        const Piece& piece = pieces[i];
        cpu::AttentionArgs args;
        args.q = q + piece.sequence->begin * stride;
        args.out = out + piece.sequence->begin * stride;
        args.rowStride = stride;
        args.positions = positions + piece.sequence->begin;
        args.heads = heads;
        args.scale = scale;
        args.pages = pages;
        args.pageTable = piece.sequence->pageTable;
        _kernels.attention(args, piece.kvHead, piece.begin, piece.end,
                           _threadScratch.as<uint8_t>() + worker * _threadScratchStride);
    });
}

void CpuBackend::siluMul(float* gate, const float* up, int64_t n) {
    forRanges(n, kElementGrain, [&](int64_t begin, int64_t end) { _kernels.siluMul(gate + begin, up + begin, end - begin); });
}

void CpuBackend::add(float* x, const float* y, int64_t n) {
    forRanges(n, kElementGrain, [&](int64_t begin, int64_t end) { _kernels.add(x + begin, y + begin, end - begin); });
}

void CpuBackend::route(float* logits, int64_t count, const ExpertWeights& weights) {
    const auto experts = static_cast<int32_t>(weights.gate.size());
    const int32_t used = weights.used;
    Routing& r = _routing;
    r.weight.resize(count * used);
    r.pairOf.resize(count * used);
    r.pairToken.resize(count * used);
    r.expertBegin.assign(experts + 1, 0);
    std::vector<int32_t> order(experts);
    std::vector<int32_t> chosen(count * used);
    for (int64_t t = 0; t < count; ++t) {
        float* p = logits + t * experts;
        _kernels.softmax(p, experts);
        for (int32_t e = 0; e < experts; ++e) order[e] = e;
        std::partial_sort(order.begin(), order.begin() + used, order.end(),
                          [p](int32_t a, int32_t b) { return p[a] > p[b] || (p[a] == p[b] && a < b); });
        float sum = 0;
        for (int32_t k = 0; k < used; ++k) sum += p[order[k]];
        for (int32_t k = 0; k < used; ++k) {
            const float share = weights.renormalize ? p[order[k]] / sum : p[order[k]];
            r.weight[t * used + k] = share * weights.weightScale;
            chosen[t * used + k] = order[k];
            ++r.expertBegin[order[k] + 1];
        }
    }
    for (int32_t e = 0; e < experts; ++e) r.expertBegin[e + 1] += r.expertBegin[e];
    std::vector<int32_t> next(r.expertBegin.begin(), r.expertBegin.end() - 1);
    for (int64_t i = 0; i < count * used; ++i) {
        const int32_t pair = next[chosen[i]]++;
        r.pairOf[i] = pair;
        r.pairToken[pair] = static_cast<int32_t>(i / used);
    }
}

void CpuBackend::experts(const float* x, int64_t count, const ExpertWeights& weights, float* y) {
    const int64_t cols = weights.router.cols, hidden = weights.gate.front().rows;
    const int32_t used = weights.used;
    linear(x, count, {{weights.router, nullptr, _routerLogits.as<float>()}});
    route(_routerLogits.as<float>(), count, weights);

    const auto isQuantized = [](const std::vector<Matrix>& m) { return !info(m.front().type).isFloat; };
    cpu::QuantizedRows xQuant;
    if (isQuantized(weights.gate) || isQuantized(weights.up)) xQuant = quantize(x, count, cols, _quantized);
    std::vector<cpu::MatmulArgs> jobs;
    const auto addJob = [&](const Matrix& w, int64_t begin, int64_t end, const float* in, const cpu::QuantizedRows& inQuant,
                            const int32_t* rowIndex, float* out) {
        cpu::MatmulArgs job;
        job.w = w;
        job.xFloat = in;
        job.xQuant = &inQuant;
        job.rowIndex = rowIndex;
        job.count = end - begin;
        job.y = out + begin * w.rows;
        job.yStride = w.rows;
        jobs.push_back(job);
    };
    for (size_t e = 0; e < weights.gate.size(); ++e) {
        const int32_t begin = _routing.expertBegin[e], end = _routing.expertBegin[e + 1];
        if (begin == end) continue;
        const int32_t* tokens = _routing.pairToken.data() + begin;
        addJob(weights.gate[e], begin, end, x, xQuant, tokens, _gate.as<float>());
        addJob(weights.up[e], begin, end, x, xQuant, tokens, _up.as<float>());
    }
    matmuls(jobs);
    siluMul(_gate.as<float>(), _up.as<float>(), count * used * hidden);

    jobs.clear();
    cpu::QuantizedRows hiddenQuant;
    if (isQuantized(weights.down)) hiddenQuant = quantize(_gate.as<float>(), count * used, hidden, _quantizedHidden);
    std::vector<int32_t> rowOf(count * used);
    for (size_t i = 0; i < rowOf.size(); ++i) rowOf[i] = static_cast<int32_t>(i);
    for (size_t e = 0; e < weights.down.size(); ++e) {
        const int32_t begin = _routing.expertBegin[e], end = _routing.expertBegin[e + 1];
        if (begin < end) addJob(weights.down[e], begin, end, _gate.as<float>(), hiddenQuant, rowOf.data() + begin, _expertOut.as<float>());
    }
    matmuls(jobs);

    // By rank, whatever the order in which the experts were computed.
    const int64_t width = weights.down.front().rows;
    forRanges(count, std::max<int64_t>(1, kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            std::memset(y + t * width, 0, sizeof(float) * width);
            for (int32_t k = 0; k < used; ++k) {
                const int64_t pair = _routing.pairOf[t * used + k];
                _kernels.addScaled(y + t * width, _expertOut.as<float>() + pair * width, _routing.weight[t * used + k], width);
            }
        }
    });
}

}  // namespace sharpi
