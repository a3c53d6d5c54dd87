// A loaded model ready to answer: weights, backend, KV cache and forward pass. Sessions (session.h) talk to it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "engine/model_runner.h"
#include "placement/placement.h"
#include "planning/engine_options.h"

namespace sharpi {

class Engine {
public:
    // Loads what the options say, or throws Error(BadModel), Error(InvalidArgument), or Error(OutOfMemory) with a
    // Shortage; everything taken is given back then.
    Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options);
    // On a backend that the caller made.
    Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options,
           std::unique_ptr<Backend> backend);

    const ModelSpec& spec() const { return _spec; }
    const EngineOptions& options() const { return _options; }
    // Messages for people: what has not gone as planned.
    std::vector<std::string> notes() const { return _backend->notes(); }
    // How the experts have been used; no layers if the model has none. Waits for a running step.
    ExpertCounts expertCounts();
    Placement placement() const;
    // Seconds that bringing over the resident weights took; none until all have arrived, or on the CPU.
    std::optional<double> uploadSeconds() const;
    Backend& backend() { return *_backend; }
    ModelRunner& runner() { return *_runner; }
    const std::vector<TraceLine>& trace() const { return _trace.lines(); }
    uint64_t weightBytes() const { return _files->bytes(); }
    size_t kvBytes() const { return _runner->kvBytes(); }
    size_t stateBytes() const { return _runner->stateBytes(); }
    size_t scratchBytes() const { return _scratchBytes; }
    // What holds the device's memory, largest first; on the CPU the mapped file is not counted. Does not wait for a
    // running step.
    std::vector<Holding> holdings() const { return _backend->allocator().holdings(); }

    // Touches every page of the files so that the first tokens need not wait for the disk. Returns when done or
    // when progress(done, total) gives false.
    void warm(const std::function<bool(uint64_t done, uint64_t total)>& progress) const;

private:
    void loadOrGiveBack();
    void requireRoom();
    void load();
    void unload();
    void printPlacement() const;
    void uploaded(double seconds);

    ModelSpec _spec;
    EngineOptions _options;
    std::unique_ptr<Weights> _files;
    std::unique_ptr<Backend> _backend;
    LoadTrace _trace;
    std::atomic<double> _uploadSeconds{-1};  // < 0: not all weights have arrived
    std::optional<ModelWeights> _weights;
    std::optional<ModelRunner> _runner;
    size_t _scratchBytes = 0;
};

}  // namespace sharpi
