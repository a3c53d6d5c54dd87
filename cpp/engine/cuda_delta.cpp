// The GPU backend's recurrent blocks, and what a prediction layer goes on from.
#include "engine/cuda_backend.h"

namespace sharpi {

namespace {

cuda::DeltaShape shapeOf(const GatedDeltaWeights& w) { return {w.keyHeads, w.valueHeads, w.headDim, w.convWidth}; }

cuda::DeltaParameters parametersOf(const GatedDeltaWeights& w, float eps) { return {w.conv, w.stepBias, w.decay, w.headNorm, eps}; }

}  // namespace

cuda::DeltaInputs CudaBackend::deltaInputs() const {
    const GpuScratch& s = *_layout;
    return {floats(s.deltaMixed), floats(s.deltaAlpha), floats(s.deltaBeta), floats(s.deltaGate)};
}

void CudaBackend::gatedDelta(const GatedDeltaWeights& w, const RecurrentLayer& state, float eps) {
    const cuda::DeltaStates states{state.conv, state.matrix};
    few() ? deltaFew(w, states, eps) : deltaMany(w, states, eps);
}

void CudaBackend::deltaFew(const GatedDeltaWeights& w, const cuda::DeltaStates& states, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::DeltaInputs in = deltaInputs();
    const cuda::RowOutputs normed = formsFor({w.qkv, w.gate, w.alpha, w.beta}, s.normed, s.normedQuant, _rows, _limits.embedding);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    productsFew(input(normed), rows(), {{w.qkv, nullptr, in.mixed}, {w.gate, nullptr, floats(s.deltaGate)}, {w.alpha, nullptr, in.alpha}, {w.beta, nullptr, in.beta}});
    cuda::RowOutputs attended = formsFor({w.output}, s.attended, s.attendedQuant, _rows, w.output.cols);
    if (w.headDim % 32 != 0) attended.floats = floats(s.attended);  // blocks that lie in two heads are made from these
    static_assert(cuda::kMaxMatvecRows <= cuda::kDeltaStepRows);
    cuda::deltaStep(_stream, in, parametersOf(w, eps), shapeOf(w), states, _states, at<uint32_t>(s.deltaReaders), attended);
    addFew(input(attended), w.output, nullptr);
}

void CudaBackend::deltaMany(const GatedDeltaWeights& w, const cuda::DeltaStates& states, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::DeltaInputs in = deltaInputs();
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo), keys = halves(s.keysHi, s.keysLo), attended = halves(s.attendedHi, s.attendedLo);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, {nullptr, {}, normed});
    productMany(normed, w.qkv, nullptr, in.mixed, cuda::Store::Write);
    productMany(normed, w.gate, nullptr, floats(s.deltaGate), cuda::Store::Write);
    productMany(normed, w.alpha, nullptr, in.alpha, cuda::Store::Write);
    productMany(normed, w.beta, nullptr, in.beta, cuda::Store::Write);
    const cuda::RowOutputs out{nullptr, {}, attended};
    if (_deltaInTiles) {
        cuda::prepareDelta(_stream, in, parametersOf(w, eps), shapeOf(w), states, _states, _deltaTiles, at<void*>(s.deltaWindows), keys);
        cuda::deltaRuleInChunks(_stream, in, keys, parametersOf(w, eps), shapeOf(w), states, _states, _deltaTiles, at<void*>(s.deltaChunks),
                                floats(s.attendedFloats), out);
    } else {
        cuda::prepareDelta(_stream, in, parametersOf(w, eps), shapeOf(w), states, _states);
        cuda::deltaRule(_stream, in, parametersOf(w, eps), shapeOf(w), states, _states, out);
    }
    productMany(attended, w.output, nullptr, floats(s.x), cuda::Store::Add);
}

void CudaBackend::joinDraft(const PredictionWeights& w, const float* sourceNorm, float eps) {
    const GpuScratch& s = *_layout;
    const int64_t width = _limits.embedding;
    // The embeddings, then what the output head read; each row then takes its place beside its token's.
    float *const apart = floats(s.apart), *const joined = floats(s.joined);
    readTable(w.embedding, apart);
    cuda::rmsNorm(_stream, floats(s.x), _sources, sourceNorm, eps, _rows, width, {apart + _rows * width, {}, {}});
    cuda::RowOutputs forms{joined, {}, {}};
    if (!few()) forms = {nullptr, {}, halves(s.joinedHi, s.joinedLo)};
    cuda::rmsNorm(_stream, apart, _joinedRows, w.norms, eps, 2 * _rows, width, forms, 2);
    if (!few()) return productMany(forms.half, w.projection, nullptr, floats(s.x), cuda::Store::Write);
    cuda::RowOutputs read = formsFor({w.projection}, s.joined, s.joinedQuant, _rows, 2 * width);
    if (!read.floats) cuda::convertRows(_stream, joined, _rows, 2 * width, read);
    productsFew(input(read), rows(), {{w.projection, nullptr, floats(s.x)}});
}

}  // namespace sharpi
