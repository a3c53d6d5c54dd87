// The GPU backend's recurrent blocks, and what a prediction layer goes on from.
#include "backend/cuda_backend.h"
#include "core/contract.h"

namespace sharpi {

namespace {

cuda::DeltaShape shapeOf(const GatedDeltaWeights& w) { return {w.keyHeads, w.valueHeads, w.headDim, w.convWidth}; }

cuda::DeltaParameters parametersOf(const GatedDeltaWeights& w, float eps) {
    return {w.conv, w.stepBias, w.decay, w.headNorm, eps};
}

}  // namespace

void CudaBackend::gatedDelta(const GatedDeltaWeights& w, const RecurrentLayer& state, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::DeltaStates states{state.conv, state.matrix};
    const cuda::DeltaInputs in{floats(s.deltaMixed), floats(s.deltaAlpha), floats(s.deltaBeta), floats(s.deltaGate)};
    products(normed(w.norm, eps, {w.qkv, w.gate, w.alpha, w.beta}), {{w.qkv, nullptr, in.mixed},
                                                                     {w.gate, nullptr, floats(s.deltaGate)},
                                                                     {w.alpha, nullptr, in.alpha},
                                                                     {w.beta, nullptr, in.beta}});
    const Activations attended{exactForms({w.output}, s.attended, s.attendedQuant, exactRows(), w.output.cols),
                               halves(s.attendedHi, s.attendedLo), w.output.cols};
    if (exactRows()) deltaExact(w, in, states, eps, attended);
    if (fastRows()) deltaFast(w, in, states, eps, attended);
    addProduct(attended, w.output, nullptr);
}

// Row after row. A few rows take one launch, to the same bits.
void CudaBackend::deltaExact(const GatedDeltaWeights& w, const cuda::DeltaInputs& in, const cuda::DeltaStates& states,
                             float eps, const Activations& attended) {
    const GpuScratch& s = *_layout;
    cuda::RowOutputs out = attended.exact;
    if (w.headDim % kContractBlock != 0)
        out.floats = floats(s.attended);  // blocks that lie in two heads are made from these
    if (exactRows() <= cuda::kDeltaStepRows) {
        return cuda::deltaStep(_stream, in, parametersOf(w, eps), shapeOf(w), states, _view.exactStates,
                               at<uint32_t>(s.deltaReaders), out);
    }
    cuda::prepareDelta(_stream, in, parametersOf(w, eps), shapeOf(w), states, _view.exactStates);
    cuda::deltaRule(_stream, in, parametersOf(w, eps), shapeOf(w), states, _view.exactStates, out);
}

// In tiles at absolute multiples of cuda::kDeltaChunk positions.
void CudaBackend::deltaFast(const GatedDeltaWeights& w, const cuda::DeltaInputs& all, const cuda::DeltaStates& states,
                            float eps, const Activations& attended) {
    const GpuScratch& s = *_layout;
    const cuda::DeltaShape shape = shapeOf(w);
    const int64_t e = exactRows();
    const cuda::DeltaInputs in{all.mixed + e * shape.channels(), all.alpha + e * shape.valueHeads,
                               all.beta + e * shape.valueHeads, all.gate + e * shape.valueWidth()};
    const cuda::HalfRows keys = halves(s.keysHi, s.keysLo);
    cuda::prepareDelta(_stream, in, parametersOf(w, eps), shape, states, _view.fastStates, _view.deltaTiles,
                       at<void*>(s.deltaWindows), keys);
    cuda::deltaRuleInChunks(_stream, in, keys, parametersOf(w, eps), shape, states, _view.fastStates, _view.deltaTiles,
                            at<void*>(s.deltaChunks), floats(s.attendedFloats), {nullptr, {}, attended.fast});
}

void CudaBackend::joinDraft(const PredictionWeights& w, const float* sourceNorm, float eps) {
    const GpuScratch& s = *_layout;
    const int64_t width = _limits.embedding, e = exactRows();
    // The embeddings, then what the output head read; each row then takes its place beside its token's.
    float* const apart = floats(s.apart);
    readTable(w.embedding, apart);
    cuda::rmsNorm(_stream, floats(s.x), _view.sources, sourceNorm, eps, _view.rows, width,
                  {apart + _view.rows * width, {}, {}});
    Activations joined{exactForms({w.projection}, s.joined, s.joinedQuant, e, 2 * width),
                       halves(s.joinedHi, s.joinedLo), 2 * width};
    if (e) cuda::rmsNorm(_stream, apart, _view.joined, w.norms, eps, 2 * e, width, {floats(s.joined), {}, {}}, 2);
    if (e && !joined.exact.floats) cuda::convertRows(_stream, floats(s.joined), e, 2 * width, joined.exact);
    if (fastRows())
        cuda::rmsNorm(_stream, apart, _view.joined + 2 * e, w.norms, eps, 2 * fastRows(), width,
                      {nullptr, {}, joined.fast}, 2);
    products(joined, {{w.projection, nullptr, floats(s.x)}});
}

}  // namespace sharpi
