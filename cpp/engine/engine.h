// A loaded model ready to answer: weights, backend, KV cache and forward pass, and the sequences that talk to it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "engine/forward_pass.h"
#include "engine/memory_plan.h"
#include "engine/placement.h"
#include "engine/sampler.h"

namespace sharpi {

// Asked between pieces of long work; true stops it by throwing Error(InvalidArgument).
using Interrupted = std::function<bool()>;

class Engine {
public:
    // Throws Error(BadModel), Error(OutOfMemory), Error(InvalidArgument).
    Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options);
    // On a backend that the caller made.
    Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options, std::unique_ptr<Backend> backend);

    const ModelSpec& spec() const { return _spec; }
    const EngineOptions& options() const { return _options; }  // with the homes that it has come to
    // Lines for people: what was not as planned.
    std::vector<std::string> notes() const;
    // What has become of the experts; no layers where the model has none. Waits for a step that runs.
    ExpertCounts expertCounts();
    Placement placement() const { return placementOf(_spec, _files->tensors(), _options.homes); }
    Backend& backend() { return *_backend; }
    const std::vector<TraceLine>& trace() const { return _trace.lines(); }
    uint64_t weightBytes() const { return _files->bytes(); }
    size_t kvBytes() const { return _kv->bytes(); }
    size_t stateBytes() const { return _kv->states().bytes(); }
    size_t scratchBytes() const { return _scratchBytes; }
    static size_t kvBytesFor(const ModelSpec& spec, KvType type, int64_t context);

    // Touches every page of the files so that the first tokens need not wait for the disk. Returns when done or
    // when progress(done, total) gives false.
    void warm(const std::function<bool(uint64_t done, uint64_t total)>& progress) const;

private:
    friend class Session;
    void loadAdapting();
    void adaptHomes(const FittedPlan& planned, bool lastAttempt);
    void load();
    void unload();
    void printPlacement() const;
    void rehearse();

    ModelSpec _spec;
    EngineOptions _options;
    std::unique_ptr<Weights> _files;
    std::unique_ptr<Backend> _backend;
    LoadTrace _trace;
    std::vector<std::string> _notes;
    std::optional<ModelWeights> _weights;
    std::optional<KvCache> _kv;
    std::optional<ForwardPass> _forward;
    size_t _scratchBytes = 0;
    std::mutex _mutex;  // one step at a time
};

// One conversation: the tokens in the KV cache, and generation that continues them. Holds its Engine alive.
// Each call is atomic against other threads; callers that hold a lock of their own must not hold it here, since
// `interrupted` is called with the session locked.
class Session {
public:
    explicit Session(std::shared_ptr<Engine> engine);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    std::vector<int32_t> tokens() const;  // evaluated, in order
    int64_t vocabSize() const { return _engine->_spec.vocabSize; }
    // Throws Error(InvalidArgument) when `tokens` more do not fit into the context, or there are none.
    void requireRoom(int64_t tokens) const;
    void reset();

    // Appends tokens; logits, if given, gets [tokens.size(), vocab]: row i follows tokens[0..i].
    // `chunks`: sizes of the pieces to evaluate; empty: the engine's batch size.
    void evaluate(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks, const Interrupted& interrupted);

    // Begins generation after `prompt` (the whole text so far: what the session holds of its beginning is kept).
    // Throws Error(InvalidArgument) for an empty prompt or one that leaves no room in the context.
    void start(const std::vector<int32_t>& prompt, const SamplingParams& params, const Interrupted& interrupted);
    // The next token, or nothing when the context is full. start() must have been called.
    std::optional<int32_t> next();
    int64_t reusedTokens() const { return _reused; }

private:
    enum class Want { Nothing, EveryRow, Choice };  // logits of every row, or a token chosen from the last row's
    int64_t room() const { return _engine->_options.context - static_cast<int64_t>(_tokens.size()); }
    void checkRoom(int64_t tokens) const;
    void keep(int64_t tokens);
    void recompute();
    void run(const int32_t* tokens, int64_t begin, int64_t count, Want want, float* logits,
             const std::optional<Sampler::Step>& choice = std::nullopt);
    void append(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks, const Interrupted& interrupted);
    void step(const int32_t* tokens, int64_t count, Want want, float* logits);

    std::shared_ptr<Engine> _engine;
    int32_t _sequence;
    mutable std::mutex _use;
    std::vector<int32_t> _tokens;
    std::vector<int32_t> _history;  // tokens and the one just chosen
    std::optional<Sampler> _sampler;
    std::optional<int32_t> _chosen;  // by the last step, not yet handed out; -1: none may be chosen
    int64_t _reused = 0;
};

}  // namespace sharpi
