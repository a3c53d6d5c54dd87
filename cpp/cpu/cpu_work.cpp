// See cpu_work.h.
#include "cpu/cpu_work.h"

#include "core/error.h"

namespace sharpi {

namespace {

constexpr size_t kAlign = 64;
constexpr int64_t kHeadRows = 64;

size_t threadScratchBytes(const StepLimits& l) {
    const size_t bytes =
        std::max({cpu::matmulScratchBytes(l.maxCols), cpu::stateScratchBytes(std::max(l.deltaDim, l.mambaStateDim)),
                  cpu::attentionScratchBytes(l.heads, l.kvHeads, l.headDim, l.pageTokens),
                  cpu::indexScratchBytes(l.compressorDim, l.blocks),
                  sizeof(float) * static_cast<size_t>(l.streams * l.embedding)});
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

CpuScratch::CpuScratch(int threadCount, const StepLimits& l) {
    ScratchLayout s;
    const int64_t pairs = l.maxRows * l.expertsUsed;
    headRows = std::min(kHeadRows, l.maxRows);
    threadStride = threadScratchBytes(l);
    rows.take(s, l, RowBuffer::Residual, RowBuffer::SharedOut);
    normed = s.floats(l.maxRows * l.embedding);
    block = s.floats(l.maxRows * l.embedding);
    attended = s.floats(l.maxRows * std::max({l.queryWidth, l.deltaWidth, l.mambaWidth}));
    plainQueries = s.floats(l.maxRows * l.latentHeads * l.plainDim);
    queryGate = s.floats(l.maxRows * l.gatedQueryWidth / 2);
    joined = s.floats(l.drafts ? 2 * l.maxRows * l.embedding : 0);
    sharedScale = s.floats(l.sharedHidden ? l.maxRows : 0);
    logits = s.floats(headRows * l.vocab);
    const int64_t heads = l.maxRows * l.latentHeads;
    const int64_t groups = l.maxRows * l.outputGroups;
    streams = s.floats(l.maxRows * l.streams * l.embedding);
    quantized = s.take(std::max({cpu::quantizedRowsBytes(l.maxRows, l.maxCols),
                                 cpu::quantizedRowsBytes(heads, std::max(l.latentRank, l.plainDim)),
                                 cpu::quantizedRowsBytes(groups, l.groupWidth)}));
    quantizedHidden = s.take(pairs ? cpu::quantizedRowsBytes(pairs, l.expertHidden) : 0);
    threads = s.take(threadStride * static_cast<size_t>(threadCount));
    total = s.bytes();
}

void CpuWork::takeBuffers(const StepLimits& wanted, uint8_t* memory) {
    limits = wanted;
    _scratch = std::make_unique<CpuScratch>(pool.threads(), limits);
    _memory = memory;
}

void CpuWork::begin(const Batch& next, const KvCache& kv) {
    batch = &next;
    sequences.clear();
    next.forSequences([&](int64_t first, int64_t end) {
        const int32_t sequence = next.sequences[static_cast<size_t>(first)];
        sequences.push_back({first, end, {}, kv.states().steps(sequence)});
        for (int32_t list = 0; list < kv.lists(); ++list)
            sequences.back().pageTables.push_back(kv.pageTable(sequence, list));
    });
}

void CpuWork::readRows(const Weight& table, float* out, int64_t outStride) {
    if (stream) stream->arrive(table.group);
    const size_t stride = rowBytes(table.type, table.cols);
    const uint8_t* const data = table.resident() ? table.data : table.file;
    forRanges(rows(), 16, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            const auto token = static_cast<size_t>(batch->tokens[static_cast<size_t>(t)]);
            kernels.dequantizeRow(table.type, data + token * stride, table.cols, out + t * outStride);
        }
    });
}

void CpuWork::norm(const float* x, const NormCall& norm, int64_t count, int64_t n, float* y) {
    if (norm.kind == NormKind::Rms) return this->norm(x, norm.weight, norm.eps, count, n, y);
    forRanges(count, std::max<int64_t>(1, kElementGrain / n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            kernels.layerNorm(x + r * n, norm.weight, norm.bias, norm.eps, n, y + r * n);
    });
}

void CpuWork::norm(const float* x, const float* weight, float eps, int64_t count, int64_t n, float* y) {
    forRanges(count, std::max<int64_t>(1, kElementGrain / n), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) kernels.rmsNorm(x + r * n, weight, eps, n, y + r * n);
    });
}

void CpuWork::gatedActivation(Activation activation, float* gate, const float* up, int64_t n) {
    forRanges(n, kElementGrain, [&](int64_t begin, int64_t end) {
        kernels.gatedActivation(activation, {gate + begin, up ? up + begin : nullptr}, end - begin);
    });
}

void CpuWork::add(float* x, const float* y, int64_t n) {
    forRanges(n, kElementGrain, [&](int64_t begin, int64_t end) { kernels.add(x + begin, y + begin, end - begin); });
}

void CpuWork::multiplyRows(float* x, float factor, int64_t n) {
    forRanges(n, kElementGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) x[i] *= factor;
    });
}

