// What the CPU's blocks are made of: each operation, shared among threads.
#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cpu/cpu_backend.h"

namespace sharpi {

namespace {

constexpr int64_t kRowTile = 16;     // the blocked matmul works on tiles of 16 rows
constexpr int64_t kQueryBlock = 64;  // what attentionScratchBytes is sized for

}  // namespace

// The batch's tokens' rows of a table.
void CpuBackend::readRows(const Weight& table, float* out, int64_t outStride) {
    arrive(table.group);
    const size_t stride = rowBytes(table.type, table.cols);
    const uint8_t* rowsAt = table.resident() ? table.data : table.file;
    forRanges(rows(), 16, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            _kernels.dequantizeRow(table.type, rowsAt + _batch->tokens[t] * stride, table.cols, out + t * outStride);
        }
    });
}

void CpuBackend::norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) {
    forRanges(rows, std::max<int64_t>(1, kElementGrain / n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) _kernels.rmsNorm(x + r * n, weight, eps, n, y + r * n);
    });
}

cpu::QuantizedRows CpuBackend::quantize(const float* x, int64_t count, int64_t cols, void* buffer) {
    const cpu::QuantizedRows rows = cpu::quantizedRowsOver(buffer, count, cols);
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
    // A few pieces a thread, so that a thread that was held up does not hold up all; whole tiles, so that none is
    // split.
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
        _kernels.matmul(*pieces[i].job, pieces[i].begin, pieces[i].end, _threadScratch + worker * _threadScratchStride);
    });
}

void CpuBackend::linear(const float* x, int64_t count, const std::vector<Linear>& outputs) {
    const int64_t cols = outputs.front().w.cols;
    if (count > _limits.maxRows || cols > _limits.maxCols) {
        throw Error(ErrorKind::Internal, "a product of " + std::to_string(count) + " rows of " + std::to_string(cols) +
                                             " exceeds the scratch sized at loading");
    }
    const bool quantized =
        std::any_of(outputs.begin(), outputs.end(), [](const Linear& o) { return !info(o.w.type).isFloat; });
    cpu::QuantizedRows xQuant;
    if (quantized) xQuant = quantize(x, count, cols, _quantized);
    const auto jobFor = [&](const Linear& output, const Matrix& w, int64_t rowBegin) {
        cpu::MatmulArgs job;
        job.w = w;
        job.xFloat = x;
        job.xQuant = &xQuant;
        job.count = count;
        job.bias = output.bias ? output.bias + rowBegin : nullptr;
        job.y = output.y + rowBegin;
        job.yStride = output.w.rows;
        return job;
    };
    std::vector<cpu::MatmulArgs> jobs;
    for (const Linear& output : outputs) {
        if (output.w.resident()) {
            arrive(output.w.group);
            jobs.push_back(jobFor(output, output.w, 0));
        } else {
            _stream->forPieces(output.w.group, output.w.member, [&](const Matrix& part, int64_t rowBegin) {
                matmuls({jobFor(output, part, rowBegin)});
            });
        }
    }
    matmuls(jobs);
}

void CpuBackend::rope(float* x, int32_t heads, int32_t headDim, const RopeTable& table) {
    const int64_t half = table.dims / 2;
    forRanges(rows(), std::max<int64_t>(1, kElementGrain / (int64_t{heads} * headDim)),
              [&](int64_t begin, int64_t end) {
                  for (int64_t t = begin; t < end; ++t) {
                      const float* cos = table.cos + _batch->positions[t] * half;
                      const float* sin = table.sin + _batch->positions[t] * half;
                      for (int32_t h = 0; h < heads; ++h) {
                          _kernels.rope(x + (t * heads + h) * headDim, cos, sin, table.dims, table.adjacent);
                      }
                  }
              });
}

void CpuBackend::storeKv(const SequenceRows& rows, const KvPages& pages) {
    const int64_t width = int64_t{pages.kvHeads} * pages.headDim;
    const size_t headBytes = pages.headDim * kvElementBytes(pages.type);
    forRanges(rows.end - rows.begin, std::max<int64_t>(1, kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t t = rows.begin + begin; t < rows.begin + end; ++t) {
            const int32_t position = _batch->positions[t];
            const int64_t page = rows.pageTable[position / pages.pageTokens];
            const int64_t slot = position % pages.pageTokens;
            for (int32_t h = 0; h < pages.kvHeads; ++h) {
                const size_t at = ((page * pages.kvHeads + h) * pages.pageTokens + slot) * headBytes;
                _kernels.storeKv(_k + t * width + h * pages.headDim, pages.headDim, pages.type, pages.k + at);
                _kernels.storeKv(_v + t * width + h * pages.headDim, pages.headDim, pages.type, pages.v + at);
            }
        }
    });
}

