// See cuda_backend.h. Loading, batches, captured steps and sampling; the blocks are in cuda_blocks.cpp.
#include "backend/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "core/error.h"
#include "kernels/rows/sampling.h"

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
    : _stream(cuda::findDevice()),
      _memory(_stream),
      _allocator(_memory, vram),
      _threads(threads),
      _replays(replayWanted()) {
    setUp();
}

// What a pass that was given up half way left running must end before memory goes.
CudaBackend::~CudaBackend() {
    try {
        if (_transfers) _transfers->settle();  // there are none if setUp() failed
        settleAhead();
    } catch (const Error&) {
        // After a fault nothing runs any more.
    }
}

std::vector<std::string> CudaBackend::notes() const {
    std::vector<std::string> notes = _transfers->notes();
    if (_withoutRecord)
        notes.push_back(
            "no VRAM is left to record some decode steps: their kernels are launched one by one, which is slower");
    return notes;
}

void CudaBackend::setUp() {
    _transfers = std::make_unique<CudaTransfers>(_stream);
    _weights = std::make_unique<WeightStream>(_allocator, gpuLayout(), _transfers.get());
    _slots = std::make_unique<ExpertSlotManager>(_allocator, gpuLayout());
    _placer = std::make_unique<DevicePlacer>(_allocator, gpuLayout(), *_weights, *_slots, &profiler());
}

void CudaBackend::unload() {
    if (_transfers) _transfers->settle();
    settleAhead();
    _steps.clear();
    _met.clear();
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
    setUp();
}

