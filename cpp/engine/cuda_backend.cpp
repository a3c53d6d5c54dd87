// See cuda_backend.h. Loading, batches, captured steps and sampling; the blocks are in cuda_blocks.cpp.
#include "engine/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "core/error.h"
#include "kernels/sampling.h"

namespace sharpi {

namespace {

using Experts = std::vector<std::pair<int32_t, int32_t>>;  // (layer of experts, expert)

// Those that the plan names by their layer in the model, without what there is not.
Experts wantedExperts(const Experts& warm, const StepLimits& limits) {
    Experts wanted;
    for (const auto& [layer, expert] : warm) {
        for (int32_t row = 0; row < limits.expertLayers; ++row) {
            const auto& [number, experts] = limits.expertRows[static_cast<size_t>(row)];
            if (number == layer && expert >= 0 && expert < experts) wanted.emplace_back(row, expert);
        }
    }
    return wanted;
}

// Those that are wanted, then the first of each layer, the second, ...
Experts fillingOrder(const Experts& wanted, const StepLimits& limits) {
    Experts order;
    std::set<std::pair<int32_t, int32_t>> known;
    const auto add = [&](int32_t row, int32_t expert) {
        if (known.emplace(row, expert).second) order.emplace_back(row, expert);
    };
    for (const auto& [row, expert] : wanted) add(row, expert);
    for (int32_t expert = 0; expert < limits.experts; ++expert) {
        for (int32_t row = 0; row < limits.expertLayers; ++row) {
            if (expert < limits.expertRows[static_cast<size_t>(row)].second) add(row, expert);
        }
    }
    return order;
}

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
        settleAhead();
    } catch (const Error&) {
        // After a fault nothing runs any more.
    }
}

std::vector<std::string> CudaBackend::notes() const {
    std::vector<std::string> notes = _transfers->notes();
    if (_withoutRecord) notes.push_back("no VRAM is left to record some decode steps: their kernels are launched one by one, which is slower");
    return notes;
}

void CudaBackend::setUp() {
    _transfers = std::make_unique<CudaTransfers>(_stream);
    _weights = std::make_unique<WeightStream>(_allocator, gpuLayout(), _transfers.get());
    _slots = std::make_unique<ExpertSlotManager>(_allocator, gpuLayout());
    _placer = std::make_unique<DevicePlacer>(_allocator, gpuLayout(), *_weights, *_slots, &profiler());
}

void CudaBackend::unload() {
    _transfers->settle();
    settleAhead();
    _steps.clear();
    _withoutRecord = false;
    _ahead.reset();
    _misses.reset();
    _prefetcher.reset();
    _loads.reset();
    _tables.reset();
    _share.reset();
    _mailbox.reset();
    _scratch = Buffer();
    _layout.reset();
    _placer.reset();
    _slots.reset();
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
    _token = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t) * cuda::kMaxMatvecRows);
    profile(limits);
    if (_weights->sharesRows() || limits.expertSlots) {
        const int64_t rows = std::min<int64_t>(limits.maxRows, cuda::kMaxMatvecRows);
        _mailbox = std::make_unique<cuda::PinnedBuffer>(HostShare::mailboxBytes(limits, rows));
        _share = std::make_unique<HostShare>(_threads, _mailbox->as<void>(), limits, rows, [this] { return _stream.poll(); });
    }
    _limits = limits;
    _layout = layout;
    _stream.zero(at<uint8_t>(layout.attention), cuda::kDecodeCounterBytes);
    if (layout.deltaReaderBytes) _stream.zero(at<uint8_t>(layout.deltaReaders), layout.deltaReaderBytes);
    const size_t experts = static_cast<size_t>(limits.expertLayers) * static_cast<size_t>(limits.experts);
    if (experts) _stream.zero(at<uint8_t>(layout.expertUses), sizeof(uint32_t) * experts);
    if (limits.expertSlots) _tables = std::make_unique<cuda::PinnedBuffer>(2 * sizeof(int32_t) * experts);
}

void CudaBackend::startExperts(const ExpertUse& use) {
    _foresight = prefetchWanted();
    if (_slots->capacity() > 0) {
        std::vector<ExpertStacks> files;
        for (int32_t row = 0; row < _slots->layers(); ++row) files.push_back(_slots->file(row));
        _loads = std::make_unique<CudaExpertLoads>(_allocator, _stream, _transfers->files(), files);
        _slots->setLoads(_loads.get());
    }
    _prefetcher = std::make_unique<ExpertPrefetcher>(*_slots, profiler(), _foresight);
    const auto reachable = [this](const uint8_t* file, size_t bytes) { return _transfers->reachable(file, bytes); };
    _misses = std::make_unique<ExpertMisses>(*_slots, *_prefetcher, profiler(), use, _foresight, reachable);
    fillSlots(wantedExperts(use.warm, _limits));
    if (_foresight == Prefetch::NextLayer) _ahead = std::make_unique<cuda::Stream>(_stream.device(), cuda::Stream::Role::Feed);
    _tableUploaded = false;
}

