// See cuda_backend.h. Loading, batches, captured steps and sampling; the blocks are in cuda_blocks.cpp.
#include "engine/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "kernels/sampling.h"

namespace sharpi {

namespace {

bool replayWanted() {
    const char* value = std::getenv("SHARPI_CUDA_GRAPH");
    return !value || std::strcmp(value, "0") != 0;
}

}  // namespace

CudaBackend::CudaBackend(size_t vram, int threads)
    : _stream(cuda::findDevice()), _memory(_stream), _allocator(_memory, vram), _threads(threads), _replays(replayWanted()) {
    setUp();
}

// What a pass that was given up half way left running must end before memory goes.
CudaBackend::~CudaBackend() {
    try {
        _transfers->settle();
    } catch (const Error&) {
        // After a fault nothing runs any more.
    }
}

std::vector<std::string> CudaBackend::notes() const {
    std::vector<std::string> notes = _transfers->notes();
    if (_withoutRecord) notes.push_back("no VRAM is left to record decode steps: their kernels are launched one by one, which is slower");
    return notes;
}

void CudaBackend::setUp() {
    _transfers = std::make_unique<CudaTransfers>(_stream);
    _weights = std::make_unique<WeightStream>(_allocator, gpuLayout(), _transfers.get());
    _placer = std::make_unique<DevicePlacer>(_allocator, gpuLayout(), *_weights);
}

void CudaBackend::unload() {
    _transfers->settle();
    _steps.clear();
    _share.reset();
    _mailbox.reset();
    _scratch = Buffer();
    _layout.reset();
    _placer.reset();
    _weights.reset();
    _transfers.reset();
    _allocator.trim();
    setUp();
}

void CudaBackend::takeScratch(const StepLimits& limits) {
    if (_layout) throw Error(ErrorKind::Internal, "the GPU's working memory cannot grow: steps that read it may be captured");
    _stream.synchronize();
    const GpuScratch layout(limits);
    _scratch = Buffer(_allocator, layout.bytes(), "working memory");
    _numbers = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t) * static_cast<size_t>(std::max(layout.few.total, layout.many.total)));
    _token = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t));
    if (_weights->sharesRows() || _weights->streamsStacks()) {
        const int64_t rows = std::min<int64_t>(limits.maxRows, cuda::kMaxMatvecRows);
        _mailbox = std::make_unique<cuda::PinnedBuffer>(HostShare::mailboxBytes(limits, rows));
        _share = std::make_unique<HostShare>(_threads, _mailbox->as<void>(), limits, rows, [this] { return _stream.poll(); });
    }
    _limits = limits;
    _layout = layout;
    _stream.zero(at<uint8_t>(layout.attention), cuda::kDecodeCounterBytes);
}

void CudaBackend::begin(const Batch& batch, const KvCache& kv) {
    if (::getpid() != _process) throw Error(ErrorKind::InvalidArgument, "a model cannot be used in a process forked after it was loaded");
    _stream.use();
    _rows = batch.size();
    _logitRows = static_cast<int64_t>(batch.logitRows.size());
    const GpuScratch::BatchBlock& block = few() ? _layout->few : _layout->many;
    if (_rows > block.rows) throw Error(ErrorKind::Internal, "a batch of " + std::to_string(_rows) + " rows exceeds the working memory taken at loading");
    _transfers->settle();
    _stream.synchronize();  // the last batch's numbers may still be on their way
    _weights->finishUploads();
    if (_share) _share->begin();
    auto* numbers = _numbers->as<int32_t>();
    std::copy(batch.tokens.begin(), batch.tokens.end(), numbers + block.tokens);
    std::copy(batch.positions.begin(), batch.positions.end(), numbers + block.positions);
    std::copy(batch.logitRows.begin(), batch.logitRows.end(), numbers + block.logitRows);
    int64_t sequences = 0, used = block.tables;
    for (int64_t t = 0; t < _rows; ++t) {
        if (t == 0 || batch.sequences[t] != batch.sequences[t - 1]) {
            if (++sequences > block.sequences) throw Error(ErrorKind::Internal, "more than " + std::to_string(block.sequences) + " sequences in a batch");
            const int64_t pages = (kv.length(batch.sequences[t]) + KvCache::kPageTokens - 1) / KvCache::kPageTokens;
            if (pages > block.pages) throw Error(ErrorKind::Internal, "a sequence longer than the context");
            int32_t* table = numbers + block.tables + (sequences - 1) * block.pages;
            std::copy_n(kv.pageTable(batch.sequences[t]), pages, table);
            used = table + pages - numbers;
        }
        numbers[block.sequence + t] = static_cast<int32_t>(sequences - 1);
    }
    _tiles.count = few() ? 0 : addTiles(batch, numbers, block);
    auto* device = at<int32_t>(block.at);
    _stream.uploadPinned(device, numbers, sizeof(int32_t) * static_cast<size_t>(used));
    _tokens = device + block.tokens;
    _wanted = device + block.logitRows;
    _batch = {_rows, device + block.positions, device + block.sequence, device + block.tables, block.pages};
    _tiles.begin = device + block.tileBegin;
    _tiles.end = device + block.tileEnd;
}

