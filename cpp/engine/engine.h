// A loaded model ready to answer: weights, backend, KV cache and forward pass, and the sequences that talk to it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "engine/cpu_backend.h"
#include "engine/forward_pass.h"
#include "engine/sampler.h"

namespace sharpi {

struct EngineOptions {
    int64_t context = 0;  // tokens that the KV cache has room for
    int64_t batch = 512;  // rows that prefill takes at once
    int threads = 1;
    KvType kvType = KvType::BF16;
};

// Asked between pieces of long work; true stops it by throwing Error(InvalidArgument).
using Interrupted = std::function<bool()>;

class Engine {
public:
    // Throws Error(BadModel), Error(OutOfMemory), Error(InvalidArgument).
    Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options);

    const ModelSpec& spec() const { return _spec; }
    const EngineOptions& options() const { return _options; }
    const char* backendName() const { return _backend.name(); }
    uint64_t weightBytes() const { return _weights->bytes(); }
    size_t kvBytes() const { return _kv.bytes(); }
    size_t scratchBytes() { return _backend.memory().held() - _kv.bytes(); }
    static size_t kvBytesFor(const ModelSpec& spec, KvType type, int64_t context);
    static size_t scratchBytesFor(const ModelSpec& spec, const EngineOptions& options);

    // Touches every page of the files so that the first tokens need not wait for the disk. Returns when done or
    // when progress(done, total) gives false.
    void warm(const std::function<bool(uint64_t done, uint64_t total)>& progress) const;

private:
    friend class Session;
    ModelSpec _spec;
    EngineOptions _options;
    std::unique_ptr<Weights> _weights;
    CpuBackend _backend;
    KvCache _kv;
    ForwardPass _forward;
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
    int64_t room() const { return _engine->_options.context - static_cast<int64_t>(_tokens.size()); }
    void keep(int64_t tokens);
    void append(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks, const Interrupted& interrupted);
    void step(const int32_t* tokens, int64_t count, float* logits, bool everyRow);

    std::shared_ptr<Engine> _engine;
    int32_t _sequence;
    mutable std::mutex _use;
    std::vector<int32_t> _tokens;
    std::vector<int32_t> _history;  // tokens and the one just sampled
    std::optional<Sampler> _sampler;
    std::vector<float> _logits;
    bool _logitsReady = false;
    int64_t _reused = 0;
};

}  // namespace sharpi
