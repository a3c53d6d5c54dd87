// Per-layer embeddings on the CPU; see cpu_operations.h.
#include <cmath>
#include <cstring>

#include "core/rules/layer_inputs.h"
#include "cpu/operations/cpu_operations.h"

namespace sharpi {

void CpuOperations::copyRows(const OptionalPart& part, Readers) {
    if (part) addPart(*part);
    std::memcpy(_work.floats(_work.scratch().normed), _work.at(RowBuffer::Residual),
                sizeof(float) * static_cast<size_t>(_work.rows() * _work.limits.embedding));
}

void CpuOperations::joinLayerInputs(const LayerInputsCall& call) {
    const int64_t width = call.width, parts = _work.rows() * (_work.limits.layerInputs / width);
    const LayerInputFactors f(_work.limits.embedding, width);
    float *const inputs = _work.at(RowBuffer::LayerInputs), *const rows = _work.at(RowBuffer::LayerRows);
    _work.readRows(call.table, rows, _work.limits.layerInputs);
    _work.forRanges(parts, std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            float *const x = inputs + i * width, *const row = rows + i * width;
            for (int64_t e = 0; e < width; ++e) x[e] *= f.projected;
            _work.kernels.rmsNorm(x, call.norm, call.eps, width, x);
            for (int64_t e = 0; e < width; ++e) x[e] = joinedLayerInput(x[e], row[e], f);
        }
    });
}

void CpuOperations::gateLayerInput(int32_t layer, int64_t width, const Weight&) {
    const int64_t stride = _work.limits.layerInputs;
    float *const gate = _work.at(RowBuffer::Gate), *const inputs = _work.at(RowBuffer::LayerInputs) + layer * width;
    _work.forRanges(_work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / width),
                    [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) {
                            cpu::GatedRow row;
                            row.gate = gate + t * width;
                            row.up = inputs + t * stride;
                            _work.kernels.gatedActivation({ActivationKind::Gelu, 0}, row, width);
                        }
                    });
}

}  // namespace sharpi
