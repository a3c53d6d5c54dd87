// Per-layer embeddings on the GPU; see cuda_operations.h.
#include "backend/operations/cuda_operations.h"
#include "kernels/rows/layer_inputs.h"

namespace sharpi {

void CudaOperations::copyRows(const OptionalPart& part, Readers readers) {
    const int64_t exact = _pass.exactRows();
    const Activations& to = _pass.shape(RowInput::Normed, readers, _pass.limits.embedding);
    const cuda::NextRows next{cuda::NextRows::Kind::Copy};
    _pass.nextRows(part, next, 0, exact, to.exact);
    _pass.nextRows(part, next, exact, _pass.fastRows(), {nullptr, {}, to.fast});
}

void CudaOperations::joinLayerInputs(const LayerInputsCall& call) {
    const int64_t all = _pass.limits.layerInputs;
    float *const inputs = _pass.floats(RowBuffer::LayerInputs), *const rows = _pass.floats(RowBuffer::LayerRows);
    _pass.readTable(call.table, rows);
    cuda::joinLayerInputs(_pass.stream, inputs, rows, _pass.view.rows * (all / call.width), call.width,
                          LayerInputFactors(_pass.limits.embedding, call.width), call.norm, call.eps);
}

void CudaOperations::gateLayerInput(int32_t layer, int64_t width, const Weight& reader) {
    const Activations& hidden = _pass.shape(RowInput::Hidden, {reader}, reader.cols);
    const int64_t stride = _pass.limits.layerInputs, exact = _pass.exactRows(), fast = _pass.fastRows();
    float* const gate = _pass.floats(RowBuffer::Gate);
    const float* const input = _pass.floats(RowBuffer::LayerInputs) + layer * width;
    cuda::GatedJoin join;
    join.activation.kind = ActivationKind::Gelu;
    join.upStride = stride;
    const auto gated = [&](int64_t first, int64_t rows, const cuda::RowOutputs& out) {
        cuda::gatedActivation(_pass.stream, join, gate + first * width, input + first * stride, rows, width, out);
    };
    gated(0, exact, hidden.exact);
    gated(exact, fast, {nullptr, {}, hidden.fast});
}

}  // namespace sharpi
