// See layers.h.
#include "layers/layers.h"

namespace sharpi {

namespace {

RouterCall routerOf(const LayerContext& context, const LayerSpec& layer) {
    const RoutingSpec& r = layer.experts->routing;
    const ModelWeights& w = context.weights;
    RouterCall call;
    call.norm = w[layer.parallel ? layer.parallel->routerIn : layer.ffnNorm];
    call.router = &w[r.router];
    call.bias = w[r.bias];
    call.choiceBias = w[r.choiceBias];
    call.outputScale = w[r.outputScale];
    call.expertLayer = layer.experts->expertLayer;
    call.count = r.count;
    call.used = r.used;
    call.gating = r.gating;
    call.groups = r.groups;
    call.groupsUsed = r.groupsUsed;
    call.renormalize = r.renormalize;
    call.weightScale = r.weightScale;
    call.weightsInput = r.weightsInput;
    call.eps = context.spec.normEpsilon;
    return call;
}

// What a mixer or a feed-forward part adds to x goes through `norm` first if there is one.
void addPart(const LayerContext& context, RowInput x, const Weight& w, const float* bias, VectorId norm) {
    if (!norm) return context.ops.addLinear(x, w, bias);
    context.ops.linear(x, {{w, bias, RowBuffer::PartOut}});
    context.ops.addNormed(RowBuffer::PartOut, context.weights[norm], context.spec.normEpsilon, RowBuffer::Residual,
                          true);
}

HeadsCall headsOf(const LayerContext& context, const AttentionSpec& a) {
    const ModelWeights& w = context.weights;
    HeadsCall heads;
    heads.heads = a.heads;
    heads.scale = a.scale;
    heads.gated = a.gated;
    heads.qkNorm = a.qkNorm;
    heads.normAfterRotation = a.normAfterRotation;
    heads.valueNorm = a.valueNorm;
    heads.appends = a.kvLayer < 0;
    heads.valuesAreKeys = heads.appends && !a.v;
    heads.qNorm = w[a.qNorm];
    heads.kNorm = w[a.kNorm];
    heads.eps = context.spec.normEpsilon;
    heads.rope = w.rope(a.rope);
    heads.queryScale = w.queryScale(a.queryScale);
    heads.reach = a.reach;
    heads.softcap = a.softcap;
    heads.sinks = w[a.sinks];
    return heads;
}

// Writes SharedOut.
void sharedExpert(const LayerContext& context, const SharedExpertSpec& shared, Activation activation) {
    const ModelWeights& w = context.weights;
    const Weight& down = w[shared.down];
    context.ops.gatedLinear(RowInput::Normed, {w[shared.gate], w[shared.up], nullptr, nullptr, activation}, down);
    context.ops.linear(RowInput::Hidden, {{down, nullptr, RowBuffer::SharedOut}});
}

// x += output(attention(norm(x)))
void attentionLayer(const LayerContext& context, const LayerSpec& layer, const KvPages& pages) {
    const AttentionSpec& a = *layer.attention;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &q = w[a.q], &output = w[a.output];
    const Product queries{q, w[a.qBias], a.gated ? RowBuffer::GatedQueries : RowBuffer::Queries};
    const HeadsCall heads = headsOf(context, a);
    const float *const norm = w[layer.mixerNorm], eps = context.spec.normEpsilon;
    if (!heads.appends) {
        ops.norm(norm, eps, {q}, false);
        ops.linear(RowInput::Normed, {queries});
    } else if (heads.valuesAreKeys) {
        const Weight& k = w[a.k];
        ops.norm(norm, eps, {q, k}, false);
        ops.linear(RowInput::Normed, {queries, {k, w[a.kBias], RowBuffer::Keys}});
    } else {
        const Weight &k = w[a.k], &v = w[a.v];
        ops.norm(norm, eps, {q, k, v}, false);
        ops.linear(RowInput::Normed, {queries, {k, w[a.kBias], RowBuffer::Keys}, {v, w[a.vBias], RowBuffer::Values}});
    }
    ops.prepareHeads(heads, pages);
    ops.attend(heads, pages, output);
    addPart(context, RowInput::Attended, output, w[a.outputBias], layer.mixerPostNorm);
}

// x += output(gated delta rule(norm(x)))
void gatedDeltaLayer(const LayerContext& context, const LayerSpec& layer, const RecurrentLayer& state) {
    const GatedDeltaSpec& d = *layer.delta;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const float *const norm = w[layer.mixerNorm], eps = context.spec.normEpsilon;
    const Weight &qkv = w[d.qkv], &gate = w[d.gate], &beta = w[d.beta], &output = w[d.output];
    DeltaCall call;
    call.keyHeads = d.keyHeads;
    call.valueHeads = d.valueHeads;
    call.headDim = d.headDim;
    call.convWidth = d.convWidth;
    call.conv = w[d.conv];
    call.stepBias = w[d.stepBias];
    call.decay = w[d.decay];
    call.headNorm = w[d.headNorm];
    call.eps = context.spec.normEpsilon;
    call.consecutiveHeads = d.consecutiveHeads;
    call.fusedSteps = d.fusedSteps;
    const Product mixed{qkv, nullptr, RowBuffer::DeltaMixed}, gates{gate, nullptr, RowBuffer::DeltaGate};
    if (d.fusedSteps) {
        ops.norm(norm, eps, {qkv, gate, beta}, false);
        ops.linear(RowInput::Normed, {mixed, gates, {beta, nullptr, RowBuffer::DeltaSteps}});
    } else {
        const Weight& alpha = w[d.alpha];
        ops.norm(norm, eps, {qkv, gate, alpha, beta}, false);
        ops.linear(RowInput::Normed,
                   {mixed, gates, {alpha, nullptr, RowBuffer::DeltaAlpha}, {beta, nullptr, RowBuffer::DeltaBeta}});
    }
    ops.deltaRule(call, state, output);
    addPart(context, RowInput::Attended, output, nullptr, layer.mixerPostNorm);
}

// x += down(activation(gate n, up n)), n = norm(x); beside experts, the part goes to PartOut instead.
void denseLayer(const LayerContext& context, const LayerSpec& layer) {
    const DenseFfnSpec& f = *layer.dense;
    const ModelWeights& w = context.weights;
    const Weight &gate = w[f.gate], &up = w[f.up], &down = w[f.down];
    context.ops.norm(w[layer.ffnNorm], context.spec.normEpsilon, {gate, up}, false);
    const HostBiases hostBiases{w.inHost(f.gateBias), w.inHost(f.upBias)};
    context.ops.gatedLinear(RowInput::Normed, {gate, up, w[f.gateBias], w[f.upBias], f.activation, hostBiases}, down);
    if (layer.parallel) context.ops.linear(RowInput::Hidden, {{down, w[f.downBias], RowBuffer::PartOut}});
    else addPart(context, RowInput::Hidden, down, w[f.downBias], layer.ffnPostNorm);
}

// x += the weighted sum of the chosen experts, and of the shared one; beside a dense part, to PartOut instead. next:
// the layer with experts that comes next in the same pass, or nullptr.
void expertLayer(const LayerContext& context, const LayerSpec& layer, const LayerSpec* next) {
    const ExpertFfnSpec& f = *layer.experts;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    ExpertCall call{routerOf(context, layer), w[f.gate], w[f.up], w[f.down]};
    call.gateBias = w[f.gateBias];
    call.upBias = w[f.upBias];
    call.downBias = w[f.downBias];
    call.hostBiases = {w.inHost(f.gateBias), w.inHost(f.upBias)};
    call.activation = f.activation;
    const bool normed = layer.parallel || layer.ffnPostNorm;
    if (normed) call.to = RowBuffer::PartOut;
    if (next) call.next = routerOf(context, *next);
    const Weight& router = w[f.routing.router];
    const Product logits{router, call.routing.bias, RowBuffer::RouterLogits};
    const float eps = context.spec.normEpsilon;
    if (layer.parallel) {
        ops.norm(call.routing.norm, eps, {router}, false);
        ops.linear(RowInput::Normed, {logits});
        ops.norm(w[layer.parallel->expertIn], eps, {call.gate.first, call.up.first}, false);
    } else if (f.shared) {
        call.shared = true;
        call.sharedScale = w[f.shared->scale];
        ops.norm(call.routing.norm, eps, {router, call.gate.first, call.up.first, w[f.shared->gate], w[f.shared->up]},
                 call.sharedScale);
        ops.linear(RowInput::Normed, {logits});
    } else {
        ops.norm(call.routing.norm, eps, {router, call.gate.first, call.up.first}, false);
        ops.linear(RowInput::Normed, {logits});
    }
    ops.route(call);
    if (f.shared) sharedExpert(context, *f.shared, f.activation);
    ops.experts(call);
    if (normed && !layer.parallel)
        ops.addNormed(RowBuffer::PartOut, w[layer.ffnPostNorm], eps, RowBuffer::Residual, true);
}

// A dense part and experts side by side.
void parallelLayer(const LayerContext& context, const LayerSpec& layer, const LayerSpec* next) {
    const ModelWeights& w = context.weights;
    const float eps = context.spec.normEpsilon;
    denseLayer(context, layer);
    context.ops.addNormed(RowBuffer::PartOut, w[layer.parallel->denseOut], eps, RowBuffer::PartSum, false);
    expertLayer(context, layer, next);
    context.ops.addNormed(RowBuffer::PartOut, w[layer.parallel->expertOut], eps, RowBuffer::PartSum, true);
    context.ops.addNormed(RowBuffer::PartSum, w[layer.ffnPostNorm], eps, RowBuffer::Residual, true);
}

// x += norm(projection(gelu(gate x) * u)), where u is the layer's row of the per-layer embeddings
void addLayerInput(const LayerContext& context, const LayerInputSpec& input, int32_t layer) {
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &gate = w[input.gate], &projection = w[input.projection];
    ops.copyRows({gate});
    ops.linear(RowInput::Normed, {{gate, nullptr, RowBuffer::Gate}});
    ops.gateLayerInput(layer, context.spec.layerInputs->width, projection);
    addPart(context, RowInput::Hidden, projection, nullptr, input.norm);
}

}  // namespace

void prepareLayerInputs(const LayerContext& context) {
    const std::optional<LayerInputsSpec>& spec = context.spec.layerInputs;
    if (!spec) return;
    const ModelWeights& w = context.weights;
    const Weight& projection = w[spec->projection];
    context.ops.copyRows({projection});
    context.ops.linear(RowInput::Normed, {{projection, nullptr, RowBuffer::LayerInputs}});
    context.ops.joinLayerInputs({w[spec->table], spec->width, w[spec->norm], context.spec.normEpsilon});
}

void runLayer(const LayerContext& context, const LayerSpec& layer, size_t index, const LayerSpec* nextWithExperts) {
    if (layer.attention) {
        const int32_t kvLayer = layer.attention->kvLayer;
        attentionLayer(context, layer, context.kv.layer(kvLayer < 0 ? index : static_cast<size_t>(kvLayer)));
    } else {
        gatedDeltaLayer(context, layer, context.kv.states().layer(index));
    }
    if (layer.parallel) parallelLayer(context, layer, nextWithExperts);
    else if (layer.dense) denseLayer(context, layer);
    else expertLayer(context, layer, nextWithExperts);
    if (layer.layerInput) addLayerInput(context, *layer.layerInput, static_cast<int32_t>(index));
    if (layer.outputScale) context.ops.scaleRows(context.weights[layer.outputScale]);
}

}  // namespace sharpi