void CudaBackend::takeScratch(const StepLimits& limits) {
    if (_layout)
        throw Error(ErrorKind::Internal, "the GPU's working memory cannot grow: steps that read it may be captured");
    _stream.synchronize();
    const GpuScratch layout(limits);
    _scratch = Buffer(_allocator, layout.bytes(), "working memory");
    const int64_t numbers = std::max(layout.step.layout->count(), layout.batch.layout->count());
    _numbers = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t) * static_cast<size_t>(numbers));
    _token = std::make_unique<cuda::PinnedBuffer>(sizeof(int32_t) * cuda::kMaxMatvecRows);
    profile(limits);
    if (_weights->sharesRows() || limits.expertSlots) {
        const int64_t rows = layout.step.layout->room().rows;
        _mailbox = std::make_unique<cuda::PinnedBuffer>(HostShare::mailboxBytes(limits, rows));
        _share = std::make_unique<HostShare>(_threads, _mailbox->as<void>(), limits, rows,
                                             [this] { return _stream.poll(); });
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
    if (_foresight == Prefetch::NextLayer)
        _ahead = std::make_unique<cuda::Stream>(_stream.device(), cuda::Stream::Role::Feed);
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

// Fetches what the device has counted since the last time. The slots' policy hears of a batch with prompt rows here: a
// prompt counts for as much as some of the tokens that will follow it.
void CudaBackend::collectUses() {
    constexpr double kPromptTokens = 64;
    std::vector<uint32_t> uses(static_cast<size_t>(_limits.expertLayers) * static_cast<size_t>(_limits.experts));
    if (uses.empty()) return;
    _stream.download(uses.data(), at<uint8_t>(_layout->expertUses), sizeof(uint32_t) * uses.size());
    _stream.zero(at<uint8_t>(_layout->expertUses), sizeof(uint32_t) * uses.size());
    profiler().addUses(uses.data(), _limits.experts);
    const double weight = _uncountedRows ? std::min(1.0, kPromptTokens / static_cast<double>(_uncountedRows)) : 0;
    _uncountedRows = 0;
    // Layer by layer the last ones would be the last to go.
    for (int32_t e = 0; weight > 0 && e < _slots->experts(); ++e) {
        for (int32_t row = 0; row < _slots->layers(); ++row) {
            const uint32_t times =
                uses[static_cast<size_t>(row) * static_cast<size_t>(_limits.experts) + static_cast<size_t>(e)];
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
    if (::getpid() != _process)
        throw Error(ErrorKind::InvalidArgument, "a model cannot be used in a process forked after it was loaded");
    _stream.use();
    _step = !batch.hasPromptRows();
    _logitRows = static_cast<int64_t>(batch.logitRows.size());
    _transfers->settle();
    _stream.synchronize();  // the last batch's numbers may still be on their way
    _weights->finishUploads();
    const GpuScratch::Numbers& numbers = _step ? _layout->step : _layout->batch;
    auto* const host = _numbers->as<int32_t>();
    const BatchNumbers::Filled filled = numbers.layout->fill(
        batch, kv, oneArithmetic() ? batch.size() : batch.decodeRows, host, at<int32_t>(numbers.at));
    _view = filled.view;
    if (_share) _share->begin();
    if (_limits.expertSlots) beginExperts();
    _stream.uploadPinned(at<int32_t>(numbers.at), host, sizeof(int32_t) * static_cast<size_t>(filled.used));
}

// What has arrived since the last batch can be found by this one.
void CudaBackend::beginExperts() {
    if (_passFailed) _slots->passFailed();
    _passFailed = false;
    _prefetcher->pump(_misses->takeFetched());  // before the pass: then almost everything may be overwritten
    _slots->beginPass();
    if (!_step || _uncountedRows) collectUses();
    if (!_step) _uncountedRows = _view.rows;
    if (!_step) listMissing();
    if (_tableUploaded && _slots->tableVersion() == _tableVersion && _step) return;
    const std::vector<int32_t>& table = _slots->table();
    std::copy(table.begin(), table.end(), _tables->as<int32_t>());
    _stream.uploadPinned(at<int32_t>(_layout->expertTable), _tables->as<int32_t>(), sizeof(int32_t) * table.size());
    if (!_step)
        _stream.uploadPinned(at<int32_t>(_layout->expertOrdinal), _tables->as<int32_t>() + table.size(),
                             sizeof(int32_t) * table.size());
    _tableVersion = _slots->tableVersion();
    _tableUploaded = true;
}

// A batch that is no step streams the experts that are in no slot.
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

void CudaBackend::region(Pass which, const std::function<void()>& body) {
    const int64_t before = _stream.launches();
    const Step* const step = recorded(which, body);
    if (step) replay(*step);
    else launch(which, body);
    if (which == Pass::Model) _kernelsPerStep = _stream.launches() - before;
}

// Records of many rows are large, and a number of many rows seldom comes again: they are made when it does, as long as
// there are few.
bool CudaBackend::worthRecording(const Shape& shape) {
    constexpr size_t kMostRecords = 64;
    if (_view.rows <= cuda::kMaxMatvecRows) return true;
    return !_met.insert(shape).second && _steps.size() < kMostRecords;
}

// The record of a step of this shape, made at the first one; null if there is none. A record cannot hold the first pass
// over weights, which brings those that stay.
const CudaBackend::Step* CudaBackend::recorded(Pass which, const std::function<void()>& body) {
    if (!_step || !_replays || !_weights->uploaded()) return nullptr;
    const Shape shape{which, _view.rows, _logitRows};
    if (const auto known = _steps.find(shape); known != _steps.end()) return &known->second;
    if (_withoutRecord || !worthRecording(shape)) return nullptr;
    Step step;
    try {
        step.graph = _stream.capture([&] { pass(which, body, step.work); });
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::OutOfMemory) throw;
        // Nothing has run. Without memory for their records, this step and others like it are launched.
        _withoutRecord = true;
        _passFailed = false;
        if (_share) _share->begin();
        return nullptr;
    }
    return &_steps.insert_or_assign(shape, std::move(step)).first->second;
}

void CudaBackend::launch(Pass which, const std::function<void()>& body) {
    std::optional<HostShare::Awake> awake;
    if (_share && _step) awake.emplace(*_share);
    HostWork work(HostWork::When::AtOnce);
    pass(which, body, work);
}

// What the GPU does in a pass, with weights on their way meanwhile.
void CudaBackend::pass(Pass which, const std::function<void()>& body, HostWork& work) {
    struct Made {
        HostWork*& at;
        ~Made() { at = nullptr; }
    } made{_work};
    _work = &work;
    try {
        _weights->begin(partOf(which), _step, _logitRows > 0);
        body();
        _weights->end();
    } catch (...) {
        giveUp();
        throw;
    }
}

void CudaBackend::replay(const Step& step) {
    _stream.replay(*step.graph);
    if (step.work.empty()) return;
    const HostShare::Awake awake(*_share);
    try {
        step.work.run();
    } catch (...) {
        giveUp();
        throw;
    }
}

// A pass has failed half way. Kernels that wait for the CPU go on.
void CudaBackend::giveUp() noexcept {
    if (_share) _share->abort();
    _passFailed = true;
    try {
        _transfers->settle();
        settleAhead();
    } catch (const Error&) {
        // The error that is under way says more.
    }
}

// What a pass that was given up left running beside it. A stream in a capture that was given up is of no use any more.
void CudaBackend::settleAhead() {
    _aheadRuns = false;
    if (!_ahead) return;
    if (_ahead->capturing()) _ahead = std::make_unique<cuda::Stream>(_stream.device(), cuda::Stream::Role::Feed);
    else _ahead->synchronize();
}

int64_t CudaBackend::headRows() const { return std::min<int64_t>(_limits.maxRows, cuda::kMaxMatvecRows); }

void CudaBackend::readLogits(int64_t row, int64_t count, float* out) {
    _stream.download(out, floats(_layout->logits) + row * _limits.vocab,
                     sizeof(float) * static_cast<size_t>(count * _limits.vocab));
}

std::vector<int32_t> CudaBackend::sample(const std::vector<Choice>& choices) {
    auto* changes = at<TokenAdjustment>(_layout->adjustments);
    auto* tokens = at<int32_t>(_layout->token);
    for (size_t i = 0; i < choices.size(); ++i) {
        const Choice& c = choices[i];
        if (!c.adjustments.empty())
            _stream.upload(changes, c.adjustments.data(), sizeof(TokenAdjustment) * c.adjustments.size());
        cuda::sampleToken(_stream, floats(_layout->logits) + c.row * _limits.vocab, _limits.vocab, c.rule, changes,
                          static_cast<int32_t>(c.adjustments.size()), c.draw, at<void*>(_layout->sampling), tokens + i);
    }
    _stream.downloadPinned(_token->as<int32_t>(), tokens, sizeof(int32_t) * choices.size());
    _stream.synchronize();
    return {_token->as<int32_t>(), _token->as<int32_t>() + choices.size()};
}

}  // namespace sharpi
