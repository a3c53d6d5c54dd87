// See cuda_backend.h.
#include "backend/cuda_backend.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

CudaBackend::CudaBackend(int ordinal, size_t vram, int threads)
    : _stream(cuda::findDevice(ordinal)),
      _memory(_stream),
      _allocator(_memory, vram),
      _threads(threads),
      _pass(_stream, _clock),
      _recorder(_pass, [this](bool ran) noexcept {
          // Kernels that wait for the CPU go on with whatever data there is; the pass's results are not used.
          _cache->setPassFailed(ran);
          if (_share) ran ? _share->abort() : _share->begin();
          if (ran) settle();
      }) {
    _transfers = std::make_unique<CudaTransfers>(_stream);
    _weights = std::make_unique<WeightStream>(_allocator, gpuLayout(), _transfers.get());
    _cache = std::make_unique<CudaExpertCache>(_allocator, _stream);
    _placer = std::make_unique<DevicePlacer>(_allocator, gpuLayout(), *_weights, _cache->slots(), &_cache->profiler());
    _pass.weights = _weights.get();
    _operations = std::make_unique<CudaOperations>(_pass, *_cache);
}

CudaBackend::~CudaBackend() { settle(); }

// Work that a failed pass left running must end before memory is freed.
void CudaBackend::settle() noexcept {
    try {
        if (_transfers) _transfers->settle();
        if (_cache) _cache->settle();
        if (_level) _level->reader().beginPass();  // waits for reads, which write to what is freed next
    } catch (const Error&) {
        // After a fault nothing runs any more.
    }
}

void CudaBackend::readFrom(const std::vector<MappedFile>& files, size_t expertRamBytes) {
    if (expertRamBytes == 0) return;
    _level = std::make_unique<RamLevel>(_stream.device(), files);
    _levelBytes = expertRamBytes;
    _transfers->readDiskBy(_level->reader());
}

void CudaBackend::startExperts(const ExpertUse& use) {
    if (!_pass.limits.expertSlots) return;
    if (_level) _level->take(_cache->slots(), {_levelBytes, _pass.limits.headRows});
    // Without slots in RAM, the CPU reads experts where the file is mapped.
    _cache->start(use, *_transfers, _level && _level->capacity() > 0 ? _level.get() : nullptr);
}

BusUse CudaBackend::bus() const {
    size_t pinned = _transfers->files().bytes() + (_level ? _level->bytes() : 0);
    for (const auto& rows : _tableRows) pinned += rows->bytes();
    return {_weights->streams(), pinned};
}

std::vector<std::string> CudaBackend::notes() const {
    std::vector<std::string> notes = _transfers->notes();
    if (_level) {
        for (std::string& note : _level->notes()) notes.push_back(std::move(note));
    }
    if (_recorder.withoutRecord()) {
        notes.push_back(
            "no VRAM is left to record some decode steps: their kernels are launched one by one, which is slower");
    }
    return notes;
}

void CudaBackend::unload() {
    settle();
    _recorder.clear();
    _pass.share = nullptr;
    _pass.tables = nullptr;
    _share.reset();
    _tables.reset();
    _tableRows.clear();
    _mailbox.reset();
    _scratch = Buffer();
    _layout.reset();
    _operations.reset();
    _placer.reset();
    _cache.reset();
    _weights.reset();
    _transfers.reset();
    _level.reset();
}

void CudaBackend::takeScratch(const StepLimits& limits) {
    if (_layout) {
        throw Error(ErrorKind::Internal, "the GPU's working memory cannot grow: steps that read it may be captured");
    }
    _stream.synchronize();
    const GpuScratch layout(limits);
    _scratch = Buffer(_allocator, layout.bytes(), "working memory");
    const int64_t numbers = std::max(layout.step.layout->count(), layout.batch.layout->count());
    _numbers = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t) * static_cast<size_t>(numbers));
    _tables = std::make_unique<TableRows>(_weights->tables(), limits.maxRows, layout.step.layout->room().rows,
                                          [this](size_t bytes) {
                                              _tableRows.push_back(std::make_unique<cuda::PinnedBuffer>(bytes));
                                              return _tableRows.back()->as<uint8_t>();
                                          });
    if (_weights->sharesRows() || limits.expertSlots) {
        const int64_t rows = layout.step.layout->room().rows;
        _mailbox = std::make_unique<cuda::PinnedBuffer>(HostShare::mailboxBytes(limits, rows));
        _share = std::make_unique<HostShare>(_threads, _mailbox->as<void>(), limits, rows,
                                             [this] { return _stream.poll(); });
    }
    _layout = layout;
    _pass.limits = limits;
    _pass.layout = &*_layout;
    _pass.memory = _scratch.as<uint8_t>();
    _sampler = std::make_unique<TokenSampler>(_pass);
    _pass.share = _share.get();
    _pass.tables = _tables.get();
    _cache->takeTables(limits, *_layout, _pass.memory);
    _stream.zero(_pass.at<uint8_t>(layout.attention), cuda::kDecodeCounterBytes);
    if (layout.stateReaderBytes) _stream.zero(_pass.at<uint8_t>(layout.stateReaders), layout.stateReaderBytes);
}

ExpertCounts CudaBackend::expertCounts(bool forget) {
    if (::getpid() == _process) {  // a forked process has no device
        _stream.use();
        _cache->collectUses();
    }
    const ExpertCounts counts = _cache->counts();
    if (forget) _cache->profiler().clear();
    return counts;
}

void CudaBackend::begin(const Batch& batch, const KvCache& kv) {
    if (::getpid() != _process) {
        throw Error(ErrorKind::InvalidArgument, "a model cannot be used in a process forked after it was loaded");
    }
    _stream.use();
    _pass.step = !batch.hasPromptRows();
    _pass.logitRows = static_cast<int64_t>(batch.logitRows.size());
    _transfers->settle();
    _pass.await();  // the last batch's numbers may still be on their way
    _weights->finishUploads();
    const GpuScratch::Numbers& numbers = _pass.step ? _layout->step : _layout->batch;
    auto* const host = _numbers->as<int32_t>();
    auto* const onDevice = _pass.at<int32_t>(numbers.at);
    const int64_t exactRows = oneArithmetic() ? batch.size() : batch.decodeRows;
    const BatchNumbers::Filled filled = numbers.layout->fill(batch, kv, exactRows, host, onDevice);
    _pass.view = filled.view;
    _tables->begin(batch.tokens);
    if (_share) _share->begin();
    if (_level && _level->capacity() == 0) _level->reader().beginPass();  // nobody else begins its passes
    if (_pass.limits.expertSlots)
        _cache->beginPass(_pass.step, !batch.sources.empty(), _pass.view.rows, *_weights, *_placer);
    _stream.uploadPinned(onDevice, host, sizeof(int32_t) * static_cast<size_t>(filled.used));
}

void CudaBackend::readLogits(int64_t row, int64_t count, float* out) {
    const int64_t vocab = _pass.limits.vocab;
    const float* const logits = _pass.floats(_layout->logits);
    const auto bytes = sizeof(float) * static_cast<size_t>(count * vocab);
    _clock.await([&] { _stream.download(out, logits + row * vocab, bytes); });
}

}  // namespace sharpi
