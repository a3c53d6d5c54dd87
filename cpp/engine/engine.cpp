// See engine.h.
#include "engine/engine.h"

#include <algorithm>
#include <cstdio>

#include "core/error.h"
#include "engine/cpu_backend.h"
#include "engine/gpu.h"
#include "memory/expert_prefetcher.h"

namespace sharpi {

namespace {

EngineOptions checked(const ModelSpec& spec, EngineOptions options) {
    if (options.context < 1) throw Error(ErrorKind::InvalidArgument, "context must be at least 1 token");
    if (options.context > spec.contextLength) {
        throw Error(ErrorKind::InvalidArgument, "a context of " + std::to_string(options.context) +
                                                    " is larger than the model's " + std::to_string(spec.contextLength));
    }
    prefetchWanted();  // throws for nonsense, before anything is loaded
    if (options.batch < 1 || options.batch > 65536) throw Error(ErrorKind::InvalidArgument, "batch must be 1 to 65536 rows");
    options.batch = std::min(options.batch, options.context);
    if (options.sequences < 1 || options.sequences > 4096) throw Error(ErrorKind::InvalidArgument, "sequences must be 1 to 4096");
    for (const TensorHome& home : options.homes) {
        if (home.cpuRows < 0) throw Error(ErrorKind::InvalidArgument, "a plan with a negative number of rows for the CPU");
    }
    return options;
}

// Others may take memory between the look and the loading: so often it is tried.
constexpr int kLoadings = 3;
// What is left free where less is there than the plan thought: kernels and captured steps come with the first tokens.
constexpr size_t kReserve = size_t{128} << 20;

std::unique_ptr<Backend> makeBackend(const EngineOptions& options) {
    if (options.cuda) return makeGpuBackend(options.vram, options.threads);
    return std::make_unique<CpuBackend>(options.threads);
}

}  // namespace

size_t Engine::kvBytesFor(const ModelSpec& spec, KvType type, int64_t context) {
    return KvCache::bytesFor(kvShapes(spec), type, context);
}

Engine::Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options)
    : Engine(std::move(spec), std::move(weights), options, makeBackend(options)) {}

Engine::Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options, std::unique_ptr<Backend> backend)
    : _spec(std::move(spec)), _options(checked(_spec, options)), _files(std::move(weights)), _backend(std::move(backend)),
      _trace(_backend->allocator(), LoadTrace::wanted()) {
    if (!_options.cuda) _options.homes.clear();  // all is where the file is mapped
    if (!_options.homes.empty() && _options.homes.size() != _files->tensors().all().size()) {
        throw Error(ErrorKind::InvalidArgument, "a plan for " + std::to_string(_options.homes.size()) + " tensors; the model has " +
                                                    std::to_string(_files->tensors().all().size()));
    }
    if (_options.cuda) requireGpuCanRun(_spec);
    _options.homes = normalized(_spec, _files->tensors(), std::move(_options.homes));
    loadAdapting();
    if (_options.cuda && LoadTrace::wanted()) printPlacement();
}

ExpertCounts Engine::expertCounts() {
    std::lock_guard<std::mutex> lock(_mutex);
    return _backend->expertCounts();
}

std::vector<std::string> Engine::notes() const {
    std::vector<std::string> all = _notes;
    for (const std::string& note : _backend->notes()) all.push_back(note);
    return all;
}

void Engine::printPlacement() const {
    const Placement p = placement();
    const double mib = 1 << 20;
    for (const Placement::Range& range : p.ranges) {
        std::fprintf(stderr, "weights: %-6s %10.2f MiB from byte %llu of %s\n", homeName(range.home),
                     static_cast<double>(range.end - range.begin) / mib, static_cast<unsigned long long>(range.begin),
                     _files->files()[static_cast<size_t>(range.file)].path().c_str());
    }
    std::fprintf(stderr, "weights: %.2f MiB in vram, %.2f MiB direct, the CPU computes %.2f MiB of these\n", static_cast<double>(p.vram) / mib,
                 static_cast<double>(p.direct) / mib, static_cast<double>(p.cpu) / mib);
    if (!p.slots) return;
    const ExpertCounts counts = _backend->expertCounts();
    std::fprintf(stderr, "weights: %.2f MiB of experts in slots: %lld of them are kept in %.2f MiB of VRAM\n", static_cast<double>(p.slots) / mib,
                 static_cast<long long>(counts.resident), static_cast<double>(counts.slotBytes) / mib);
}

// Loads, with less in the device's memory where less is free than the plan thought.
void Engine::loadAdapting() {
    const FittedPlan planned{_options.homes, _options.expertSlotBytes};
    for (int attempt = 1;; ++attempt) {
        try {
            adaptHomes(planned, attempt == kLoadings);
            return load();
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::OutOfMemory) throw;
            unload();
            if (!planned.homes.empty() && attempt < kLoadings) continue;
            const size_t available = _backend->allocator().available();
            if (plannedBytes(_spec, _files->tensors(), _options) <= available) throw;  // it was other memory that is short
            throw Error(ErrorKind::OutOfMemory, std::string(error.what()) + "; " + fittingAdvice(_spec, _files->tensors(), _options, available));
        }
    }
}

