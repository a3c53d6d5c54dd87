// The operations that layers are composed of. A processor implements them; layers/ composes them, once for every
// processor, placement and kind of batch.
//
// An operation takes the whole batch: decode rows, which follow core/contract.h, and prompt rows, which are computed as
// the engine's PromptMode says. A row's kind decides its bits; other rows do not.
//
// Products read rows in forms that depend on the matrix: floats, int8 blocks, halves. The operation that writes such
// rows is given the matrices that read them next (`readers`), so it can write exactly these forms. Products write
// floats to named buffers.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>

#include "core/rules/norm.h"
#include "memory/kv_pages.h"
#include "memory/recurrent_state.h"
#include "model/model_spec.h"
#include "operations/row_buffers.h"
#include "placement/weight.h"

namespace sharpi {

// Rows that products read.
enum class RowInput : uint8_t {
    Normed,    // written by norm()
    Attended,  // by attend(), deltaRule() and mamba()
    Hidden,    // by gatedLinear()
    Joined,    // by joinDraft(): [rows, 2 * embedding]
    // By takeRows(), in latent attention and in attention with grouped outputs.
    LowRank,        // [rows, rank of queries]
    PlainQueries,   // [rows * heads, elements of a query that are not rotated]
    HeadValues,     // [rows, heads * elements of a value]
    ExpertLatents,  // by takeRows(): what experts read, or their sum: [rows, rank of latents]
    Streams,        // by StreamOperations::norm(): [rows, streams * embedding]
};
constexpr size_t kRowInputs = static_cast<size_t>(RowInput::Streams) + 1;

// See core/rules/norm.h.
struct NormCall {
    NormKind kind = NormKind::Rms;
    const float* weight = nullptr;
    const float* bias = nullptr;  // of NormKind::Layer; may be nullptr
    float eps = 0;
};

// What a part adds to x: Residual = (Residual + factor * norm(y)) * scale[0]. y is PartOut. If there are side norms,
// two parts stand side by side, and y = sideNorms[0](PartOut) + sideNorms[1](SideOut). All these are RMS norms. PartOut
// and SideOut are not kept.
struct PartCall {
    const float* norm = nullptr;  // nullptr: y stays as it is
    std::array<const float*, 2> sideNorms = {nullptr, nullptr};
    float eps = 0;
    float factor = 1.0f;
    const float* scale = nullptr;  // nullptr: 1
};
using OptionalPart = std::optional<PartCall>;

// y = w x + bias.
struct Product {
    const Weight& w;
    const float* bias = nullptr;  // [w.rows], may be nullptr
    RowBuffer to;
};

// The matrices that read rows next.
using Readers = std::initializer_list<Matrix>;

// The biases of gate and up once more, where the CPU can read them: it may compute a part of a device's step.
struct HostBiases {
    const float *gate = nullptr, *up = nullptr;
};

// The two products of a gated feed-forward part, and what joins them. A part without a gate has an `up` without rows;
// see DenseFfnSpec.
struct GatedProduct {
    const Weight &gate, &up;
    const float *gateBias = nullptr, *upBias = nullptr;  // [gate.rows]; may be nullptr
    Activation activation = {};
    HostBiases hostBiases = {};
    bool gated() const { return up.rows > 0; }
};

// The rows of blocks that a compressor makes; see CompressorSpec. KvPages has the other sizes.
struct CompressCall {
    int32_t blockTokens = 0;
    bool overlaps = false;
    const float* gateOffsets = nullptr;  // [blockTokens, width]
    const float* norm = nullptr;         // [headDim]
    float eps = 0;
    RopeTable rope;
    const KvPages &pending, &rows;
};

// See IndexerSpec.
struct IndexCall {
    int32_t heads = 0, topK = 0;
    float scale = 1.0f;
    RopeTable rope;
    const KvPages& rows;
};

// The streams of hyper-connections; see StreamMixSpec.
struct StreamsCall {
    int32_t count = 0, iterations = 0;
    float epsilon = 0;
    const float *base = nullptr, *scale = nullptr;
};

// The heads of one attention layer. AttentionSpec says what the members mean.
struct HeadsCall {
    int32_t heads = 0;
    float scale = 1.0f;
    bool gated = false;  // GatedQueries holds each head's query and then its gate; else Queries holds the queries
    AttentionSpec::QkNorm qkNorm = AttentionSpec::QkNorm::None;
    bool normAfterRotation = false, valueNorm = false;
    bool appends = true;         // else Keys and Values are not there, and the pages are an earlier layer's
    bool valuesAreKeys = false;  // values are what Keys holds before its norm and rotation; Values is not written
    const float *qNorm = nullptr, *kNorm = nullptr;  // nullptr with PerHead: weights of 1
    float eps = 0;
    RopeTable rope;
    const float* queryScale = nullptr;  // [context]: factors of queries by position, applied last; nullptr: none
    AttentionReach reach;
    float softcap = 0;
    const float* sinks = nullptr;  // [heads] or nullptr
    bool rotatesBack = false;
    const KvPages* blocks = nullptr;  // rows of blocks that are seen too; nullptr: none
    int32_t topK = 0;                 // those that BlockOperations::choose() chose, up to so many; 0: all
};

// Rows in a buffer for products to read: of each row `pieces` pieces of `stride` floats, and of a piece its first
// elements, as many as the matrix has columns.
struct TakenRows {
    RowBuffer from;
    int32_t pieces = 1;
    int64_t stride = 0;
    const float* norm = nullptr;  // of these elements, an RMS norm; nullptr: they stay as they are
    float eps = 0;
};

// A matrix with the same number of rows for each head: those of head h read piece h of the rows. Row i of them gives
// element h * stride + i.
struct HeadProduct {
    const Weight& w;
    int32_t heads = 0;
    RowBuffer to;
    int64_t stride = 0;
};

// The queries and the row of the cache of latent attention; see LatentSpec. KvPages has the sizes.
struct LatentCall {
    int32_t heads = 0, plainDim = 0;
    const float* norm = nullptr;  // [rank]
    float eps = 0;
    RopeTable rope;
    const float* queryScale = nullptr;  // as in HeadsCall
};

// The parameters of one layer of Gated DeltaNet; see GatedDeltaSpec.
struct DeltaCall {
    int32_t keyHeads = 0, valueHeads = 0, headDim = 0, convWidth = 0;
    const float* conv = nullptr;  // [convWidth, channels]
    const float *stepBias = nullptr, *decay = nullptr, *headNorm = nullptr;
    float eps = 0;
    bool consecutiveHeads = false;  // see GatedDeltaSpec
    // DeltaSteps holds, key head by key head, the betas and then the alphas of its value heads; DeltaAlpha and
    // DeltaBeta are not written before.
    bool fusedSteps = false;
    // The key head that a value head reads.
    int32_t keyHeadOf(int32_t head) const {
        return consecutiveHeads ? head / (valueHeads / keyHeads) : head % keyHeads;
    }
    int64_t keyWidth() const { return int64_t{keyHeads} * headDim; }
    int64_t valueWidth() const { return int64_t{valueHeads} * headDim; }
    int64_t channels() const { return 2 * keyWidth() + valueWidth(); }
};

// The parameters of one layer of Mamba 2; see MambaSpec.
struct MambaCall {
    int32_t heads = 0, groups = 0, headDim = 0, stateDim = 0, convWidth = 0;
    const float *conv = nullptr, *convBias = nullptr;  // [convWidth, channels]; [channels] or nullptr
    const float *stepBias = nullptr, *rate = nullptr, *skip = nullptr, *norm = nullptr;
    float eps = 0;
    int64_t width() const { return int64_t{heads} * headDim; }
    int64_t channels() const { return width() + 2 * int64_t{groups} * stateDim; }
};

// How a layer's rows choose experts. RoutingSpec says what the members mean.
struct RouterCall {
    NormCall norm;  // of the rows that the router reads
    const Weight* router = nullptr;
    const float *bias = nullptr, *choiceBias = nullptr, *outputScale = nullptr;
    const float* tokenChoices = nullptr;  // [vocab, used] or nullptr
    int32_t expertLayer = 0;              // the layer's number among those with experts
    int32_t count = 0, used = 0;
    Gating gating = Gating::Softmax;
    int32_t groups = 1, groupsUsed = 1;
    bool renormalize = true;
    float weightScale = 1.0f;
    bool weightsInput = false;
};

struct ExpertCall {
    RouterCall routing;
    const WeightStack &gate, &up, &down;
    const float *gateBias = nullptr, *upBias = nullptr, *downBias = nullptr;  // see ExpertFfnSpec
    HostBiases hostBiases = {};
    Activation activation = {};
    RowInput from = RowInput::Normed;     // or ExpertLatents: what experts read, as wide as what they give
    RowBuffer to = RowBuffer::Residual;   // added to Residual; any other buffer is overwritten
    bool shared = false;                  // SharedOut holds a shared expert's output
    const float* sharedScale = nullptr;   // [embedding], of the shared expert; nullptr: it is added with the weight 1
    std::optional<RouterCall> next = {};  // of the next layer with experts, for guesses at what it will choose
    ExpertStacks inFile() const { return {gate.file, up.file, down.file}; }
    bool gated() const { return up.count > 0; }
};

// The per-layer embeddings of a batch; see LayerInputsSpec.
struct LayerInputsCall {
    const Weight& table;
    int64_t width = 0;            // of one layer
    const float* norm = nullptr;  // [width]
    float eps = 0;
};

// The output head.
struct HeadCall {
    NormCall norm;
    const Weight& output;
    float scale = 1.0f;  // see ModelSpec::logitScale
    float softcap = 0;   // see ModelSpec::logitSoftcap
};

// The operations of hyper-connections.
class StreamOperations {
public:
    virtual ~StreamOperations() = default;