void CpuBackend::attend(const AttentionWeights& w, const KvPages& pages) {
    struct Piece {
        const SequenceRows* sequence;
        int64_t begin, end;
        int32_t kvHead;
    };
    std::vector<Piece> pieces;
    for (const SequenceRows& s : _sequences) {
        // The last rows see the most keys: start with them, so that the threads finish together.
        const int64_t rows = s.end - s.begin;
        for (int64_t begin = (rows - 1) / kQueryBlock * kQueryBlock; begin >= 0; begin -= kQueryBlock) {
            for (int32_t h = 0; h < pages.kvHeads; ++h) {
                pieces.push_back({&s, begin, std::min(begin + kQueryBlock, rows), h});
            }
        }
    }
    const int64_t stride = int64_t{w.heads} * pages.headDim;
    _pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int worker) {
        const Piece& piece = pieces[i];
        cpu::AttentionArgs args;
        args.q = _q + piece.sequence->begin * stride;
        args.out = _attended + piece.sequence->begin * stride;
        args.rowStride = stride;
        args.positions = _batch->positions.data() + piece.sequence->begin;
        args.heads = w.heads;
        args.scale = w.scale;
        args.pages = pages;
        args.pageTable = piece.sequence->pageTable;
        _kernels.attention(args, piece.kvHead, piece.begin, piece.end, _threadScratch + worker * _threadScratchStride);
    });
}

void CpuBackend::siluMul(float* gate, const float* up, int64_t n) {
    forRanges(n, kElementGrain,
              [&](int64_t begin, int64_t end) { _kernels.siluMul(gate + begin, up + begin, end - begin); });
}

void CpuBackend::addToX(const float* y) {
    forRanges(rows() * _limits.embedding, kElementGrain,
              [&](int64_t begin, int64_t end) { _kernels.add(_x + begin, y + begin, end - begin); });
}

void CpuBackend::route(float* logits, int64_t count, const ExpertWeights& weights) {
    const int32_t experts = weights.gate.count;
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

// Each chosen expert's matrices are read once for all rows that chose it. Resident stacks share the threads; those that
// come over are multiplied piece by piece.
void CpuBackend::multiplyExperts(const float* x, const cpu::QuantizedRows& xQuant, const int32_t* rowIndex,
                                 std::initializer_list<ExpertProduct> products) {
    std::vector<cpu::MatmulArgs> jobs;
    const auto add = [&](const MatrixStack& part, int32_t firstExpert, float* y) {
        for (int32_t i = 0; i < part.count; ++i) {
            const int32_t begin = _routing.expertBegin[firstExpert + i],
                          end = _routing.expertBegin[firstExpert + i + 1];
            if (begin == end) continue;
            cpu::MatmulArgs job;
            job.w = part.at(i);
            job.xFloat = x;
            job.xQuant = &xQuant;
            job.rowIndex = rowIndex + begin;
            job.count = end - begin;
            job.y = y + begin * job.w.rows;
            job.yStride = job.w.rows;
            jobs.push_back(job);
        }
    };
    for (const ExpertProduct& product : products) {
        if (product.w.resident()) {
            arrive(product.w.group);
            add(product.w, 0, product.y);
            continue;
        }
        _stream->forExperts(product.w.group, [&](const MatrixStack& part, int32_t firstExpert) {
            add(part, firstExpert, product.y);
            matmuls(jobs);
            jobs.clear();
        });
    }
    matmuls(jobs);
}

void CpuBackend::expertProducts(const ExpertWeights& weights) {
    const int64_t hidden = weights.gate.first.rows, pairs = rows() * weights.used;
    const auto isQuantized = [](const MatrixStack& m) { return !info(m.first.type).isFloat; };
    cpu::QuantizedRows xQuant, hiddenQuant;
    if (isQuantized(weights.gate) || isQuantized(weights.up))
        xQuant = quantize(_normed, rows(), weights.router.cols, _quantized);
    multiplyExperts(_normed, xQuant, _routing.pairToken.data(), {{weights.gate, _gate}, {weights.up, _up}});
    siluMul(_gate, _up, pairs * hidden);
    if (isQuantized(weights.down)) hiddenQuant = quantize(_gate, pairs, hidden, _quantizedHidden);
    std::vector<int32_t> rowOf(pairs);
    for (size_t i = 0; i < rowOf.size(); ++i) rowOf[i] = static_cast<int32_t>(i);
    multiplyExperts(_gate, hiddenQuant, rowOf.data(), {{weights.down, _expertOut}});
}

// By rank, whatever the order in which the experts were computed.
void CpuBackend::sumExperts(const ExpertWeights& weights) {
    const int64_t width = weights.down.first.rows;
    forRanges(rows(), std::max<int64_t>(1, kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            std::memset(_block + t * width, 0, sizeof(float) * width);
            for (int32_t k = 0; k < weights.used; ++k) {
                const int64_t pair = _routing.pairOf[t * weights.used + k];
                _kernels.addScaled(_block + t * width, _expertOut + pair * width, _routing.weight[t * weights.used + k],
                                   width);
            }
        }
    });
}

}  // namespace sharpi
