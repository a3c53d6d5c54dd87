// See layers.h.
#include "layers/layers.h"

#include <utility>

namespace sharpi {

namespace {

NormCall normOf(const LayerContext& context, VectorId weight, VectorId bias) {
    return {context.spec.norm, context.weights[weight], context.weights[bias], context.spec.normEpsilon};
}

// Adds what is pending. Then Normed = norm(x), or x if there is no norm.
void norm(const LayerContext& context, const NormCall& call, Readers readers, bool floats = false) {
    const OptionalPart part = std::exchange(context.pending, std::nullopt);
    if (call.weight) context.ops.norm(part, call, readers, floats);
    else context.ops.copyRows(part, readers);
}

RouterCall routerOf(const LayerContext& context, const LayerSpec& layer) {
    const RoutingSpec& r = layer.experts->routing;
    const ModelWeights& w = context.weights;
    RouterCall call;
    if (layer.parallel) call.norm = {NormKind::Rms, w[layer.parallel->routerIn], nullptr, context.spec.normEpsilon};
    else call.norm = normOf(context, layer.ffnNorm, layer.ffnNormBias);
    call.router = &w[r.router];
    call.bias = w[r.bias];
    call.tokenChoices = w[r.tokenChoices];
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
    return call;
}

// PartOut is to be added to x. norm: may be absent.
void leavePart(const LayerContext& context, VectorId norm) {
    PartCall part;
    part.norm = context.weights[norm];
    part.eps = context.spec.normEpsilon;
    part.factor = context.spec.residualScale;
    context.pending = part;
}

// x += w rows + bias, or what follows of a part that is not added as it is.
void addPart(const LayerContext& context, const LayerSpec& layer, RowInput rows, const Weight& w, const float* bias,
             VectorId norm) {
    if (!context.spec.partsApart(layer)) return context.ops.addLinear(rows, w, bias);
    addPending(context);  // of the mixer, if the layer has one norm
    context.ops.linear(rows, {{w, bias, RowBuffer::PartOut}});
    leavePart(context, norm);
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
    heads.valuesAreKeys = heads.appends && !a.v && !a.latent && !a.valuesAreKeys;
    heads.qNorm = w[a.qNorm];
    heads.kNorm = w[a.kNorm];
    heads.eps = context.spec.normEpsilon;
    heads.rope = w.rope(a.rope);
    heads.queryScale = w.queryScale(a.queryScale);
    heads.reach = a.reach;
    heads.softcap = a.softcap;
    heads.sinks = w[a.sinks];
    heads.rotatesBack = a.rotatesBack;
    if (a.compressor) heads.blocks = &context.kv.layer(context.spec.extraCache(a.compressor->firstCache + 1));
    if (a.indexer) heads.topK = context.limits.mostChosen(*a.indexer);
    return heads;
}

// Writes SharedOut.
void sharedExpert(const LayerContext& context, const SharedExpertSpec& shared) {
    const ModelWeights& w = context.weights;
    const Weight& down = w[shared.down];
    context.ops.gatedLinear(RowInput::Normed, {w[shared.gate], w[shared.up], nullptr, nullptr, shared.activation},
                            down);
    context.ops.linear(RowInput::Hidden, {{down, nullptr, RowBuffer::SharedOut}});
}

// What reads the rows of the mixer's norm besides the first mixer: gate and up of a layer with one norm, or Mamba 2
// beside attention; else `own` once more.
struct AlsoReading {
    const Weight &first, &second, &third;
};
AlsoReading alsoReading(const LayerContext& context, const LayerSpec& layer, const Weight& own) {
    const ModelWeights& w = context.weights;
    if (layer.attention && layer.mamba) return {w[layer.mamba->gate], w[layer.mamba->mixed], w[layer.mamba->steps]};
    if (layer.oneNorm) return {w[layer.dense->gate], w[layer.dense->up], own};
    return {own, own, own};
}

// x += output(attention(norm(x)))
void attentionLayer(const LayerContext& context, const LayerSpec& layer, const KvPages& pages) {
    const AttentionSpec& a = *layer.attention;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &q = w[a.q], &output = w[a.output];
    const Product queries{q, w[a.qBias], a.gated ? RowBuffer::GatedQueries : RowBuffer::Queries};
    const HeadsCall heads = headsOf(context, a);
    const NormCall mixerNorm = normOf(context, layer.mixerNorm, layer.mixerNormBias);
    const AlsoReading also = alsoReading(context, layer, q);
    if (!heads.appends) {
        norm(context, mixerNorm, {q, also.first, also.second, also.third});
        ops.linear(RowInput::Normed, {queries});
    } else if (heads.valuesAreKeys) {
        const Weight& k = w[a.k];
        norm(context, mixerNorm, {q, k, also.first, also.second, also.third});
        ops.linear(RowInput::Normed, {queries, {k, w[a.kBias], RowBuffer::Keys}});
    } else {
        const Weight &k = w[a.k], &v = w[a.v];
        norm(context, mixerNorm, {q, k, v, also.first, also.second, also.third});
        ops.linear(RowInput::Normed, {queries, {k, w[a.kBias], RowBuffer::Keys}, {v, w[a.vBias], RowBuffer::Values}});
    }
    ops.prepareHeads(heads, pages);
    ops.attend(heads, pages, output);
    addPart(context, layer, RowInput::Attended, output, w[a.outputBias], layer.mixerPostNorm);
}

// The queries as heads have them, and the row of the cache as it is before its norm and rotation.
void latentProjections(const LayerContext& context, const LayerSpec& layer) {
    const AttentionSpec& a = *layer.attention;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &q = w[a.q], &k = w[a.k];
    const NormCall mixerNorm = normOf(context, layer.mixerNorm, layer.mixerNormBias);
    const Product keys{k, nullptr, RowBuffer::Keys}, queries{q, nullptr, RowBuffer::HeadQueries};
    if (!a.queryDown) {
        norm(context, mixerNorm, {q, k});
        return ops.linear(RowInput::Normed, {queries, keys});
    }
    const Weight& down = w[a.queryDown];
    norm(context, mixerNorm, {down, k});
    ops.linear(RowInput::Normed, {{down, nullptr, RowBuffer::LowRankQueries}, keys});
    ops.takeRows({RowBuffer::LowRankQueries, 1, down.rows, w[a.queryNorm], context.spec.normEpsilon}, RowInput::LowRank,
                 {q});
    ops.linear(RowInput::LowRank, {queries});
}

// x += output(attention(norm(x))), where heads share one row of the cache.
void latentLayer(const LayerContext& context, const LayerSpec& layer, const KvPages& pages) {
    const AttentionSpec& a = *layer.attention;
    const LatentSpec& latent = *a.latent;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &keyUp = w[latent.keyUp], &valueUp = w[latent.valueUp], &output = w[a.output];
    const HeadsCall heads = headsOf(context, a);
    latentProjections(context, layer);
    ops.takeRows({RowBuffer::HeadQueries, a.heads, a.queryDim()}, RowInput::PlainQueries, {keyUp});
    ops.linearByHead(RowInput::PlainQueries, {keyUp, a.heads, RowBuffer::Queries, a.headDim});
    ops.prepareLatent({a.heads, latent.plainDim, w[latent.norm], heads.eps, heads.rope, heads.queryScale}, pages);
    ops.attend(heads, pages, valueUp);
    ops.linearByHead(RowInput::Attended, {valueUp, a.heads, RowBuffer::HeadValues, latent.valueDim});
    ops.takeRows({RowBuffer::HeadValues, 1, output.cols}, RowInput::HeadValues, {output});
    addPart(context, layer, RowInput::HeadValues, output, nullptr, layer.mixerPostNorm);
}

void compress(const LayerContext& context, const AttentionSpec& a, const CompressorSpec& c) {
    const ModelWeights& w = context.weights;
    const size_t caches = context.spec.extraCache(c.firstCache);
    context.ops.linear(RowInput::Normed, {{w[c.keys], nullptr, RowBuffer::CompressorKeys},
                                          {w[c.gates], nullptr, RowBuffer::CompressorGates}});
    context.ops.blocks().compress({c.blockTokens, c.overlaps, w[c.gateOffsets], w[c.norm], context.spec.normEpsilon,
                                   w.rope(a.rope), context.kv.layer(caches), context.kv.layer(caches + 1)});
}

// Which blocks the rows see; reads Normed and LowRank.
void chooseBlocks(const LayerContext& context, const AttentionSpec& a) {
    const IndexerSpec& indexer = *a.indexer;
    const ModelWeights& w = context.weights;
    compress(context, a, indexer.compressor);
    context.ops.linear(RowInput::Normed, {{w[indexer.weights], nullptr, RowBuffer::IndexWeights}});
    context.ops.linear(RowInput::LowRank, {{w[indexer.queries], nullptr, RowBuffer::IndexQueries}});
    const KvPages& rows = context.kv.layer(context.spec.extraCache(indexer.compressor.firstCache + 1));
    context.ops.blocks().choose(
        {indexer.heads, context.limits.mostChosen(indexer), indexer.scale, w.rope(a.rope), rows});
}

// x += output(outputDown(attention(norm(x)))): queries of low rank, one key for all heads that is the value too,
// perhaps rows of blocks beside the keys, and an output of low rank by groups of heads.
void groupedLayer(const LayerContext& context, const LayerSpec& layer, const KvPages& pages) {
    const AttentionSpec& a = *layer.attention;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &down = w[a.queryDown], &q = w[a.q], &k = w[a.k], &outputDown = w[a.outputDown];
    const Weight& output = w[a.output];
    // What a layer lacks is named by a matrix that it has.
    const auto also = [&w](MatrixId id, const Weight& other) -> const Weight& { return id ? w[id] : other; };
    const CompressorSpec blocks = a.compressor.value_or(CompressorSpec());
    const IndexerSpec indexer = a.indexer.value_or(IndexerSpec());
    norm(context, normOf(context, layer.mixerNorm, layer.mixerNormBias),
         {down, k, also(blocks.keys, k), also(blocks.gates, k), also(indexer.compressor.keys, k),
          also(indexer.compressor.gates, k), also(indexer.weights, k)});
    ops.linear(RowInput::Normed, {{down, nullptr, RowBuffer::LowRankQueries}, {k, nullptr, RowBuffer::Keys}});
    ops.takeRows({RowBuffer::LowRankQueries, 1, down.rows, w[a.queryNorm], context.spec.normEpsilon}, RowInput::LowRank,
                 {q, also(indexer.queries, q)});
    ops.linear(RowInput::LowRank, {{q, nullptr, RowBuffer::Queries}});
    if (a.compressor) compress(context, a, *a.compressor);
    if (a.indexer) chooseBlocks(context, a);
    const HeadsCall heads = headsOf(context, a);
    ops.prepareHeads(heads, pages);
    ops.attend(heads, pages, outputDown);
    const int64_t rank = outputDown.rows / a.outputGroups;
    ops.linearByHead(RowInput::Attended, {outputDown, a.outputGroups, RowBuffer::HeadValues, rank});
    ops.takeRows({RowBuffer::HeadValues, 1, output.cols}, RowInput::HeadValues, {output});
    addPart(context, layer, RowInput::HeadValues, output, nullptr, layer.mixerPostNorm);
}

// x += output(gated delta rule(norm(x)))
void gatedDeltaLayer(const LayerContext& context, const LayerSpec& layer, const RecurrentLayer& state) {
    const GatedDeltaSpec& d = *layer.delta;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const NormCall mixerNorm = normOf(context, layer.mixerNorm, layer.mixerNormBias);
    const AlsoReading also = alsoReading(context, layer, w[d.qkv]);
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
        norm(context, mixerNorm, {qkv, gate, beta, also.first, also.second});
        ops.linear(RowInput::Normed, {mixed, gates, {beta, nullptr, RowBuffer::DeltaSteps}});
    } else {
        const Weight& alpha = w[d.alpha];
        norm(context, mixerNorm, {qkv, gate, alpha, beta, also.first, also.second});
        ops.linear(RowInput::Normed,
                   {mixed, gates, {alpha, nullptr, RowBuffer::DeltaAlpha}, {beta, nullptr, RowBuffer::DeltaBeta}});
    }
    ops.deltaRule(call, state, output);
    addPart(context, layer, RowInput::Attended, output, nullptr, layer.mixerPostNorm);
}

// x += output(mamba(norm(x))). Beside attention, the rows of the norm are there already.
void mambaLayer(const LayerContext& context, const LayerSpec& layer, const RecurrentLayer& state) {
    const MambaSpec& m = *layer.mamba;
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &gate = w[m.gate], &mixed = w[m.mixed], &steps = w[m.steps], &output = w[m.output];
    const AlsoReading also = alsoReading(context, layer, gate);
    MambaCall call;
    call.heads = m.heads;
    call.groups = m.groups;
    call.headDim = m.headDim;
    call.stateDim = m.stateDim;
    call.convWidth = m.convWidth;
    call.conv = w[m.conv];
    call.convBias = w[m.convBias];
    call.stepBias = w[m.stepBias];
    call.rate = w[m.rate];
    call.skip = w[m.skip];
    call.norm = w[m.norm];
    call.eps = context.spec.normEpsilon;
    if (!layer.attention) {
        norm(context, normOf(context, layer.mixerNorm, layer.mixerNormBias),
             {gate, mixed, steps, also.first, also.second});
    }
    ops.linear(RowInput::Normed, {{gate, nullptr, RowBuffer::MambaGate},
                                  {mixed, nullptr, RowBuffer::MambaMixed},
                                  {steps, nullptr, RowBuffer::MambaSteps}});
    ops.mamba(call, state, output);
    addPart(context, layer, RowInput::Attended, output, nullptr, layer.mixerPostNorm);
}

// x += down(activation(gate n, up n)), n = norm(x); beside experts, the part goes to PartOut instead.
void denseLayer(const LayerContext& context, const LayerSpec& layer) {
    const DenseFfnSpec& f = *layer.dense;
    const ModelWeights& w = context.weights;
    const Weight &gate = w[f.gate], &up = w[f.up], &down = w[f.down];
    if (!layer.oneNorm) norm(context, normOf(context, layer.ffnNorm, layer.ffnNormBias), {gate, up});
    const HostBiases hostBiases{w.inHost(f.gateBias), w.inHost(f.upBias)};
    context.ops.gatedLinear(RowInput::Normed, {gate, up, w[f.gateBias], w[f.upBias], f.activation, hostBiases}, down);
    if (layer.parallel) context.ops.linear(RowInput::Hidden, {{down, w[f.downBias], RowBuffer::PartOut}});
    else addPart(context, layer, RowInput::Hidden, down, w[f.downBias], layer.ffnPostNorm);
}

// x += latentUp(the weighted sum of the chosen experts of latentDown n) + the shared expert of n, n = norm(x)
void latentExperts(const LayerContext& context, const ExpertFfnSpec& f, ExpertCall call) {
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &router = w[f.routing.router], &down = w[f.latentDown], &up = w[f.latentUp];
    const SharedExpertSpec shared = f.shared.value_or(SharedExpertSpec());
    const Weight &gate = f.shared ? w[shared.gate] : router, &also = f.shared ? w[shared.up] : router;
    call.from = RowInput::ExpertLatents;
    call.to = RowBuffer::ExpertLatents;
    norm(context, call.routing.norm, {router, down, gate, also});
    ops.linear(RowInput::Normed,
               {{router, call.routing.bias, RowBuffer::RouterLogits}, {down, nullptr, RowBuffer::ExpertLatents}});
    ops.takeRows({RowBuffer::ExpertLatents, 1, down.rows}, call.from, {call.gate.first, call.up.first});
    ops.route(call);
    if (f.shared) {
        const Weight& sharedDown = w[shared.down];
        ops.gatedLinear(RowInput::Normed, {gate, also, nullptr, nullptr, shared.activation}, sharedDown);
        ops.addLinear(RowInput::Hidden, sharedDown, nullptr);
    }
    ops.experts(call);
    ops.takeRows({RowBuffer::ExpertLatents, 1, up.cols}, call.from, {up});
    ops.addLinear(call.from, up, nullptr);
}

// x += the weighted sum of the chosen experts, and of the shared one; beside a dense part, to SideOut instead. next:
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
    const bool apart = context.spec.partsApart(layer);
    if (apart) call.to = layer.parallel ? RowBuffer::SideOut : RowBuffer::PartOut;
    if (next) call.next = routerOf(context, *next);
    if (f.latentDown) return latentExperts(context, f, call);
    const Weight& router = w[f.routing.router];
    const Product logits{router, call.routing.bias, RowBuffer::RouterLogits};
    if (layer.parallel) {
        NormCall expertIn = call.routing.norm;
        expertIn.weight = w[layer.parallel->expertIn];
        norm(context, call.routing.norm, {router});
        ops.linear(RowInput::Normed, {logits});
        norm(context, expertIn, {call.gate.first, call.up.first});
    } else if (f.shared) {
        call.shared = true;
        call.sharedScale = w[f.shared->scale];
        norm(context, call.routing.norm, {router, call.gate.first, call.up.first, w[f.shared->gate], w[f.shared->up]},
             call.sharedScale);
        ops.linear(RowInput::Normed, {logits});
    } else {
        norm(context, call.routing.norm, {router, call.gate.first, call.up.first});
        ops.linear(RowInput::Normed, {logits});
    }
    ops.route(call);
    if (f.shared) sharedExpert(context, *f.shared);
    ops.experts(call);
    if (apart && !layer.parallel) leavePart(context, layer.ffnPostNorm);
}

