// What ForwardPass asks of a processor: the blocks of a model over a batch, in memory that the processor reads.
// Nothing above this interface knows which processor it is.
//
// The blocks are as large as they are so that a backend can fuse what lies between two products. Activations are
// floats, row-major and contiguous.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/sampling_rule.h"
#include "experts/expert_profiler.h"
#include "memory/kv_cache.h"
#include "operations/batch.h"
#include "placement/layer_weights.h"
#include "placement/placer.h"

namespace sharpi {

// What a backend's buffers are sized for. Nothing grows after they are taken.
struct StepLimits {
    int64_t maxRows = 1;  // rows of a batch
    int64_t context = 1;  // tokens of a sequence
    int64_t embedding = 1, vocab = 1;
    int64_t maxCols = 1;                                          // inputs of any matrix
    int32_t heads = 1, kvHeads = 1, headDim = 2, pageTokens = 1;  // the largest of any layer
    int64_t queryWidth = 1, kvWidth = 1;                          // floats of a row's queries, and of its keys
    int64_t denseHidden = 0;
    int32_t experts = 0, expertsUsed = 0;  // of any layer
    int32_t expertLayers = 0;
    std::vector<std::pair<int32_t, int32_t>> expertRows;  // of each of these: its number in the model, and its experts
    int64_t expertHidden = 0, sharedHidden = 0;           // sharedHidden: of the expert for every token
    bool expertSlots = false;                             // experts are in Slots, perhaps with room for none
    int64_t gatedQueryWidth = 0;                          // queries and their gates; 0: no gates
    int64_t deltaChannels = 0, deltaWidth = 0;            // Gated DeltaNet: of q, k and v; of v
    int32_t deltaHeads = 0, deltaDim = 0, deltaConvWidth = 0;
    bool drafts = false;        // there is a prediction layer
    bool floatWeights = false;  // some matrix is F32
    KvType kvType = KvType::BF16;
    PromptMode prompt = PromptMode::Fast;
};

// Experts that are not resident.
struct ExpertUse {
    // Bytes per second at which the CPU computes experts and the GPU fetches them while both do: how a layer's misses
    // are shared between them. No rate of the bus: all are the CPU's.
    double cpuRate = 0, busRate = 0;
    // (layer in the model, expert), most wanted first: what the slots are to hold from the beginning; others follow as
    // there is room.
    std::vector<std::pair<int32_t, int32_t>> warm;
};

// What a pass goes through.
enum class Pass {
    Model,       // the model's layers
    Draft,       // its prediction layer, on from rows of the model
    DraftAgain,  // the same, on from rows of itself
};

// The weights that are used.
inline WeightStream::Part partOf(Pass pass) {
    return pass == Pass::Model ? WeightStream::Part::Model : WeightStream::Part::Prediction;
}

// A token to be chosen by core/sampling_rule.h.
struct Choice {
    int64_t row = 0;  // of the last head()
    SamplingRule rule;
    std::vector<TokenAdjustment> adjustments;  // by ascending token
    double draw = 0;                           // in [0, 1)
};

StepLimits stepLimits(const ModelSpec& spec, const TensorTable& tensors, int64_t maxRows, int64_t context,
                      KvType kvType);

class Backend {
public:
    virtual ~Backend() = default;
    virtual const char* device() const = 0;  // "cpu", "cuda"
    virtual const char* name() const = 0;    // the instruction set, or the GPU's name
    virtual Allocator& allocator() = 0;
    virtual Placer& placer() = 0;
    // Whether weights come over the bus in every pass.
    virtual bool streams() const = 0;
    // Lines for people about what went otherwise than wanted, so far.
    virtual std::vector<std::string> notes() const { return {}; }
    // To be called before weights are placed: `told` hears when all that is resident has arrived
    // (WeightStream::onUploaded). Where weights stay in the mapped file it never does.
    virtual void whenUploaded(std::function<void(double seconds)> told) { (void)told; }
    // Gives everything back that was placed or taken: loading may begin anew.
    virtual void unload() = 0;
    // What has become of the experts so far. The rows are the layers that have been added.
    ExpertAccessProfiler& profiler() { return _profiler; }
    virtual ExpertCounts expertCounts() { return _profiler.counts(); }
    // Takes all scratch. To be called once, after weights and KV cache are placed. Throws Error(OutOfMemory).
    virtual void takeScratch(const StepLimits& limits) = 0;
    // How experts that are not resident are used, and which are to be in slots first. After takeScratch(); returns when
    // they are there.
    virtual void startExperts(const ExpertUse&) {}