    // Each of a row's streams = Residual.
    virtual void begin() = 0;
    // RowInput::Streams = the streams of a row as one vector, RMS-normalized, for the product with `reader`.
    virtual void norm(float eps, const Weight& reader) = 0;
    // StreamMix holds that product. Residual = the weighted sum of the streams. Keeps in StreamMix what leave()
    // needs.
    virtual void enter(const StreamsCall& call) = 0;
    // Mixes the streams and adds PartOut to each.
    virtual void leave(const StreamsCall& call) = 0;
    // StreamMix holds the product of the model's end. Residual = the weighted sum of the streams.
    virtual void end(const StreamsCall& call) = 0;
};

// Rows of the cache that stand for blocks of tokens.
class BlockOperations {
public:
    // Appends CompressorKeys and CompressorGates to the cache, and the rows of the blocks that end in the batch.
    virtual void compress(const CompressCall& call) = 0;
    // IndexQueries and IndexWeights say which blocks each row sees in the next attend().
    virtual void choose(const IndexCall& call) = 0;

protected:
    ~BlockOperations() = default;
};

class Operations {
public:
    virtual ~Operations() = default;

    // Residual row t = the table's row of token t, times scale.
    virtual void embed(const Weight& table, float scale) = 0;
    // Adds the part, if there is one. Then Normed = Residual, for products that read the rows as they are.
    virtual void copyRows(const OptionalPart& part, Readers readers) = 0;
    // Adds the part, if there is one. Then Normed = norm(Residual). floats: rows are also read as floats, by route()
    // for a shared expert's scale.
    virtual void norm(const OptionalPart& part, const NormCall& norm, Readers readers, bool floats) = 0;
    // Adds the part alone.
    virtual void addPart(const PartCall& part) = 0;
    // All products read the same rows.
    virtual void linear(RowInput x, std::initializer_list<Product> products) = 0;
    // Residual += w x + bias.
    virtual void addLinear(RowInput x, const Weight& w, const float* bias) = 0;
    // Hidden = activation(gate x + gateBias, up x + upBias), for the product with `reader`. Without an `up`: Hidden =
    // activation(gate x + gateBias).
    virtual void gatedLinear(RowInput x, const GatedProduct& product, const Weight& reader) = 0;
    // LayerInputs holds the projection of the rows, and becomes what LayerInputsSpec says.
    virtual void joinLayerInputs(const LayerInputsCall& call) = 0;
    // Hidden = gelu(Gate) * the layer's part of LayerInputs, for the product with `reader`.
    virtual void gateLayerInput(int32_t layer, int64_t width, const Weight& reader) = 0;

