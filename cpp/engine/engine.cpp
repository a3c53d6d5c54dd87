// See engine.h.
#include "engine/engine.h"

#include <algorithm>
#include <cstdio>

#include "core/error.h"
#include "engine/rehearsal.h"
#include "experts/expert_prefetcher.h"
#include "hardware/devices.h"
#include "planning/memory_plan.h"

namespace sharpi {

namespace {

EngineOptions checked(const ModelSpec& spec, EngineOptions options) {
    if (options.context < 1) throw Error(ErrorKind::InvalidArgument, "context must be at least 1 token");
    if (options.context > spec.contextLength) {
        throw Error(ErrorKind::InvalidArgument, "a context of " + std::to_string(options.context) +
                                                    " is larger than the model's " +
                                                    std::to_string(spec.contextLength));
    }
    prefetchWanted();  // throws for an unknown setting, before anything is loaded
    if (options.batch < 1 || options.batch > 65536)
        throw Error(ErrorKind::InvalidArgument, "batch must be 1 to 65536 rows");
    options.batch = batchRows(options);
    if (options.cacheTokens < 0) throw Error(ErrorKind::InvalidArgument, "a cache of fewer than 0 tokens");
    if (options.sequences < 1 || options.sequences > 4096)
        throw Error(ErrorKind::InvalidArgument, "sequences must be 1 to 4096");
    for (const TensorHome& home : options.homes) {
        if (home.cpuRows < 0)
            throw Error(ErrorKind::InvalidArgument, "a plan with a negative number of rows for the CPU");
    }
    return options;
}

}  // namespace

Engine::Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options)
    : Engine(std::move(spec), std::move(weights), options, makeBackend(options.device, options.vram, options.threads)) {
}

Engine::Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options,
               std::unique_ptr<Backend> backend)
    : _spec(std::move(spec)),
      _options(checked(_spec, options)),
      _files(std::move(weights)),
      _backend(std::move(backend)),
      _trace(_backend->allocator(), LoadTrace::wanted() ? options.device.kind->memoryName() : nullptr) {
    if (!_options.device.kind->keepsWeights()) _options.homes.clear();
    if (!_options.homes.empty() && _options.homes.size() != _files->tensors().all().size()) {
        throw Error(ErrorKind::InvalidArgument, "a plan for " + std::to_string(_options.homes.size()) +
                                                    " tensors; the model has " +
                                                    std::to_string(_files->tensors().all().size()));
    }
    _options.device.kind->requireCanRun(_spec);
    _options.homes = normalized(_spec, std::move(_options.homes));
    loadOrGiveBack();
    if (LoadTrace::wanted()) printPlacement();
}

ExpertCounts Engine::expertCounts() { return _runner->lock().backend().expertCounts(false); }

Placement Engine::placement() const {
    return _options.device.kind->keepsWeights() ? placementOf(_spec, _files->tensors(), _options.homes)
                                                : placementOnCpu(_spec, _files->tensors());
}

std::optional<double> Engine::uploadSeconds() const {
    const double seconds = _uploadSeconds;
    return seconds < 0 ? std::nullopt : std::optional(seconds);
}

// There is nothing to say about a cache that holds everything.
void Engine::uploaded(double seconds) {
    _uploadSeconds = seconds;
    const Placement p = placement();
    if (!LoadTrace::wanted() || p.kept == p.candidates) return;
    const double mib = 1 << 20;
    std::fprintf(stderr, "weights: %d of %d tensors are kept in vram, %.2f of %.2f MiB, brought there in %.0f ms\n",
                 p.kept, p.candidates, static_cast<double>(p.keptBytes) / mib,
                 static_cast<double>(p.candidateBytes) / mib, seconds * 1e3);
}

void Engine::printPlacement() const {
    const Placement p = placement();
    const double mib = 1 << 20;
    for (const Placement::Range& range : p.ranges) {
        std::fprintf(stderr, "weights: %-6s %10.2f MiB from byte %llu of %s\n", homeName(range.home),
                     static_cast<double>(range.end - range.begin) / mib, static_cast<unsigned long long>(range.begin),
                     _files->files()[static_cast<size_t>(range.file)].path().c_str());
    }
    if (!_options.device.kind->keepsWeights()) {
        std::fprintf(stderr, "weights: %.2f MiB in ram, where the file is mapped\n", static_cast<double>(p.ram) / mib);
        return;
    }
    std::fprintf(stderr, "weights: %.2f MiB in vram, %.2f MiB direct, the CPU computes %.2f MiB of these\n",
                 static_cast<double>(p.vram) / mib, static_cast<double>(p.direct) / mib,
                 static_cast<double>(p.cpu) / mib);
    if (!p.slots) return;
    const ExpertCounts counts = _backend->expertCounts(false);
    std::fprintf(stderr, "weights: %.2f MiB of experts in slots: %lld of them are kept in %.2f MiB of VRAM\n",
                 static_cast<double>(p.slots) / mib, static_cast<long long>(counts.resident),
                 static_cast<double>(counts.slotBytes) / mib);
}

void Engine::loadOrGiveBack() {
    try {
        requireRoom();
        load();
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::OutOfMemory) throw;
        unload();
        throw Error(error.what(),
                    {_backend->allocator().available(), plannedBytes(_spec, _files->tensors(), _options)});
    }
}

// A plan counts what the driver will take with the first tokens too. If that is not there, loading may succeed and the
// first step fail, so such a plan is refused at once.
void Engine::requireRoom() {
    if (_options.homes.empty() || _options.tight) return;
    const size_t available = _backend->allocator().available(),
                 wanted = plannedBytes(_spec, _files->tensors(), _options);
    if (wanted <= available) return;
    const auto mib = [](size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
    throw Error(ErrorKind::OutOfMemory, "the plan needs " + mib(wanted) + " of memory on " +
                                            _backend->allocator().memory().name() + ", where " + mib(available) +
                                            " are available");
}

void Engine::unload() {
    _runner.reset();
    _weights.reset();
    _backend->unload();
}

void Engine::load() {
    Allocator& allocator = _backend->allocator();
    const StepLimits limits = engineLimits(_spec, _files->tensors(), _options);
    _trace.note("start");
    _backend->readFrom(_files->files(), _options.expertRamBytes);
    _backend->whenUploaded([this](double seconds) { uploaded(seconds); });
    _weights.emplace(_spec, *_files, _backend->placer(), _options.homes, slotBudget(_options), _options.context,
                     _trace);
    RecurrentState states(allocator, recurrentShapes(_spec), _options.sequences);
    if (states.any()) _trace.note("recurrent state");
    KvCache kv(allocator, kvShapes(_spec), _options.kvType, kvRoom(_options), std::move(states));
    _trace.note("KV cache");
    const size_t before = allocator.held();
    _backend->takeScratch(limits);
    _scratchBytes = allocator.held() - before;
    _backend->startExperts(_options.expertUse);
    _trace.note("scratch");
    _runner.emplace(_spec, *_weights, *_backend, std::move(kv), limits);
    // Where weights are still to come, the first prompt need not wait for a pass of its own.
    if (_options.device.kind->keepsWeights() && !_backend->bus().streams) {
        rehearse(*_runner, _spec, _options);
        _backend->expertCounts(true);  // nobody has asked anything yet
    }
    _trace.note("graphs");
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

}  // namespace sharpi
