// See layers.h.
#include "layers/layers.h"

namespace sharpi {

namespace {

RouterCall routerOf(const LayerContext& context, const LayerSpec& layer) {
    const ExpertFfnSpec& f = *layer.experts;
    RouterCall call;
    call.norm = context.weights[layer.ffnNorm];
    call.router = &context.weights[f.router];
    call.expertLayer = f.expertLayer;
    call.count = f.count;
    call.used = f.used;
    call.renormalize = f.renormalize;
    call.weightScale = f.weightScale;
    call.eps = context.spec.normEpsilon;
    return call;
}

// Writes SharedOut.
void sharedExpert(const LayerContext& context, const SharedExpertSpec& shared) {
    const ModelWeights& w = context.weights;
    const Weight& down = w[shared.down];
    context.ops.gatedLinear(RowInput::Normed, w[shared.gate], w[shared.up], down);
    context.ops.linear(RowInput::Hidden, {{down, nullptr, RowBuffer::SharedOut}});
}

}  // namespace

void attentionLayer(const LayerContext& context, const LayerSpec& layer, const KvPages& pages) {
    const AttentionSpec& a = *layer.attention;
    const ModelWeights& w = context.weights;
    const Weight &q = w[a.q], &k = w[a.k], &v = w[a.v], &output = w[a.output];
    HeadsCall heads;
    heads.heads = a.heads;
    heads.scale = a.scale;
    heads.gated = a.gated;
    heads.qkNorm = a.qkNorm;
    heads.qNorm = w[a.qNorm];
    heads.kNorm = w[a.kNorm];
    heads.eps = context.spec.normEpsilon;
    heads.rope = w.rope(a.rope);
    context.ops.norm(w[layer.mixerNorm], context.spec.normEpsilon, {q, k, v}, false);
    context.ops.linear(RowInput::Normed, {{q, w[a.qBias], a.gated ? RowBuffer::GatedQueries : RowBuffer::Queries},
                                          {k, w[a.kBias], RowBuffer::Keys},
                                          {v, w[a.vBias], RowBuffer::Values}});
    context.ops.prepareHeads(heads, pages);
    context.ops.attend(heads, pages, output);
    context.ops.addLinear(RowInput::Attended, output, w[a.outputBias]);
}

void gatedDeltaLayer(const LayerContext& context, const LayerSpec& layer, const RecurrentLayer& state) {
    const GatedDeltaSpec& d = *layer.delta;
    const ModelWeights& w = context.weights;
    const Weight &qkv = w[d.qkv], &gate = w[d.gate], &alpha = w[d.alpha], &beta = w[d.beta], &output = w[d.output];
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
    context.ops.norm(w[layer.mixerNorm], context.spec.normEpsilon, {qkv, gate, alpha, beta}, false);
    context.ops.linear(RowInput::Normed, {{qkv, nullptr, RowBuffer::DeltaMixed},
                                          {gate, nullptr, RowBuffer::DeltaGate},
                                          {alpha, nullptr, RowBuffer::DeltaAlpha},
                                          {beta, nullptr, RowBuffer::DeltaBeta}});
    context.ops.deltaRule(call, state, output);
    context.ops.addLinear(RowInput::Attended, output, nullptr);
}

void denseLayer(const LayerContext& context, const LayerSpec& layer) {
    const DenseFfnSpec& f = *layer.dense;
    const ModelWeights& w = context.weights;
    const Weight &gate = w[f.gate], &up = w[f.up], &down = w[f.down];
    context.ops.norm(w[layer.ffnNorm], context.spec.normEpsilon, {gate, up}, false);
    context.ops.gatedLinear(RowInput::Normed, gate, up, down);
    context.ops.addLinear(RowInput::Hidden, down, nullptr);
}

void expertLayer(const LayerContext& context, const LayerSpec& layer, const LayerSpec* next) {
    const ExpertFfnSpec& f = *layer.experts;
    const ModelWeights& w = context.weights;
    ExpertCall call{routerOf(context, layer), w[f.gate], w[f.up], w[f.down], nullptr, std::nullopt};
    if (next) call.next = routerOf(context, *next);
    const Weight& router = w[f.router];
    if (f.shared) {
        call.sharedScale = w[f.shared->scale];
        context.ops.norm(call.routing.norm, call.routing.eps,
                         {router, call.gate.first, call.up.first, w[f.shared->gate], w[f.shared->up]}, true);
    } else {
        context.ops.norm(call.routing.norm, call.routing.eps, {router, call.gate.first, call.up.first}, false);
    }
    context.ops.linear(RowInput::Normed, {{router, nullptr, RowBuffer::RouterLogits}});
    context.ops.route(call);
    if (f.shared) sharedExpert(context, *f.shared);
    context.ops.experts(call);
}

void runLayer(const LayerContext& context, const LayerSpec& layer, size_t index, const LayerSpec* nextWithExperts) {
    if (layer.attention) attentionLayer(context, layer, context.kv.layer(index));
    else gatedDeltaLayer(context, layer, context.kv.states().layer(index));
    if (layer.dense) denseLayer(context, layer);
    else expertLayer(context, layer, nextWithExperts);
}

}  // namespace sharpi