    // Normalizes, rotates and scales the heads of Queries and Keys, normalizes those of Values, and appends Keys and
    // Values to the cache.
    virtual void prepareHeads(const HeadsCall& heads, const KvPages& pages) = 0;
    // `to` = the rows, for the products with `readers`, which have the same number of columns.
    virtual void takeRows(const TakenRows& rows, RowInput to, Readers readers) = 0;
    // Head by head: call.to = w x.
    virtual void linearByHead(RowInput x, const HeadProduct& call) = 0;
    // Queries holds the product of each head's plain query with keyUp, where its first `rank` elements belong.
    // HeadQueries holds its plain query and then what is rotated, which becomes the rest. All of Queries is scaled by
    // position. Keys holds a latent, which is normalized, and a key, which is rotated; both are appended to the cache.
    virtual void prepareLatent(const LatentCall& call, const KvPages& pages) = 0;
    // Attended = softmax(scale * q k^T) v over the sequence's cache, times sigmoid(gate) if heads are gated.
    virtual void attend(const HeadsCall& heads, const KvPages& pages, const Weight& reader) = 0;
    // Attended = headNorm(deltaRule(silu(conv(DeltaMixed)), DeltaAlpha, DeltaBeta)) * silu(DeltaGate). The sequences'
    // states move on, from and to the entries that the cache given to Backend::begin() names.
    virtual void deltaRule(const DeltaCall& call, const RecurrentLayer& state, const Weight& reader) = 0;