// Cuts the rows of each sequence into tiles for attention; the longest contexts first, so that the last to finish is short.
int64_t CudaBackend::addTiles(const Batch& batch, int32_t* numbers, const GpuScratch::BatchBlock& block) {
    int64_t count = 0;
    for (int64_t end = _rows; end > 0;) {
        int64_t begin = end - 1;
        while (begin > 0 && end - begin < cuda::kQueryTile && batch.sequences[begin - 1] == batch.sequences[end - 1]) --begin;
        if (count == block.tiles) throw Error(ErrorKind::Internal, "more query tiles than the working memory has room for");
        numbers[block.tileBegin + count] = static_cast<int32_t>(begin);
        numbers[block.tileEnd + count] = static_cast<int32_t>(end);
        ++count;
        end = begin;
    }
    return count;
}

void CudaBackend::region(const std::function<void()>& body) {
    const int64_t before = _stream.launches();
    if (!few() || !_replays) {
        pass(body);
    } else if (const auto known = _steps.find({_rows, _logitRows}); known != _steps.end()) {
        replay(known->second);
    } else {
        pass(body);  // also loads the kernels, which must not happen while recording
        _kernelsPerStep = _stream.launches() - before;
        record(body);
        return;
    }
    _kernelsPerStep = _stream.launches() - before;
}

void CudaBackend::record(const std::function<void()>& body) {
    Step step;
    _stream.synchronize();  // the counters that kernels and CPU wait for start again
    if (_share) _share->begin();
    struct Recording {
        std::vector<std::function<void()>>*& jobs;
        ~Recording() { jobs = nullptr; }
    } recording{_recorded};
    _recorded = &step.jobs;
    try {
        step.graph = _stream.capture([&] { pass(body); });
        _steps[{_rows, _logitRows}] = std::move(step);
    } catch (const Error& error) {
        // The step itself is done. Without memory for its record, steps are launched.
        if (error.kind() != ErrorKind::OutOfMemory) throw;
        _replays = false;
        _withoutRecord = true;
    }
}

// What the GPU does in a step, with weights on their way meanwhile. Kernels that wait for the CPU go on if it fails.
void CudaBackend::pass(const std::function<void()>& body) {
    std::optional<HostShare::Awake> awake;
    if (_share && few() && !_recorded) awake.emplace(*_share);
    try {
        _weights->begin(few(), _logitRows > 0);
        body();
        _weights->end();
    } catch (...) {
        if (_share) _share->abort();
        _transfers->settle();
        throw;
    }
}

void CudaBackend::replay(const Step& step) {
    _stream.replay(*step.graph);
    if (step.jobs.empty()) return;
    const HostShare::Awake awake(*_share);
    try {
        for (const auto& job : step.jobs) job();
    } catch (...) {
        _share->abort();
        throw;
    }
}

// Work for the CPU, at this point of the step: what it waits for has been given to the GPU before.
void CudaBackend::onHost(std::function<void()> job) {
    if (_recorded) _recorded->push_back(std::move(job));
    else job();
}

int64_t CudaBackend::headRows() const { return std::min<int64_t>(_limits.maxRows, cuda::kMaxMatvecRows); }

void CudaBackend::readLogits(int64_t row, int64_t count, float* out) {
    _stream.download(out, floats(_layout->logits) + row * _limits.vocab, sizeof(float) * static_cast<size_t>(count * _limits.vocab));
}

int32_t CudaBackend::sample(int64_t row, const SamplingRule& rule, const std::vector<TokenAdjustment>& adjustments, double draw) {
    auto* changes = at<TokenAdjustment>(_layout->adjustments);
    if (!adjustments.empty()) _stream.upload(changes, adjustments.data(), sizeof(TokenAdjustment) * adjustments.size());
    cuda::sampleToken(_stream, floats(_layout->logits) + row * _limits.vocab, _limits.vocab, rule, changes,
                      static_cast<int32_t>(adjustments.size()), draw, at<void*>(_layout->sampling), at<int32_t>(_layout->token));
    _stream.downloadPinned(_token->as<int32_t>(), at<int32_t>(_layout->token), sizeof(int32_t));
    _stream.synchronize();
    return *_token->as<int32_t>();
}

}  // namespace sharpi
