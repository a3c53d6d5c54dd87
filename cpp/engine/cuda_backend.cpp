// See cuda_backend.h. Loading, batches, captured steps and sampling; the blocks are in cuda_blocks.cpp.
#include "engine/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/error.h"
#include "kernels/packed.h"
#include "kernels/sampling.h"

namespace sharpi {

namespace {

// Large enough for copies at nearly full speed, and no larger than a granule or two of the device's memory, so that loading
// takes hardly more of it at any moment than the plan says.
constexpr size_t kStagingBytes = size_t{2} << 20;

bool replayWanted() {
    const char* value = std::getenv("SHARPI_CUDA_GRAPH");
    return !value || std::strcmp(value, "0") != 0;
}

}  // namespace

CudaBackend::CudaBackend(size_t vram)
    : _stream(cuda::findDevice()), _memory(_stream), _allocator(_memory, vram), _replays(replayWanted()) {
    DeviceLayout layout;
    layout.bytes = [](const Matrix& m) { return cuda::packedBytes(m.type, m.rows, m.cols); };
    layout.fill = [this](const Matrix& to, const Matrix& host) { fill(to, host); };
    _placer = std::make_unique<CopyingPlacer>(_allocator, std::move(layout));
}

CudaBackend::~CudaBackend() {
    if (_staging) _allocator.free(_staging);
}

void CudaBackend::fill(const Matrix& to, const Matrix& host) {
    const size_t row = rowBytes(host.type, host.cols);
    if (info(host.type).isFloat) {  // packed as in the file
        _memory.upload(const_cast<uint8_t*>(to.data), host.data, row * static_cast<size_t>(host.rows));
        return;
    }
    if (row > kStagingBytes) throw Error(ErrorKind::BadModel, "a matrix row of " + std::to_string(row) + " bytes is longer than loading can take");
    if (!_staging) _staging = _allocator.allocate(kStagingBytes, Fit::Pooled, "staging for loading");
    const auto step = static_cast<int64_t>(kStagingBytes / row);
    for (int64_t begin = 0; begin < host.rows; begin += step) {
        const int64_t count = std::min(step, host.rows - begin);
        _memory.upload(_staging, host.data + static_cast<size_t>(begin) * row, row * static_cast<size_t>(count));
        cuda::packRows(_stream, to, begin, count, static_cast<const uint8_t*>(_staging));
    }
}

void CudaBackend::takeScratch(const StepLimits& limits) {
    if (_layout) throw Error(ErrorKind::Internal, "the GPU's working memory cannot grow: steps that read it may be captured");
    _stream.synchronize();
    if (_staging) _allocator.free(_staging);
    _staging = nullptr;
    _allocator.trim();
    const GpuScratch layout(limits);
    _scratch = Buffer(_allocator, layout.bytes(), "working memory");
    _numbers = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t) * static_cast<size_t>(std::max(layout.few.total, layout.many.total)));
    _token = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t));
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
    _stream.synchronize();  // the last batch's numbers may still be on their way
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
        body();
    } else if (const auto known = _graphs.find({_rows, _logitRows}); known != _graphs.end()) {
        _stream.replay(*known->second);
    } else {
        body();  // also loads the kernels, which must not happen while recording
        _kernelsPerStep = _stream.launches() - before;
        try {
            _graphs[{_rows, _logitRows}] = _stream.capture(body);
        } catch (const Error& error) {
            // The step itself is done. Without memory for its record, steps are launched.
            if (error.kind() != ErrorKind::OutOfMemory) throw;
            _replays = false;
        }
        return;
    }
    _kernelsPerStep = _stream.launches() - before;
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