void CudaBackend::fillSlots(const std::vector<std::pair<int32_t, int32_t>>& wanted) {
    // What the most wanted expert counts for at first: it has to be seen that others are used more.
    constexpr float kMostWanted = 4;
    _prefetcher->fill(fillingOrder(wanted, _limits));
    while (_prefetcher->filling()) {
        _slots->beginPass();
        _prefetcher->pump(0);
    }
    if (_loads) _loads->settle();
    _slots->beginPass();
    // The most wanted last: it is then the last to go.
    for (size_t i = wanted.size(); i-- > 0;) {
        const float falling = 1 - static_cast<float>(i) / static_cast<float>(wanted.size());
        _slots->addUses(wanted[i].first, wanted[i].second, kMostWanted * falling);
    }
}

// Fetches what the device has counted since the last time. Of a batch of many rows the slots' policy hears here: a prompt counts for
// as much as some of the tokens that will follow it.
void CudaBackend::collectUses() {
    constexpr double kPromptTokens = 64;
    std::vector<uint32_t> uses(static_cast<size_t>(_limits.expertLayers) * static_cast<size_t>(_limits.experts));
    if (uses.empty()) return;
    _stream.download(uses.data(), at<uint8_t>(_layout->expertUses), sizeof(uint32_t) * uses.size());
    _stream.zero(at<uint8_t>(_layout->expertUses), sizeof(uint32_t) * uses.size());
    profiler().addUses(uses.data(), _limits.experts);
    const double weight = _manyRows ? std::min(1.0, kPromptTokens / static_cast<double>(_manyRows)) : 0;
    _manyRows = 0;
    // Layer by layer the last ones would be the last to go.
    for (int32_t e = 0; weight > 0 && e < _slots->experts(); ++e) {
        for (int32_t row = 0; row < _slots->layers(); ++row) {
            const uint32_t times = uses[static_cast<size_t>(row) * static_cast<size_t>(_limits.experts) + static_cast<size_t>(e)];
            if (times) _slots->addUses(row, e, static_cast<float>(times * weight));
        }
    }
}

ExpertCounts CudaBackend::expertCounts() {
    if (::getpid() == _process) {  // or there is no device any more
        _stream.use();
        collectUses();
    }
    ExpertCounts counts = profiler().counts();
    counts.capacity = _slots->capacity();
    counts.resident = _slots->resident();
    counts.slotBytes = _slots->bytes();
    return counts;
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
    if (_limits.expertSlots) beginExperts();
    auto* numbers = _numbers->as<int32_t>();
    std::copy(batch.tokens.begin(), batch.tokens.end(), numbers + block.tokens);
    std::copy(batch.positions.begin(), batch.positions.end(), numbers + block.positions);
    std::copy(batch.logitRows.begin(), batch.logitRows.end(), numbers + block.logitRows);
    int64_t sequences = 0, used = block.tables;
    for (int64_t t = 0; t < _rows; ++t) {
        if (t == 0 || batch.sequences[t] != batch.sequences[t - 1]) {
            if (++sequences > block.sequences) throw Error(ErrorKind::Internal, "more than " + std::to_string(block.sequences) + " sequences in a batch");
            int64_t last = t;
            while (last + 1 < _rows && batch.sequences[last + 1] == batch.sequences[t]) ++last;
            const int64_t pages = batch.positions[last] / KvCache::kPageTokens + 1;
            if (pages > block.pages) throw Error(ErrorKind::Internal, "a sequence longer than the context");
            int32_t* table = numbers + block.tables + (sequences - 1) * block.pages;
            std::copy_n(kv.pageTable(batch.sequences[t]), pages, table);
            used = table + pages - numbers;
        }
        numbers[block.sequence + t] = static_cast<int32_t>(sequences - 1);
    }
    _tiles.count = few() ? 0 : addTiles(batch, numbers, block);
    if (_limits.deltaHeads) addStates(batch, kv, numbers, block);
    if (_limits.drafts) addSources(batch, numbers, block);
    _stream.uploadPinned(at<int32_t>(block.at), numbers, sizeof(int32_t) * static_cast<size_t>(used));
    pointAt(block);
}

