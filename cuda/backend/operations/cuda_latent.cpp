// Latent attention on the GPU, and what attention with grouped outputs has in common with it; see cuda_operations.h.
#include "backend/operations/cuda_operations.h"
#include "core/error.h"
#include "kernels/heads/latent.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matvec/by_head.h"

namespace sharpi {

namespace {

// Rows [first, first + count) of the batch, normalized if there is a norm.
void takeWhole(CudaPass& pass, const TakenRows& rows, int64_t first, int64_t count, int64_t cols,
               const cuda::RowOutputs& to) {
    const float* const from = pass.floats(rows.from) + first * rows.stride;
    if (count == 0) return;
    if (rows.norm) cuda::rmsNorm(pass.stream, from, nullptr, rows.norm, rows.eps, count, cols, to);
    else cuda::convertRows(pass.stream, from, count, cols, to);
}

}  // namespace

void CudaOperations::takeRows(const TakenRows& rows, RowInput to, Readers readers) {
    const int64_t exact = _pass.exactRows(), fast = _pass.fastRows(), cols = readers.begin()->cols;
    if (to == RowInput::PlainQueries) {
        const Activations& taken = _pass.shape(to, readers, cols, rows.pieces);
        const float* const from = _pass.floats(rows.from);
        cuda::takePieces(_pass.stream, from, rows.stride, exact * rows.pieces, cols, taken.exact);
        return cuda::takePieces(_pass.stream, from + exact * rows.pieces * rows.stride, rows.stride, fast * rows.pieces,
                                cols, {nullptr, {}, taken.fast});
    }
    if (rows.pieces != 1 || rows.stride != cols)
        throw Error(ErrorKind::Internal, "the GPU takes pieces of rows for products by head alone");
    const Activations& taken = _pass.shape(to, readers, cols);
    takeWhole(_pass, rows, 0, exact, cols, taken.exact);
    takeWhole(_pass, rows, exact, fast, cols, {nullptr, {}, taken.fast});
}

void CudaOperations::linearByHead(RowInput x, const HeadProduct& call) {
    const Activations& pieces = _pass.input(x);
    const cuda::MatvecInput input{pieces.exact.floats, pieces.exact.quantized};
    float* const to = _pass.floats(call.to);
    _pass.forParts(call.w, [&](const Matrix& part, int64_t begin, bool) {
        const cuda::HeadRows rows{part, begin, call.w.rows / call.heads, call.heads, call.stride};
        cuda::matvecByHead(_pass.stream, input, _pass.exactRows(), rows, to);
        cuda::matmulByHead(_pass.stream, rows, pieces.fast, _pass.fastRows(),
                           to + _pass.exactRows() * call.heads * call.stride);
    });
}

void CudaOperations::prepareLatent(const LatentCall& call, const KvPages& pages) {
    const cuda::LatentShape shape{call.heads, pages.valuePrefix, pages.headDim - pages.valuePrefix, call.plainDim};
    const cuda::LatentPreparation how{call.norm,     call.eps,           call.rope.cos,
                                      call.rope.sin, call.rope.adjacent, call.queryScale};
    const auto prepare = [&](int64_t first, const cuda::BatchRows& batch, const cuda::HalfRows& half) {
        if (batch.rows == 0) return;
        float* const q = _pass.floats(RowBuffer::Queries) + first * shape.heads * shape.rowDim();
        const float* const plain =
            _pass.floats(RowBuffer::HeadQueries) + first * shape.heads * (shape.plainDim + shape.rotated);
        const float* const keys = _pass.floats(RowBuffer::Keys) + first * shape.rowDim();
        cuda::prepareLatent(_pass.stream, q, plain, keys, shape, how, batch, pages, half);
    };
    prepare(0, _pass.view.exactOf(pages), {});
    prepare(_pass.exactRows(), _pass.view.fastOf(pages), _pass.halves(_pass.layout->queries));
}

}  // namespace sharpi
