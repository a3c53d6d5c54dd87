// See engine.h.
#include "engine/engine.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

std::vector<KvLayerShape> kvShapes(const ModelSpec& spec) {
    std::vector<KvLayerShape> shapes;
    for (const LayerSpec& layer : spec.layers) shapes.push_back({layer.attention.kvHeads, layer.attention.headDim});
    return shapes;
}

CpuLimits cpuLimits(const ModelSpec& spec, const EngineOptions& options) {
    CpuLimits limits;
    limits.maxRows = options.batch;
    limits.embedding = limits.maxCols = spec.embedding;
    limits.pageTokens = KvCache::kPageTokens;
    for (const LayerSpec& layer : spec.layers) {
        const AttentionSpec& a = layer.attention;
        limits.heads = std::max(limits.heads, a.heads);
        limits.kvHeads = a.kvHeads;
        limits.headDim = std::max(limits.headDim, a.headDim);
        limits.maxCols = std::max(limits.maxCols, int64_t{a.heads} * a.headDim);
        if (layer.dense) limits.maxCols = std::max(limits.maxCols, layer.dense->hidden());
        if (layer.experts) {
            limits.maxCols = std::max(limits.maxCols, layer.experts->hidden());
            limits.experts = std::max(limits.experts, layer.experts->count);
            limits.expertsUsed = std::max(limits.expertsUsed, layer.experts->used);
            limits.expertHidden = std::max(limits.expertHidden, layer.experts->hidden());
        }
    }
    return limits;
}

EngineOptions checked(const ModelSpec& spec, EngineOptions options) {
    if (options.context < 1) throw Error(ErrorKind::InvalidArgument, "context must be at least 1 token");
    if (options.context > spec.contextLength) {
        throw Error(ErrorKind::InvalidArgument, "a context of " + std::to_string(options.context) +
                                                    " is larger than the model's " + std::to_string(spec.contextLength));
    }
    if (options.batch < 1 || options.batch > 65536) throw Error(ErrorKind::InvalidArgument, "batch must be 1 to 65536 rows");
    options.batch = std::min(options.batch, options.context);
    return options;
}

}  // namespace

size_t Engine::kvBytesFor(const ModelSpec& spec, KvType type, int64_t context) {
    return KvCache::bytesFor(kvShapes(spec), type, context);
}

size_t Engine::scratchBytesFor(const ModelSpec& spec, const EngineOptions& options) {
    EngineOptions used = options;
    used.batch = std::min(options.batch, options.context);
    return CpuBackend::scratchBytes(used.threads, cpuLimits(spec, used)) + ForwardPass::scratchBytes(spec, used.batch, used.context);
}

Engine::Engine(ModelSpec spec, std::unique_ptr<Weights> weights, const EngineOptions& options)
    : _spec(std::move(spec)),
      _options(checked(_spec, options)),
      _weights(std::move(weights)),
      _backend(_options.threads, cpuLimits(_spec, _options)),
      _kv(_backend.memory(), kvShapes(_spec), _options.kvType, _options.context),
      _forward(_spec, *_weights, _backend, _kv, _options.batch, _options.context) {}

void Engine::warm(const std::function<bool(uint64_t, uint64_t)>& progress) const {
    constexpr uint64_t kPage = 4096, kStep = uint64_t{64} << 20;
    uint64_t total = 0, done = 0;
    for (const MappedFile& file : _weights->files()) total += file.bytes();
    volatile uint8_t sink = 0;
    for (const MappedFile& file : _weights->files()) {
        for (uint64_t at = 0; at < file.bytes(); at += kPage) {
            sink = sink + file.data()[at];
            if ((done += std::min(kPage, file.bytes() - at)) % kStep < kPage && !progress(done, total)) return;
        }
    }
    progress(total, total);
}

Session::Session(std::shared_ptr<Engine> engine) : _engine(std::move(engine)) {
    _logits.resize(_engine->_spec.vocabSize);
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _sequence = _engine->_kv.createSequence();
}

Session::~Session() {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _engine->_kv.releaseSequence(_sequence);
}

std::vector<int32_t> Session::tokens() const {
    std::lock_guard<std::mutex> use(_use);
    return _tokens;
}

void Session::requireRoom(int64_t tokens) const {
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

void Session::keep(int64_t tokens) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    _engine->_kv.truncate(_sequence, tokens);
    _tokens.resize(tokens);
    _logitsReady = false;
}

// Evaluates up to one batch. On failure the session holds what it held before.
void Session::step(const int32_t* tokens, int64_t count, float* logits, bool everyRow) {
    std::lock_guard<std::mutex> lock(_engine->_mutex);
    const auto begin = static_cast<int64_t>(_tokens.size());
    Batch batch;
    for (int64_t i = 0; i < count; ++i) {
        batch.add(tokens[i], static_cast<int32_t>(begin + i), _sequence, logits && (everyRow || i + 1 == count));
    }
    _engine->_kv.extend(_sequence, count);
    try {
        _engine->_forward.run(batch, logits);
    } catch (...) {
        _engine->_kv.truncate(_sequence, begin);
        throw;
    }
    _tokens.insert(_tokens.end(), tokens, tokens + count);
}

void Session::evaluate(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks,
                       const Interrupted& interrupted) {
    std::lock_guard<std::mutex> use(_use);
    _sampler.reset();
    append(tokens, logits, chunks, interrupted);
}

void Session::append(const std::vector<int32_t>& tokens, float* logits, const std::vector<int64_t>& chunks,
                     const Interrupted& interrupted) {
    const auto total = static_cast<int64_t>(tokens.size());
    requireRoom(total);
    _logitsReady = false;
    int64_t done = 0;
    for (size_t piece = 0; done < total; ++piece) {
        if (interrupted && interrupted()) throw Error(ErrorKind::InvalidArgument, "interrupted");
        const int64_t wanted = piece < chunks.size() ? chunks[piece] : _engine->_options.batch;
        const int64_t count = std::clamp<int64_t>(wanted, 1, std::min(_engine->_options.batch, total - done));
        float* rows = logits ? logits + done * _engine->_spec.vocabSize : done + count == total ? _logits.data() : nullptr;
        step(tokens.data() + done, count, rows, logits != nullptr);
        done += count;
    }
    if (logits) std::copy_n(logits + (total - 1) * _engine->_spec.vocabSize, _engine->_spec.vocabSize, _logits.begin());
    _logitsReady = true;
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
    _reused = common;
    _history = prompt;
    append(std::vector<int32_t>(prompt.begin() + common, prompt.end()), nullptr, {}, interrupted);
    _sampler.emplace(params, _engine->_spec.vocabSize);
}

std::optional<int32_t> Session::next() {
    std::lock_guard<std::mutex> use(_use);
    if (!_sampler) throw Error(ErrorKind::Internal, "next() before start()");
    if (!_logitsReady) {
        if (room() < 1) return std::nullopt;
        step(&_history.back(), 1, _logits.data(), false);
        _logitsReady = true;
    }
    // A copy: should nothing be choosable, the session stays as it is.
    std::vector<float> adjusted = _logits;
    const int32_t token = _sampler->sample(adjusted.data(), _history);
    _history.push_back(token);
    _logitsReady = false;
    return token;
}

}  // namespace sharpi