// A dense part and experts side by side.
void parallelLayer(const LayerContext& context, const LayerSpec& layer, const LayerSpec* next) {
    denseLayer(context, layer);
    expertLayer(context, layer, next);
    leavePart(context, layer.ffnPostNorm);
    context.pending->sideNorms = {context.weights[layer.parallel->denseOut],
                                  context.weights[layer.parallel->expertOut]};
}

// x += norm(projection(gelu(gate x) * u)), where u is the layer's row of the per-layer embeddings
void addLayerInput(const LayerContext& context, const LayerInputSpec& input, int32_t layer) {
    const ModelWeights& w = context.weights;
    Operations& ops = context.ops;
    const Weight &gate = w[input.gate], &projection = w[input.projection];
    norm(context, {}, {gate});
    ops.linear(RowInput::Normed, {{gate, nullptr, RowBuffer::Gate}});
    ops.gateLayerInput(layer, context.spec.layerInputs->width, projection);
    ops.linear(RowInput::Hidden, {{projection, nullptr, RowBuffer::PartOut}});
    leavePart(context, input.norm);
}

}  // namespace

void prepareLayerInputs(const LayerContext& context) {
    const std::optional<LayerInputsSpec>& spec = context.spec.layerInputs;
    if (!spec) return;
    const ModelWeights& w = context.weights;
    const Weight& projection = w[spec->projection];
    context.ops.copyRows({}, {projection});
    context.ops.linear(RowInput::Normed, {{projection, nullptr, RowBuffer::LayerInputs}});
    context.ops.joinLayerInputs({w[spec->table], spec->width, w[spec->norm], context.spec.normEpsilon});
}