// What was free when the plan was made may be gone: then less is resident, and more comes over the bus.
void Engine::adaptHomes(const FittedPlan& planned, bool lastAttempt) {
    if (!_options.cuda || planned.homes.empty()) return;
    const size_t available = _backend->allocator().available();
    _options.homes = planned.homes;
    _options.expertSlotBytes = planned.expertSlotBytes;
    if (lastAttempt || plannedBytes(_spec, _files->tensors(), _options) > available) {
        const FittedPlan fitted = fittedPlan(_spec, _files->tensors(), _options, available - std::min(kReserve, available / 16));
        _options.homes = fitted.homes;
        _options.expertSlotBytes = fitted.expertSlotBytes;
    }
    _notes.clear();
    const uint64_t wanted = placementOf(_spec, _files->tensors(), planned.homes).vram + planned.expertSlotBytes;
    const uint64_t held = placement().vram + _options.expertSlotBytes;
    if (held == wanted) return;
    const auto mib = [](uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
    _notes.push_back("only " + mib(available) + " of VRAM are free: " + mib(held) + " of weights are kept there, not the " + mib(wanted) +
                     " of the plan; it will be slower");
}

void Engine::unload() {
    _forward.reset();
    _kv.reset();
    _weights.reset();
    _backend->unload();
    _trace.restart();
}

void Engine::load() {
    Allocator& allocator = _backend->allocator();
    const StepLimits limits = engineLimits(_spec, _files->tensors(), _options);
    _trace.note("start");
    _weights.emplace(_spec, *_files, _backend->placer(), _options.homes, _options.expertSlotBytes, _options.context, _trace);
    RecurrentState states(allocator, recurrentShapes(_spec), _options.sequences);
    if (states.any()) _trace.note("recurrent state");
    _kv.emplace(allocator, kvShapes(_spec), _options.kvType, _options.context, std::move(states));
    _trace.note("KV cache");
    const size_t before = allocator.held();
    _backend->takeScratch(limits);
    _scratchBytes = allocator.held() - before;
    if (limits.expertSlots) _backend->startExperts(_options.expertUse);
    _trace.note("scratch");
    _forward.emplace(_spec, *_weights, *_backend, *_kv, limits);
    // Where weights are still to come, the first prompt need not wait for a pass of its own.
    if (_options.cuda && !_backend->streams()) rehearse();
    _trace.note("graphs");
}

// A prefill and a decode step, so that kernels are loaded and the step is captured before anyone waits for a token.
void Engine::rehearse() {
    for (const int64_t rows : {std::min<int64_t>(_options.batch, 512), int64_t{1}}) {
        const int32_t sequence = _kv->createSequence();
        Batch batch;
        for (int64_t i = 0; i < rows; ++i) batch.add(0, static_cast<int32_t>(i), sequence, i + 1 == rows);
        _kv->extend(sequence, rows);
        _forward->run(batch, nullptr);
        _forward->sampleLast(SamplingRule(), {}, 0.5);
        _kv->releaseSequence(sequence);
    }
    // Nobody has asked anything yet.
    _backend->expertCounts();
    _backend->profiler().clear();
}

void Engine::warm(const std::function<bool(uint64_t, uint64_t)>& progress) const {
    constexpr uint64_t kPage = 4096, kStep = uint64_t{64} << 20;
    uint64_t total = 0, done = 0;
    for (const MappedFile& file : _files->files()) total += file.bytes();
    volatile uint8_t sink = 0;
    for (const MappedFile& file : _files->files()) {
        for (uint64_t at = 0; at < file.bytes(); at += kPage) {
            sink = sink + file.data()[at];
            if ((done += std::min(kPage, file.bytes() - at)) % kStep < kPage && !progress(done, total)) return;
        }
    }
    progress(total, total);
}

Session::Session(std::shared_ptr<Engine> engine) : _engine(std::move(engine)) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _sequence = _engine->_kv->createSequence();
}

Session::~Session() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _engine->_kv->releaseSequence(_sequence);
}

std::vector<int32_t> Session::tokens() const {
    std::lock_guard<std::mutex> use(_use);
    return _tokens;
}

void Session::requireRoom(int64_t tokens) const {
    std::lock_guard<std::mutex> use(_use);
    checkRoom(tokens);
}

void Session::checkRoom(int64_t tokens) const {
    if (tokens == 0) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (tokens > room()) {
        throw Error(ErrorKind::InvalidArgument, std::to_string(tokens) + " tokens do not fit: the context has room for " +
                                                    std::to_string(room()) + "; load with a larger context or shorten the prompt");
    }
}

void Session::reset() {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    keep(0);
}