// Where kernels find the batch's numbers.
void CudaBackend::pointAt(const GpuScratch::BatchBlock& block) {
    const auto* device = at<int32_t>(block.at);
    _tokens = device + block.tokens;
    _wanted = device + block.logitRows;
    _batch = {_rows, device + block.positions, device + block.sequence, device + block.tables, block.pages};
    _tiles.begin = device + block.tileBegin;
    _tiles.end = device + block.tileEnd;
    _sources = device + block.sources;
    _joinedRows = device + block.joined;
    _states.rows = _rows;
    _states.from = device + block.stateFrom;
    _states.to = device + block.stateTo;
    _states.sequences.begin = device + block.begin;
    _states.sequences.end = device + block.end;
    _deltaTiles.begin = device + block.deltaTileBegin;
    _deltaTiles.end = device + block.deltaTileEnd;
}

// Which slots hold the states that rows begin from and leave. Of few rows each might be a sequence of its own: a captured step
// has room for that.
void CudaBackend::addStates(const Batch& batch, const KvCache& kv, int32_t* numbers, const GpuScratch::BatchBlock& block) {
    int64_t sequences = 0, tiles = 0, longest = 0;
    for (int64_t begin = 0, end = 0; begin < _rows; begin = end) {
        while (end < _rows && batch.sequences[end] == batch.sequences[begin]) ++end;
        numbers[block.begin + sequences] = static_cast<int32_t>(begin);
        numbers[block.end + sequences++] = static_cast<int32_t>(end);
        longest = std::max(longest, end - begin);
        std::fill(numbers + block.stateFrom + begin, numbers + block.stateFrom + end, cuda::kStateIsOfRowBefore);
        std::fill(numbers + block.stateTo + begin, numbers + block.stateTo + end, -1);
        // A draft's rows go through no recurrent layer.
        for (const StateStep& step : batch.sources.empty() ? kv.states().steps(batch.sequences[begin]) : std::vector<StateStep>()) {
            if (step.begin == 0) numbers[block.stateFrom + begin] = step.from < 0 ? cuda::kStateIsZero : step.from;
            numbers[block.stateTo + begin + step.end - 1] = step.to;
            // A state is kept after a tile's last row only.
            for (int64_t at = step.begin; !few() && at < step.end; at += cuda::kDeltaChunk) {
                if (tiles < block.deltaTiles) {
                    numbers[block.deltaTileBegin + tiles] = static_cast<int32_t>(begin + at);
                    numbers[block.deltaTileEnd + tiles] = static_cast<int32_t>(begin + std::min(at + cuda::kDeltaChunk, step.end));
                }
                ++tiles;
            }
        }
    }
    if (few()) {
        std::fill(numbers + block.begin + sequences, numbers + block.begin + _rows, 0);
        std::fill(numbers + block.end + sequences, numbers + block.end + _rows, 0);
    }
    _states.sequences.count = few() ? _rows : sequences;
    // A tile of few rows would leave the tensor cores empty: many sequences that each go on by a token or two.
    _deltaInTiles = !few() && tiles <= block.deltaTiles && longest > cuda::kMaxMatvecRows;
    _deltaTiles.count = _deltaInTiles ? tiles : 0;
}

// Of a draft: the rows gone on from, and how they and the tokens' embeddings are put next to each other.
void CudaBackend::addSources(const Batch& batch, int32_t* numbers, const GpuScratch::BatchBlock& block) const {
    std::copy(batch.sources.begin(), batch.sources.end(), numbers + block.sources);
    for (int64_t t = 0; t < _rows; ++t) {
        numbers[block.joined + 2 * t] = static_cast<int32_t>(t);
        numbers[block.joined + 2 * t + 1] = static_cast<int32_t>(_rows + t);
    }
}

// What has arrived since the last batch can be found by this one.
void CudaBackend::beginExperts() {
    if (_passFailed) _slots->passFailed();
    _passFailed = false;
    _prefetcher->pump(_misses->takeFetched());  // before the pass: then almost everything may be overwritten
    _slots->beginPass();
    const bool many = !few();
    if (many || _manyRows) collectUses();
    if (many) _manyRows = _rows;
    if (many) listMissing();
    if (_tableUploaded && _slots->tableVersion() == _tableVersion && !many) return;
    const std::vector<int32_t>& table = _slots->table();
    std::copy(table.begin(), table.end(), _tables->as<int32_t>());
    _stream.uploadPinned(at<int32_t>(_layout->expertTable), _tables->as<int32_t>(), sizeof(int32_t) * table.size());
    if (many) _stream.uploadPinned(at<int32_t>(_layout->expertOrdinal), _tables->as<int32_t>() + table.size(), sizeof(int32_t) * table.size());
    _tableVersion = _slots->tableVersion();
    _tableUploaded = true;
}