// What the streams become of the last part's answer.
static void leaveStreams(const LayerContext& context) {
    const StreamsSpec& streams = *context.spec.streams;
    if (std::exchange(context.pending, std::nullopt)) context.ops.streams().leave({streams.count});
}

// x = the part's input, if the model has streams.
static void enterStreams(const LayerContext& context, const StreamMixSpec& mix) {
    if (!context.spec.streams) return;
    const StreamsSpec& streams = *context.spec.streams;
    const Weight& fn = context.weights[mix.fn];
    leaveStreams(context);
    context.ops.streams().norm(context.spec.normEpsilon, fn);
    context.ops.linear(RowInput::Streams, {{fn, nullptr, RowBuffer::StreamMix}});
    context.ops.streams().enter(
        {streams.count, streams.iterations, streams.epsilon, context.weights[mix.base], context.weights[mix.scale]});
}

void runLayer(const LayerContext& context, const LayerSpec& layer, size_t index, const LayerSpec* nextWithExperts) {
    enterStreams(context, layer.mixerStreams);
    if (layer.attention) {
        const int32_t kvLayer = layer.attention->kvLayer;
        const KvPages& pages = context.kv.layer(kvLayer < 0 ? index : static_cast<size_t>(kvLayer));
        if (layer.attention->latent) latentLayer(context, layer, pages);
        else if (layer.attention->outputDown) groupedLayer(context, layer, pages);
        else attentionLayer(context, layer, pages);
    } else if (layer.delta) {
        gatedDeltaLayer(context, layer, context.kv.states().layer(index));
    }
    if (layer.mamba) mambaLayer(context, layer, context.kv.states().layer(index));
    enterStreams(context, layer.ffnStreams);
    if (layer.parallel) parallelLayer(context, layer, nextWithExperts);
    else if (layer.dense) denseLayer(context, layer);
    else if (layer.experts) expertLayer(context, layer, nextWithExperts);
    if (layer.layerInput) addLayerInput(context, *layer.layerInput, static_cast<int32_t>(index));
    if (layer.outputScale) context.pending->scale = context.weights[layer.outputScale];
}

void beginStreams(const LayerContext& context) {
    if (context.spec.streams) context.ops.streams().begin();
}

void endLayers(const LayerContext& context) {
    if (!context.spec.streams) return addPending(context);
    const StreamsSpec& streams = *context.spec.streams;
    const ModelWeights& w = context.weights;
    const Weight& fn = w[streams.end.fn];
    leaveStreams(context);
    context.ops.streams().norm(context.spec.normEpsilon, fn);
    context.ops.linear(RowInput::Streams, {{fn, nullptr, RowBuffer::StreamMix}});
    context.ops.streams().end({streams.count, 0, streams.epsilon, w[streams.end.base], w[streams.end.scale]});
}

void addPending(const LayerContext& context) {
    if (const OptionalPart part = std::exchange(context.pending, std::nullopt)) context.ops.addPart(*part);
}

}  // namespace sharpi