// Keeps the first `tokens`, or fewer: see KvCache::truncate.
void Session::keep(int64_t tokens) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    KvCache& kv = *_engine->_kv;  // which a step that failed may have left with fewer
    _tokens.resize(static_cast<size_t>(kv.truncate(_sequence, std::min(tokens, kv.length(_sequence)))));
    _chosen.reset();
}

// Computes again what the cache lost of the session's tokens, with a step that failed.
void Session::recompute() {
    const auto held = static_cast<int64_t>(_tokens.size());
    for (int64_t begin = _engine->_kv->length(_sequence); begin < held;) {
        const int64_t count = std::min(_engine->_options.batch, held - begin);
        run(_tokens.data() + begin, begin, count, Want::Nothing, nullptr);
        begin += count;
    }
}

// Computes one batch of the sequence's tokens, which come at `begin`, with the engine locked. If it throws, the cache is as it
// was, but for a state that there was no room to keep.
void Session::run(const int32_t* tokens, int64_t begin, int64_t count, Want want, float* logits, const std::optional<Sampler::Step>& choice) {
    Batch batch;
    for (int64_t i = 0; i < count; ++i) {
        const bool wanted = want == Want::EveryRow || (want == Want::Choice && i + 1 == count);
        batch.add(tokens[i], static_cast<int32_t>(begin + i), _sequence, wanted);
    }
    _engine->_kv->extend(_sequence, count, count > 1 && want == Want::Choice ? 1 : 0);
    try {
        _engine->_forward->run(batch, logits);
        if (choice) _chosen = _engine->_forward->sampleLast(choice->rule, choice->adjustments, choice->draw);
    } catch (...) {
        _engine->_kv->truncate(_sequence, begin);
        throw;
    }
}

// Evaluates up to one batch. On failure the session holds what it held before.
void Session::step(const int32_t* tokens, int64_t count, Want want, float* logits) {
    // Outside the lock: the random numbers are the session's own.
    std::optional<Sampler::Step> choice;
    if (want == Want::Choice) choice.emplace(_sampler->next(_history));
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    recompute();
    const auto begin = static_cast<int64_t>(_tokens.size());
    run(tokens, begin, count, want, logits, choice);
    // A prompt may be given again, or with another end: all but its last token are then held.
    if (count > 1 && want == Want::Choice) _engine->_kv->keepState(_sequence, begin + count - 1);
    _tokens.insert(_tokens.end(), tokens, tokens + count);
}

void Session::evaluate(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks,
                       const Interrupted& interrupted) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    append(tokens, logits, chunks, interrupted);
}

// With a sampler, the last row's logits give a token; without, every row's are written where `logits` says.
void Session::append(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks,
                     const Interrupted& interrupted) {
    const auto total = static_cast<int64_t>(tokens.size());
    checkRoom(total);
    _chosen.reset();
    int64_t done = 0;
    for (size_t piece = 0; done < total; ++piece) {
        if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
        const int64_t wanted = piece < chunks.size() ? chunks[piece] : _engine->_options.batch;
        const int64_t count = std::clamp<int64_t>(wanted, 1, std::min(_engine->_options.batch, total - done));
        const Want want = logits ? Want::EveryRow : _sampler && done + count == total ? Want::Choice : Want::Nothing;
        step(tokens.data() + done, count, want, logits ? logits + done * _engine->_spec.vocabSize : nullptr);
        done += count;
    }
}

void Session::start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();  // next() refuses to go on from a start that failed
    params.validate(_engine->_spec.vocabSize);
    if (prompt.empty()) throw Error(ErrorKind::InvalidArgument, "the prompt is empty: give at least one token");
    if (static_cast<int64_t>(prompt.size()) > _engine->_options.context) {
        throw Error(ErrorKind::InvalidArgument, "the prompt has " + std::to_string(prompt.size()) + " tokens, the context holds " +
                                                    std::to_string(_engine->_options.context) + ": shorten it or ask for a larger context");
    }
    // The last token is evaluated again even if it is held: its logits are needed.
    int64_t common = 0;
    const auto limit = static_cast<int64_t>(std::min(_tokens.size(), prompt.size() - 1));
    while (common < limit && _tokens[common] == prompt[common]) ++common;
    keep(common);
    _reused = static_cast<int64_t>(_tokens.size());
    _history = prompt;
    _sampler.emplace(params, _engine->_spec.vocabSize);
    try {
        append(std::vector<int32_t>(prompt.begin() + _reused, prompt.end()), nullptr, {}, interrupted);
    } catch (...) {
        _sampler.reset();
        throw;
    }
}

std::optional<int32_t> Session::next() {
    std::lock_guard<std::mutex> use(_use);
    if (!_sampler) throw Error(ErrorKind::Internal, "next() before start()");
    if (!_chosen) {
        if (room() < 1) return std::nullopt;
        step(&_history.back(), 1, Want::Choice, nullptr);
    }
    const int32_t token = checkedToken(*_chosen);
    _chosen.reset();
    _history.push_back(token);
    return token;
}

}  // namespace sharpi