// A batch of many rows streams the experts that are in no slot.
void CudaBackend::listMissing() {
    const std::vector<int32_t>& table = _slots->table();
    int32_t* const ordinals = _tables->as<int32_t>() + table.size();
    for (int32_t row = 0; row < _slots->layers(); ++row) {
        const size_t first = static_cast<size_t>(row) * static_cast<size_t>(_limits.experts);
        std::vector<int32_t> missing;
        for (int32_t e = 0; e < _slots->file(row).gate.count; ++e) {
            const bool isMissing = table[first + static_cast<size_t>(e)] < 0;
            ordinals[first + static_cast<size_t>(e)] = isMissing ? static_cast<int32_t>(missing.size()) : -1;
            if (isMissing) missing.push_back(e);
        }
        for (int32_t stack = 0; stack < 3; ++stack) _weights->setWanted(_placer->stackGroup(row) + stack, missing);
    }
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

void CudaBackend::region(Pass which, const std::function<void()>& body) {
    const int64_t before = _stream.launches();
    const auto known = few() && _replays ? _steps.find({which, _rows, _logitRows}) : _steps.end();
    if (known != _steps.end()) {
        replay(known->second);
    } else if (!few() || !_replays || _withoutRecord) {
        pass(which, body);
    } else {
        pass(which, body);  // also loads the kernels, which must not happen while recording
        if (which == Pass::Model) _kernelsPerStep = _stream.launches() - before;
        record(which, body);
        return;
    }
    if (which == Pass::Model) _kernelsPerStep = _stream.launches() - before;
}

void CudaBackend::record(Pass which, const std::function<void()>& body) {
    Step step;
    _stream.synchronize();  // the counters that kernels and CPU wait for start again
    if (_share) _share->begin();
    struct Recording {
        std::vector<std::function<void()>>*& jobs;
        ~Recording() { jobs = nullptr; }
    } recording{_recorded};
    _recorded = &step.jobs;
    try {
        step.graph = _stream.capture([&] { pass(which, body); });
        _steps[{which, _rows, _logitRows}] = std::move(step);
    } catch (const Error& error) {
        // The step itself is done. Without memory for its record, steps like it are launched.
        if (error.kind() != ErrorKind::OutOfMemory) throw;
        _withoutRecord = true;
    }
}

// What a pass that was given up left running beside it. A stream in a capture that was given up is of no use any more.
void CudaBackend::settleAhead() {
    _aheadRuns = false;
    if (!_ahead) return;
    if (_ahead->capturing()) _ahead = std::make_unique<cuda::Stream>(_stream.device(), cuda::Stream::Role::Feed);
    else _ahead->synchronize();
}

// What the GPU does in a step, with weights on their way meanwhile. Kernels that wait for the CPU go on if it fails.
void CudaBackend::pass(Pass which, const std::function<void()>& body) {
    std::optional<HostShare::Awake> awake;
    if (_share && few() && !_recorded) awake.emplace(*_share);
    try {
        _weights->begin(partOf(which), few(), _logitRows > 0);
        body();
        _weights->end();
    } catch (...) {
        if (_share) _share->abort();
        _transfers->settle();
        settleAhead();
        _passFailed = true;
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
        settleAhead();
        _passFailed = true;
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

std::vector<int32_t> CudaBackend::sample(const std::vector<Choice>& choices) {
    auto* changes = at<TokenAdjustment>(_layout->adjustments);
    auto* tokens = at<int32_t>(_layout->token);
    for (size_t i = 0; i < choices.size(); ++i) {
        const Choice& c = choices[i];
        if (!c.adjustments.empty()) _stream.upload(changes, c.adjustments.data(), sizeof(TokenAdjustment) * c.adjustments.size());
        cuda::sampleToken(_stream, floats(_layout->logits) + c.row * _limits.vocab, _limits.vocab, c.rule, changes,
                          static_cast<int32_t>(c.adjustments.size()), c.draw, at<void*>(_layout->sampling), tokens + i);
    }
    _stream.downloadPinned(_token->as<int32_t>(), tokens, sizeof(int32_t) * choices.size());
    _stream.synchronize();
    return {_token->as<int32_t>(), _token->as<int32_t>() + choices.size()};
}

}  // namespace sharpi