void CpuWork::softcap(float* x, float cap, int64_t n) {
    forRanges(n, kElementGrain, [&](int64_t begin, int64_t end) { kernels.softcap(x + begin, cap, end - begin); });
}

cpu::QuantizedRows CpuWork::quantize(const float* x, int64_t count, int64_t cols, size_t offset) {
    const cpu::QuantizedRows to = cpu::quantizedRowsOver(_memory + offset, count, cols);
    forRanges(count, std::max<int64_t>(1, kElementGrain / cols), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            kernels.quantizeRow(x + t * cols, cols, to.q + t * to.qStride, to.scale + t * to.scaleStride,
                                to.sums + t * to.sumStride);
        }
    });
    return to;
}

void CpuWork::multiply(const std::vector<cpu::MatmulArgs>& jobs) {
    int64_t all = 0;
    for (const cpu::MatmulArgs& job : jobs) all += job.w.rows;
    // A few pieces for each thread, so that a thread that was held up does not hold up all; whole tiles, so that none
    // is split.
    const int64_t wanted = std::max<int64_t>(cpu::kMatmulTileRows, all / (int64_t{8} * pool.threads()));
    const int64_t piece = (wanted + cpu::kMatmulTileRows - 1) / cpu::kMatmulTileRows * cpu::kMatmulTileRows;
    struct Piece {
        const cpu::MatmulArgs* job;
        int64_t begin, end;
    };
    std::vector<Piece> pieces;
    for (const cpu::MatmulArgs& job : jobs) {
        for (int64_t begin = 0; begin < job.w.rows; begin += piece)
            pieces.push_back({&job, begin, std::min(begin + piece, job.w.rows)});
    }
    pool.run(static_cast<int64_t>(pieces.size()), [&](int64_t i, int worker) {
        const Piece& p = pieces[static_cast<size_t>(i)];
        kernels.matmul(*p.job, p.begin, p.end, threadScratch(worker));
    });
}

// Matrices that are in memory share the threads; the parts of others are multiplied as they come.
void CpuWork::linear(const float* x, int64_t count, const std::vector<Output>& outputs) {
    const int64_t cols = outputs.front().w.cols;
    if (count > limits.maxRows || cols > limits.maxCols) {
        throw Error(ErrorKind::Internal, "a product of " + std::to_string(count) + " rows of " + std::to_string(cols) +
                                             " exceeds the scratch sized at loading");
    }
    const auto isQuantized = [](const Output& o) { return !info(o.w.type).isFloat; };
    cpu::QuantizedRows xQuant;
    if (std::any_of(outputs.begin(), outputs.end(), isQuantized))
        xQuant = quantize(x, count, cols, _scratch->quantized);
    std::vector<cpu::MatmulArgs> together;
    for (const Output& output : outputs) {
        forParts(output.w, [&](const Matrix& part, int64_t rowBegin) {
            cpu::MatmulArgs job;
            job.w = part;
            job.xFloat = x;
            job.xQuant = &xQuant;
            job.count = count;
            job.bias = output.bias ? output.bias + rowBegin : nullptr;
            job.y = output.y + rowBegin;
            job.yStride = output.w.rows;
            if (output.w.resident()) together.push_back(job);
            else multiply({job});
        });
    }
    multiply(together);
}

void CpuWork::linearByHead(const float* x, int64_t count, const HeadOutput& output) {
    const int64_t heads = output.heads, rowsOfHead = output.w.rows / heads, cols = output.w.cols;
    if (count > limits.maxRows || heads > std::max(limits.latentHeads, limits.outputGroups))
        throw Error(ErrorKind::Internal, "a product by head exceeds the scratch sized at loading");
    cpu::QuantizedRows xQuant;
    if (!info(output.w.type).isFloat) xQuant = quantize(x, count * heads, cols, _scratch->quantized);
    std::vector<int32_t> pieces(static_cast<size_t>(count * heads));  // of each head: its piece of every row
    for (int64_t i = 0; i < count * heads; ++i)
        pieces[static_cast<size_t>(i)] = static_cast<int32_t>(i % count * heads + i / count);
    forParts(output.w, [&](const Matrix& part, int64_t rowBegin) {
        std::vector<cpu::MatmulArgs> jobs;
        for (int64_t row = rowBegin, next = 0; row < rowBegin + part.rows; row = next) {
            const int64_t head = row / rowsOfHead;
            next = std::min((head + 1) * rowsOfHead, rowBegin + part.rows);
            cpu::MatmulArgs job;
            job.w = part;
            job.w.rows = next - row;
            job.w.data += static_cast<size_t>(row - rowBegin) * rowBytes(part.type, cols);
            job.xFloat = x;
            job.xQuant = &xQuant;
            job.rowIndex = pieces.data() + head * count;
            job.count = count;
            job.y = output.y + head * output.stride + row % rowsOfHead;
            job.yStride = heads * output.stride;
            jobs.push_back(job);
        }
        multiply(jobs);
    });
}

}  // namespace sharpi
