// See cuda_pass.h.
#include "backend/cuda_pass.h"

#include "core/error.h"
#include "kernels/formats/packed.h"

namespace sharpi {

cuda::RowOutputs CudaPass::exactForms(Readers readers, const GpuScratch::Exact& to, int64_t rows, int64_t cols) const {
    cuda::RowOutputs forms;
    for (const Matrix& m : readers) {
        if (info(m.type).isFloat) forms.floats = floats(to.floats);
        else forms.quantized = cuda::quantizedRowsOver(at<uint8_t>(to.quantized), rows, cols);
    }
    return forms;
}

void CudaPass::readTable(const Weight& table, float* out) const {
    if (table.resident()) {
        weights->arrive(table.group);
        return cuda::embed(stream, table, view.tokens, view.rows, out);
    }
    tables->forParts(
        table.file, [this] { stream.synchronize(); },
        [&](const Matrix& rows, int64_t first) { cuda::expandRows(stream, rows, out + first * table.cols); });
}

const Activations& CudaPass::input(RowInput input) const {
    const Activations& rows = _inputs[static_cast<size_t>(input)];
    if (rows.cols == 0)
        throw Error(ErrorKind::Internal, "a product reads rows that no operation of the pass has written");
    return rows;
}

const Activations& CudaPass::shape(RowInput input, Readers readers, int64_t cols, int64_t perRow) {
    const GpuScratch::Input& to = layout->input(input);
    Activations& rows = _inputs[static_cast<size_t>(input)];
    rows = {exactForms(readers, to.exact, exactRows() * perRow, cols), halves(to.fast), cols};
    return rows;
}

}  // namespace sharpi
