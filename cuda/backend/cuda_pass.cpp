// See cuda_pass.h.
#include "backend/cuda_pass.h"

namespace sharpi {

cuda::RowOutputs CudaPass::exactForms(Readers readers, const GpuScratch::Exact& to, int64_t rows, int64_t cols) const {
    cuda::RowOutputs forms;
    for (const Matrix& m : readers) {
        if (info(m.type).isFloat) forms.floats = floats(to.floats);
        else forms.quantized = cuda::quantizedRowsOver(at<uint8_t>(to.quantized), rows, cols);
    }
    return forms;
}

const Activations& CudaPass::shape(RowInput input, Readers readers, int64_t cols, int64_t perRow) {
    const GpuScratch::Input& to = layout->inputs[static_cast<size_t>(input)];
    Activations& rows = _inputs[static_cast<size_t>(input)];
    rows = {exactForms(readers, to.exact, exactRows() * perRow, cols), halves(to.fast), cols};
    return rows;
}

}  // namespace sharpi
