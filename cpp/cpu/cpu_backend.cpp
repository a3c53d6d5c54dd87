// See cpu_backend.h.
#include "cpu/cpu_backend.h"

#include <cstring>
#include <utility>

#include "cpu/sample.h"
#include "cpu/score.h"
#include "memory/stream/copying_transfers.h"

namespace sharpi {

namespace {

// As the CPU reads them from a file, wherever they lie.
DeviceLayout fileLayout() {
    DeviceLayout layout;
    layout.bytes = fileBytes;
    return layout;
}

}  // namespace

CpuBackend::CpuBackend(int threads)
    : _memory(std::make_unique<HostMemory>()),
      _allocator(std::make_unique<Allocator>(*_memory)),
      _slots(std::make_unique<ExpertSlotManager>(*_allocator, ramSlotLayout())),
      _work(threads, _clock) {
    _placer = std::make_unique<MappedPlacer>(*_allocator, *_slots, &_operations.expertWork().profiler());
}

CpuBackend::CpuBackend(int threads, std::unique_ptr<DeviceMemory> memory)
    : _memory(std::move(memory)), _allocator(std::make_unique<Allocator>(*_memory)), _work(threads, _clock) {
    readFromDevice();
}

void CpuBackend::readFromDevice() {
    _transfers = std::make_unique<CopyingTransfers>(*_memory);
    _stream = std::make_unique<WeightStream>(*_allocator, fileLayout(), _transfers.get());
    _slots = std::make_unique<ExpertSlotManager>(*_allocator, fileLayout());
    _placer = std::make_unique<DevicePlacer>(*_allocator, fileLayout(), *_stream, *_slots, nullptr);
    _work.stream = _stream.get();
}

void CpuBackend::whenUploaded(std::function<void(double)> told) {
    if (_stream) _stream->onUploaded(std::move(told));
}

void CpuBackend::readFrom(const std::vector<MappedFile>& files, size_t) {
    if (_stream) return;
    _reader = std::make_unique<FileReader>(files);
    _source = std::make_unique<RamExperts>(*_slots, *_reader, &_operations.expertWork().profiler());
    _operations.expertWork().useSource(_source.get());
}

void CpuBackend::unload() {
    _scratch = Buffer();
    _operations.expertWork().useSource(nullptr);
    _source.reset();
    _reader.reset();
    _placer.reset();
    _slots.reset();
    _work.stream = nullptr;
    _stream.reset();
    _transfers.reset();
}

ExpertCounts CpuBackend::expertCounts(bool forget) {
    ExpertAccessProfiler& profiler = _operations.expertWork().profiler();
    ExpertCounts counts = profiler.counts();
    if (forget) profiler.clear();
    if (_slots->capacity() == 0) return counts;
    counts.capacity = _slots->capacity();
    counts.resident = _slots->resident();
    counts.slotBytes = _slots->bytes();
    if (_source) counts.disk = _source->counts();
    counts.disk.ramCapacity = counts.capacity;
    counts.disk.ramResident = counts.resident;
    return counts;
}

void CpuBackend::takeScratch(const StepLimits& limits) {
    _scratch = Buffer(*_allocator, scratchBytes(_work.pool.threads(), limits), "working memory");
    _work.takeBuffers(limits, _scratch.as<uint8_t>());
    profileLayers(_operations.expertWork().profiler(), limits);
}

void CpuBackend::startExperts(const ExpertUse& use) {
    if (_source) _source->fill(warmExperts(use, _work.limits.expertLayers));
}

void CpuBackend::begin(const Batch& batch, const KvCache& kv) {
    if (_stream) _stream->finishUploads();
    _work.begin(batch, kv);
}

void CpuBackend::region(Pass pass, const std::function<void()>& body) {
    const HostClock::Evaluation evaluation(_clock);
    if (_stream) _stream->begin(partOf(pass), false, !_work.batch->logitRows.empty());
    if (_source) _source->beginPass(_work.rows());
    try {
        body();
    } catch (...) {
        if (_source) _source->passFailed();
        throw;
    }
    if (_stream) _stream->end();
}

void CpuBackend::readLogits(int64_t row, int64_t count, float* out) {
    const HostClock::Evaluation evaluation(_clock);
    const int64_t vocab = _work.limits.vocab;
    const float* const logits = _work.floats(_work.scratch().logits);
    std::memcpy(out, logits + row * vocab, sizeof(float) * static_cast<size_t>(count * vocab));
}

std::vector<Score> CpuBackend::score(const std::vector<ScoredToken>& tokens) {
    const HostClock::Evaluation evaluation(_clock);
    const int64_t vocab = _work.limits.vocab;
    const float* const logits = _work.floats(_work.scratch().logits);
    std::vector<Score> scores;
    for (const ScoredToken& t : tokens)
        scores.push_back(scoreOnHost(_work.kernels, logits + t.row * vocab, vocab, t.token, t.best));
    return scores;
}

std::vector<Chosen> CpuBackend::sample(const std::vector<Choice>& choices) {
    const HostClock::Evaluation evaluation(_clock);
    const int64_t vocab = _work.limits.vocab;
    float* const logits = _work.floats(_work.scratch().logits);
    std::vector<float> unchanged;
    std::vector<Chosen> all;
    for (const Choice& c : choices) {
        float* const row = logits + c.row * vocab;
        if (c.best >= 0) unchanged.assign(row, row + vocab);
        Chosen chosen{sampleOnHost(row, vocab, c.rule, c.adjustments, c.draw, c.mask), {}};
        if (c.best >= 0) chosen.score = scoreOnHost(_work.kernels, unchanged.data(), vocab, chosen.token, c.best);
        all.push_back(std::move(chosen));
    }
    return all;
}

}  // namespace sharpi