    // The most decode rows of a batch.
    virtual int64_t decodeRows() const = 0;
    // Whether prompt rows are computed as decode rows are. A row's kind then does not show.
    virtual bool oneArithmetic() const = 0;
    // A sequence's prompt rows must begin at a position that is a multiple of this: a recurrent layer takes them in
    // whole tiles.
    virtual int64_t promptStep() const = 0;

    // Everything below works on the batch given here; its tokens have room in the cache.
    virtual void begin(const Batch& batch, const KvCache& kv) = 0;
    // Runs body, which only calls the blocks below: the same ones for each kind of pass, so that those of batches of
    // the same shape may be recorded and replayed.
    virtual void region(Pass pass, const std::function<void()>& body) = 0;
    // Whether it is: off where there is nothing to record.
    virtual bool replays() const { return false; }
    virtual void setReplays(bool) {}
    virtual int64_t kernelsPerStep() const { return 0; }  // launched by the last region()

    // x: [rows, embedding], the backend's own. Row t = the table's row of token t.
    virtual void embed(const Weight& table) = 0;
    // What a prediction layer goes on from. x row t = projection [norms[0](the table's row of token t), norms[1](n)],
    // one behind the other, with n = rmsNorm(x's row sources[t], sourceNorm): what the output head read of that row.
    virtual void joinDraft(const PredictionWeights& weights, const float* sourceNorm, float eps) = 0;
    // x += output(attention(norm(x))), or output(attention(norm(x)) * sigmoid(gate)) where it is gated
    virtual void attention(const AttentionWeights& weights, const KvPages& pages, float eps) = 0;
    // x += output(headNorm(deltaRule(silu(conv(qkv n)), alpha n, beta n)) * silu(gate n)), n = norm(x); the sequences'
    // states are taken on, from and to the slots that the cache given to begin() names.
    virtual void gatedDelta(const GatedDeltaWeights& weights, const RecurrentLayer& state, float eps) = 0;
    // x += down(silu(gate n) * up n), n = norm(x)
    virtual void dense(const DenseWeights& weights, float eps) = 0;
    // x += sum over the chosen experts of weight * down(silu(gate n) * up n), summed by rank; then the shared expert's,
    // where there is one, times sigmoid(scale . n)
    virtual void experts(const ExpertWeights& weights, float eps) = 0;
    // Logits of the rows [first, first + count) of batch.logitRows, count <= headRows(), kept until the next call.
    virtual void head(const HeadWeights& weights, float eps, int64_t first, int64_t count) = 0;
    virtual int64_t headRows() const = 0;

    // Row i of the last head(): [vocab] floats to host memory.
    virtual void readLogits(int64_t row, int64_t count, float* out) = 0;
    // A token from each of these rows, each of them once: the row is changed. -1: no token may be chosen.
    virtual std::vector<int32_t> sample(const std::vector<Choice>& choices) = 0;

protected:
    // By takeScratch().
    void profile(const StepLimits& limits) {
        if (_profiler.counts().layers > 0) return _profiler.clear();  // loading began anew
        for (const auto& [layer, experts] : limits.expertRows) _profiler.addLayer(layer, experts);
    }

private:
    ExpertAccessProfiler _profiler;
};

}  // namespace sharpi
