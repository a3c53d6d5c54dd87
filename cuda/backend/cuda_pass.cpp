// See cuda_pass.h.
#include "backend/cuda_pass.h"

#include "core/error.h"
#include "kernels/formats/packed.h"

namespace sharpi {

cuda::RowOutputs CudaPass::exactForms(Readers readers, const GpuScratch::Exact& to, int64_t rows, int64_t cols) const {
    cuda::RowOutputs forms;
    for (const Matrix& m : readers) {
        if (m.rows == 0) continue;  // a part without a gate has no `up`
        if (info(m.type).isFloat) {
            forms.floats = floats(to.floats);
            continue;
        }
        const bool columns = forms.quantized.wide.written || cuda::readsColumns(stream, m.type, rows);
        forms.quantized = cuda::quantizedRowsOver(at<uint8_t>(to.quantized), rows, cols);
        forms.quantized.wide.written = columns;
    }
    return forms;
}

void CudaPass::readTable(const Weight& table, float* out) {
    if (table.resident()) {
        weights->arrive(table.group);
        return cuda::embed(stream, table, view.tokens, view.rows, out);
    }
    tables->forParts(
        table.file,
        [this] {
            const HostClock::Evaluation evaluation(clock);
            stream.synchronize();
        },
        [&](const Matrix& rows, int64_t first) { cuda::expandRows(stream, rows, out + first * table.cols); });
}

cuda::NextRows CudaPass::nextOf(const NormCall& norm) {
    using Kind = cuda::NextRows::Kind;
    return {norm.kind == NormKind::Layer ? Kind::Layer : Kind::Rms, norm.weight, norm.bias, norm.eps};
}

// The norm of the rows index[0 .. rows) of x, or of its first rows without an index.
static void normOf(cuda::Stream& stream, float* x, const int32_t* index, const cuda::NextRows& next, int64_t rows,
                   int64_t width, const cuda::RowOutputs& out) {
    if (next.kind == cuda::NextRows::Kind::Rms)
        return cuda::rmsNorm(stream, x, index, next.weight, next.eps, rows, width, out);
    cuda::addPart(stream, {}, x, index, next, rows, width, out);
}

void CudaPass::nextRows(const OptionalPart& part, const cuda::NextRows& next, int64_t first, int64_t rows,
                        const cuda::RowOutputs& out) const {
    const int64_t width = limits.embedding, at = first * width;
    float* const x = floats(RowBuffer::Residual) + at;
    if (part) {
        cuda::PartTerms terms{floats(RowBuffer::PartOut) + at, part->norm};
        if (part->sideNorms[0]) {
            terms.side = floats(RowBuffer::SideOut) + at;
            terms.yNorm = part->sideNorms[0];
            terms.sideNorm = part->sideNorms[1];
        }
        terms.eps = part->eps;
        terms.factor = part->factor;
        terms.scale = part->scale;
        return cuda::addPart(stream, terms, x, nullptr, next, rows, width, out);
    }
    if (next.kind == cuda::NextRows::Kind::Copy) return cuda::convertRows(stream, x, rows, width, out);
    normOf(stream, x, nullptr, next, rows, width, out);
}

void CudaPass::normRows(const int32_t* index, const cuda::NextRows& next, int64_t rows,
                        const cuda::RowOutputs& out) const {
    normOf(stream, floats(RowBuffer::Residual), index, next, rows, limits.embedding, out);
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
    if (perRow != 1) withoutColumns(input);  // products by head or by expert read rows
    return rows;
}

}  // namespace sharpi
