// Mamba 2 on the GPU; see cuda_operations.h. Exact rows go row after row. Fast rows go in tiles at absolute multiples
// of cuda::kDeltaChunk positions.
#include "backend/operations/cuda_operations.h"
#include "core/contract.h"
#include "kernels/delta/mamba.h"

namespace sharpi {

namespace {

cuda::MambaShape shapeOf(const MambaCall& call) {
    return {call.heads, call.groups, call.headDim, call.stateDim, call.convWidth};
}

cuda::MambaParameters parametersOf(const MambaCall& call) {
    return {call.conv, call.convBias, call.stepBias, call.rate, call.skip, call.norm, call.eps};
}

}  // namespace

void CudaOperations::mamba(const MambaCall& call, const RecurrentLayer& state, const Weight& reader) {
    const cuda::MambaShape shape = shapeOf(call);
    const cuda::MambaParameters parameters = parametersOf(call);
    const cuda::DeltaStates states{state.conv, state.matrix};
    const int64_t exact = _pass.exactRows(), fast = _pass.fastRows();
    const BatchView& view = _pass.view;
    const Activations& attended = _pass.shape(RowInput::Attended, {reader}, reader.cols);
    const auto inputsFrom = [&](int64_t row) {
        return cuda::MambaInputs{_pass.floats(RowBuffer::MambaMixed) + row * shape.channels(),
                                 _pass.floats(RowBuffer::MambaGate) + row * shape.width(),
                                 _pass.floats(RowBuffer::MambaSteps) + row * shape.heads,
                                 _pass.floats(RowBuffer::MambaDecays) + row * shape.heads};
    };
    const auto prepare = [&](const cuda::MambaInputs& in, const cuda::DeltaBatch& batch, int64_t longest) {
        cuda::prepareMamba(_pass.stream, in, parameters, shape, states, batch, longest,
                           _pass.at<void>(_pass.layout->mambaWindows));
    };
    if (exact) {
        const cuda::MambaInputs in = inputsFrom(0);
        cuda::RowOutputs out = attended.exact;
        // Blocks that lie in two groups are made from the floats of their norms.
        if (call.norm && shape.width() / shape.groups % kContractBlock != 0)
            out.floats = _pass.exactFloats(RowInput::Attended);
        if (_pass.statesInSteps()) {
            cuda::stepMamba(_pass.stream, in, parameters, shape, states, view.exactStates,
                            _pass.at<uint32_t>(_pass.layout->stateReaders));
        } else {
            prepare(in, view.exactStates, view.mostExact);
            cuda::scanMamba(_pass.stream, in, parameters, shape, states, view.exactStates);
        }
        cuda::normMamba(_pass.stream, in.gate, parameters, shape, exact, out);
    }
    if (fast) {
        const cuda::MambaInputs in = inputsFrom(exact);
        prepare(in, view.fastStates, view.mostFast);
        cuda::scanMambaInChunks(_pass.stream, in, parameters, shape, states, view.fastStates, view.stateTiles,
                                _pass.at<void>(_pass.layout->mambaChunks));
        cuda::normMamba(_pass.stream, in.gate, parameters, shape, fast, {nullptr, {}, attended.fast});
    }
}

}  // namespace sharpi
