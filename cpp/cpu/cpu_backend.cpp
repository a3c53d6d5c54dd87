// See cpu_backend.h. The blocks; what they are made of is in cpu_operations.cpp.
#include "cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cpu/sample.h"
#include "operations/scratch.h"

namespace sharpi {

namespace {

constexpr size_t kAlign = 64;
constexpr int64_t kHeadRows = 64;

size_t threadScratch(const StepLimits& l) {
    const size_t bytes = std::max({cpu::matmulScratchBytes(l.maxCols), cpu::deltaScratchBytes(l.deltaDim),
                                   cpu::attentionScratchBytes(l.heads, l.kvHeads, l.headDim, l.pageTokens)});
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

// As the CPU reads them from a file, wherever they lie.
DeviceLayout fileLayout() {
    DeviceLayout layout;
    layout.bytes = fileBytes;
    return layout;
}

}  // namespace

struct CpuBackend::Layout {
    size_t x, normed, block, q, k, v, attended, gate, up, logits, quantized, threads;
    size_t routerLogits, expertOut, quantizedHidden, gatedQueries, queryGate, sharedScale;
    size_t deltaMixed, deltaGate, deltaAlpha, deltaBeta, joined, total;

    Layout(int threadCount, const StepLimits& l) {
        ScratchLayout s;
        const int64_t pairs = l.maxRows * l.expertsUsed;
        const int64_t hidden =
            std::max({l.maxRows * l.denseHidden, l.maxRows * l.sharedHidden, pairs * l.expertHidden});
        x = s.floats(l.maxRows * l.embedding);
        normed = s.floats(l.maxRows * l.embedding);
        block = s.floats(l.maxRows * l.embedding);
        q = s.floats(l.maxRows * l.queryWidth);
        attended = s.floats(l.maxRows * std::max(l.queryWidth, l.deltaWidth));
        k = s.floats(l.maxRows * l.kvWidth);
        v = s.floats(l.maxRows * l.kvWidth);
        gate = s.floats(hidden);
        up = s.floats(hidden);
        logits = s.floats(std::min(kHeadRows, l.maxRows) * l.vocab);
        quantized = s.take(cpu::quantizedRowsBytes(l.maxRows, l.maxCols));
        threads = s.take(threadScratch(l) * static_cast<size_t>(threadCount));
        routerLogits = s.floats(l.maxRows * l.experts);
        expertOut = s.floats(pairs * l.embedding);
        quantizedHidden = s.take(pairs ? cpu::quantizedRowsBytes(pairs, l.expertHidden) : 0);
        gatedQueries = s.floats(l.maxRows * l.gatedQueryWidth);
        queryGate = s.floats(l.maxRows * l.gatedQueryWidth / 2);
        sharedScale = s.floats(l.sharedHidden ? l.maxRows : 0);
        deltaMixed = s.floats(l.maxRows * l.deltaChannels);
        deltaGate = s.floats(l.maxRows * l.deltaWidth);
        deltaAlpha = s.floats(l.maxRows * l.deltaHeads);
        deltaBeta = s.floats(l.maxRows * l.deltaHeads);
        joined = s.floats(l.drafts ? 2 * l.maxRows * l.embedding : 0);
        total = s.bytes();
    }
};

size_t CpuBackend::scratchBytes(int threads, const StepLimits& limits) { return Layout(threads, limits).total; }

CpuBackend::CpuBackend(int threads)
    : _kernels(cpu::kernels()),
      _memory(std::make_unique<HostMemory>()),
      _allocator(std::make_unique<Allocator>(*_memory)),
      _placer(std::make_unique<MappedPlacer>(*_allocator)),
      _pool(threads) {}

CpuBackend::CpuBackend(int threads, std::unique_ptr<DeviceMemory> memory)
    : _kernels(cpu::kernels()),
      _memory(std::move(memory)),
      _allocator(std::make_unique<Allocator>(*_memory)),
      _pool(threads) {
    readFromDevice();
}

void CpuBackend::readFromDevice() {
    _transfers = std::make_unique<CopyingTransfers>(*_memory);
    _stream = std::make_unique<WeightStream>(*_allocator, fileLayout(), _transfers.get());
    _slots = std::make_unique<ExpertSlotManager>(*_allocator, fileLayout());
    _placer = std::make_unique<DevicePlacer>(*_allocator, fileLayout(), *_stream, *_slots, nullptr);
}

void CpuBackend::whenUploaded(std::function<void(double)> told) {
    if (_stream) _stream->onUploaded(std::move(told));
}

void CpuBackend::unload() {
    _scratch = Buffer();
    _placer.reset();
    if (_stream) readFromDevice();
    else _placer = std::make_unique<MappedPlacer>(*_allocator);
}

void CpuBackend::takeScratch(const StepLimits& limits) {
    const Layout l(_pool.threads(), limits);
    _scratch = Buffer(*_allocator, l.total, "working memory");
    _limits = limits;
    profile(limits);
    _x = at<float>(l.x);
    _normed = at<float>(l.normed);
    _block = at<float>(l.block);
    _q = at<float>(l.q);
    _k = at<float>(l.k);
    _v = at<float>(l.v);
    _attended = at<float>(l.attended);
    _gate = at<float>(l.gate);
    _up = at<float>(l.up);
    _logits = at<float>(l.logits);
    _routerLogits = at<float>(l.routerLogits);
    _expertOut = at<float>(l.expertOut);
    _gatedQueries = at<float>(l.gatedQueries);
    _queryGate = at<float>(l.queryGate);
    _sharedScale = at<float>(l.sharedScale);
    _deltaMixed = at<float>(l.deltaMixed);
    _deltaGate = at<float>(l.deltaGate);
    _deltaAlpha = at<float>(l.deltaAlpha);
    _deltaBeta = at<float>(l.deltaBeta);
    _joined = at<float>(l.joined);
    _quantized = at<uint8_t>(l.quantized);
    _quantizedHidden = at<uint8_t>(l.quantizedHidden);
    _threadScratch = at<uint8_t>(l.threads);
    _threadScratchStride = threadScratch(limits);
}

void CpuBackend::begin(const Batch& batch, const KvCache& kv) {
    if (_stream) _stream->finishUploads();
    _batch = &batch;
    _sequences.clear();
    for (int64_t t = 0; t < batch.size(); ++t) {
        const int32_t sequence = batch.sequences[t];
        if (t == 0 || sequence != batch.sequences[t - 1])
            _sequences.push_back({t, t, kv.pageTable(sequence), kv.states().steps(sequence)});
        _sequences.back().end = t + 1;
    }
}

void CpuBackend::region(Pass pass, const std::function<void()>& body) {
    if (_stream) _stream->begin(partOf(pass), false, !_batch->logitRows.empty());
    body();
    if (_stream) _stream->end();
}

void CpuBackend::embed(const Weight& table) { readRows(table, _x, _limits.embedding); }

void CpuBackend::joinDraft(const PredictionWeights& w, const float* sourceNorm, float eps) {
    const int64_t width = _limits.embedding;
    readRows(w.embedding, _joined, 2 * width);
    for (int64_t t = 0; t < rows(); ++t) {
        float *token = _joined + 2 * t * width, *source = token + width;
        _kernels.rmsNorm(token, w.norms, eps, width, token);
        _kernels.rmsNorm(_x + _batch->sources[static_cast<size_t>(t)] * width, sourceNorm, eps, width, source);
        _kernels.rmsNorm(source, w.norms + width, eps, width, source);
    }
    linear(_joined, rows(), {{w.projection, nullptr, _x}});
}

void CpuBackend::attention(const AttentionWeights& w, const KvPages& pages, float eps) {
    norm(_x, w.norm, eps, rows(), _limits.embedding, _normed);
    linear(_normed, rows(), {{w.q, w.qBias, w.gated ? _gatedQueries : _q}, {w.k, w.kBias, _k}, {w.v, w.vBias, _v}});
    if (w.gated) splitGatedQueries(w, pages.headDim);
    const int64_t headDim = pages.headDim;
    if (w.qkNorm == AttentionSpec::QkNorm::PerHead) {
        norm(_q, w.qNorm, eps, rows() * w.heads, headDim, _q);
        norm(_k, w.kNorm, eps, rows() * pages.kvHeads, headDim, _k);
    } else if (w.qkNorm == AttentionSpec::QkNorm::FullRow) {
        norm(_q, w.qNorm, eps, rows(), w.heads * headDim, _q);
        norm(_k, w.kNorm, eps, rows(), pages.kvHeads * headDim, _k);
    }
    rope(_q, w.heads, pages.headDim, w.rope);
    rope(_k, pages.kvHeads, pages.headDim, w.rope);
    for (const SequenceRows& s : _sequences) storeKv(s, pages);
    attend(w, pages);
    if (w.gated) sigmoidMul(_attended, _queryGate, rows() * w.heads * headDim);
    linear(_attended, rows(), {{w.output, w.outputBias, _block}});
    addToX(_block);
}

void CpuBackend::gatedDelta(const GatedDeltaWeights& w, const RecurrentLayer& state, float eps) {
    norm(_x, w.norm, eps, rows(), _limits.embedding, _normed);
    linear(_normed, rows(),
           {{w.qkv, nullptr, _deltaMixed},
            {w.gate, nullptr, _deltaGate},
            {w.alpha, nullptr, _deltaAlpha},
            {w.beta, nullptr, _deltaBeta}});
    convolve(w, state);
    prepareDelta(w, eps);
    deltaRule(w, state);
    norm(_attended, w.headNorm, eps, rows() * w.valueHeads, w.headDim, _attended);
    siluMul(_deltaGate, _attended, rows() * w.valueHeads * w.headDim);
    linear(_deltaGate, rows(), {{w.output, nullptr, _block}});
    addToX(_block);
}

void CpuBackend::dense(const DenseWeights& w, float eps) {
    norm(_x, w.norm, eps, rows(), _limits.embedding, _normed);
    linear(_normed, rows(), {{w.gate, nullptr, _gate}, {w.up, nullptr, _up}});
    siluMul(_gate, _up, rows() * w.gate.rows);
    linear(_gate, rows(), {{w.down, nullptr, _block}});
    addToX(_block);
}

void CpuBackend::experts(const ExpertWeights& w, float eps) {
    norm(_x, w.norm, eps, rows(), _limits.embedding, _normed);
    linear(_normed, rows(), {{w.router, nullptr, _routerLogits}});
    route(_routerLogits, rows(), w);
    for (int32_t e = 0; e < w.gate.count; ++e) {
        const int32_t times = _routing.expertBegin[e + 1] - _routing.expertBegin[e];
        if (times) profiler().addUse(w.row, e, static_cast<uint64_t>(times));
    }
    expertProducts(w);
    sumExperts(w);
    if (w.shared) addSharedExpert(*w.shared);
    addToX(_block);
}

int64_t CpuBackend::headRows() const { return std::min(kHeadRows, _limits.maxRows); }

void CpuBackend::head(const HeadWeights& w, float eps, int64_t first, int64_t count) {
    const int64_t width = _limits.embedding;
    const bool again = _stream && first > 0;  // after the region
    if (again) _stream->beginHead();
    for (int64_t i = 0; i < count; ++i) {
        norm(_x + _batch->logitRows[first + i] * width, w.norm, eps, 1, width, _normed + i * width);
    }
    linear(_normed, count, {{w.output, nullptr, _logits}});
    if (again) _stream->end();
}

void CpuBackend::readLogits(int64_t row, int64_t count, float* out) {
    std::memcpy(out, _logits + row * _limits.vocab, sizeof(float) * static_cast<size_t>(count * _limits.vocab));
}

std::vector<int32_t> CpuBackend::sample(const std::vector<Choice>& choices) {
    std::vector<int32_t> tokens;
    for (const Choice& c : choices)
        tokens.push_back(sampleOnHost(_logits + c.row * _limits.vocab, _limits.vocab, c.rule, c.adjustments, c.draw));
    return tokens;
}

}  // namespace sharpi