    // Attended = what core/rules/mamba.h makes of MambaGate, MambaMixed and MambaSteps. The sequences' states move on,
    // as in deltaRule().
    virtual void mamba(const MambaCall& call, const RecurrentLayer& state, const Weight& reader) = 0;
    // For models with compressed keys, and with streams of residuals.
    virtual BlockOperations& blocks() = 0;
    virtual StreamOperations& streams() = 0;
    // Each row chooses its experts by RouterLogits. The shared expert, if there is one, is computed between route() and
    // experts(): it reads Normed, and its output goes to SharedOut.
    virtual void route(const ExpertCall& call) = 0;
    // call.to = sum over the chosen experts of weight * (down(activation(gate n, up n)) + downBias), n = call.from,
    // summed by rank; then SharedOut times sigmoid(sharedScale . n). The sum is added to Residual, but replaces any
    // other buffer. With weightsInput the experts read weight * n, and their answers have the weight 1.
    virtual void experts(const ExpertCall& call) = 0;

    // What a prediction layer starts from. Joined row t = [norms[0](the table's row of token t), norms[1](n)], where n
    // = rmsNorm(Residual row sources[t], sourceNorm) is what the output head read of that row.
    virtual void joinDraft(const Weight& table, const float* norms, const float* sourceNorm, float eps,
                           const Weight& reader) = 0;
    // Logits of the rows [first, first + count) of batch.logitRows, count <= Backend::headRows(), kept until the next
    // call: softcap(scale * (output norm(Residual))). They follow core/contract.h whatever the row's kind.
    virtual void head(const HeadCall& call, int64_t first, int64_t count) = 0;
};

}  // namespace sharpi
