// Gated DeltaNet on the GPU; see cuda_operations.h.
#include "backend/operations/cuda_operations.h"
#include "core/contract.h"

namespace sharpi {

namespace {

cuda::DeltaShape shapeOf(const DeltaCall& call) {
    return {call.keyHeads, call.valueHeads, call.headDim, call.convWidth, call.consecutiveHeads};
}

cuda::DeltaParameters parametersOf(const DeltaCall& call) {
    return {call.conv, call.stepBias, call.decay, call.headNorm, call.eps};
}

}  // namespace

void CudaOperations::deltaRule(const DeltaCall& call, const RecurrentLayer& state, const Weight& reader) {
    const cuda::DeltaStates states{state.conv, state.matrix};
    cuda::DeltaInputs in{_pass.floats(RowBuffer::DeltaMixed), _pass.floats(RowBuffer::DeltaAlpha),
                         _pass.floats(RowBuffer::DeltaBeta), _pass.floats(RowBuffer::DeltaGate)};
    if (call.fusedSteps) in.steps = _pass.floats(RowBuffer::DeltaSteps);
    const Activations& attended = _pass.shape(RowInput::Attended, {reader}, reader.cols);
    if (_pass.exactRows()) deltaExact(call, in, states, attended);
    if (_pass.fastRows()) deltaFast(call, in, states, attended);
}

// Row after row. If every sequence has only a few, they take one launch, to the same bits.
void CudaOperations::deltaExact(const DeltaCall& call, const cuda::DeltaInputs& in, const cuda::DeltaStates& states,
                                const Activations& attended) {
    cuda::RowOutputs out = attended.exact;
    // Blocks that lie in two heads are made from floats.
    if (call.headDim % kContractBlock != 0) out.floats = _pass.exactFloats(RowInput::Attended);
    const cuda::DeltaParameters parameters = parametersOf(call);
    if (_pass.statesInSteps()) {
        return cuda::deltaStep(_pass.stream, in, parameters, shapeOf(call), states, _pass.view.exactStates,
                               _pass.at<uint32_t>(_pass.layout->stateReaders), out);
    }
    cuda::prepareDelta(_pass.stream, in, parameters, shapeOf(call), states, _pass.view.exactStates);
    cuda::deltaRule(_pass.stream, in, parameters, shapeOf(call), states, _pass.view.exactStates, out);
}

// In tiles at absolute multiples of cuda::kDeltaChunk positions.
void CudaOperations::deltaFast(const DeltaCall& call, const cuda::DeltaInputs& all, const cuda::DeltaStates& states,
                               const Activations& attended) {
    const GpuScratch& s = *_pass.layout;
    const cuda::DeltaShape shape = shapeOf(call);
    const int64_t e = _pass.exactRows();
    cuda::DeltaInputs in{all.mixed + e * shape.channels(), all.alpha + e * shape.valueHeads,
                         all.beta + e * shape.valueHeads, all.gate + e * shape.valueWidth()};
    if (all.steps) in.steps = all.steps + 2 * e * shape.valueHeads;
    const cuda::HalfRows keys = _pass.halves(s.keys);
    const BatchView& view = _pass.view;
    cuda::prepareDelta(_pass.stream, in, parametersOf(call), shape, states, view.fastStates, view.stateTiles,
                       _pass.at<void*>(s.deltaWindows), keys);
    cuda::deltaRuleInChunks(_pass.stream, in, keys, parametersOf(call), shape, states, view.fastStates, view.stateTiles,
                            _pass.at<void*>(s.deltaChunks), _pass.floats(s.attendedFloats),
                            {nullptr, {}, attended.fast});
}

}  // namespace sharpi
