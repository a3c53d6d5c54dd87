// See cuda_operations.h. Rows, products, drafts and the output head.
#include "backend/cuda_operations.h"

#include "kernels/rows/rows.h"

namespace sharpi {

void CudaOperations::embed(const Weight& table) { _pass.readTable(table, _pass.floats(RowBuffer::Residual)); }

// Fast rows that are also read as floats lie where the shared expert's output will be: they are read before it is
// written.
void CudaOperations::norm(const float* weight, float eps, Readers readers, bool floats) {
    const int64_t width = _pass.limits.embedding, exact = _pass.exactRows(), fast = _pass.fastRows();
    const float* const x = _pass.floats(RowBuffer::Residual);
    Activations to = _pass.shape(RowInput::Normed, readers, width);
    float* fastFloats = nullptr;
    if (floats) {
        to.exact.floats = _pass.exactFloats(RowInput::Normed);
        fastFloats = _pass.floats(RowBuffer::SharedOut) + exact * width;
    }
    if (exact) cuda::rmsNorm(_pass.stream, x, nullptr, weight, eps, exact, width, to.exact);
    if (fast)
        cuda::rmsNorm(_pass.stream, x + exact * width, nullptr, weight, eps, fast, width, {fastFloats, {}, to.fast});
}

void CudaOperations::linear(RowInput x, std::initializer_list<Product> products) {
    _products.linear(_pass.input(x), products);
}

void CudaOperations::addLinear(RowInput x, const Weight& w, const float* bias) {
    _products.addLinear(_pass.input(x), w, bias);
}

void CudaOperations::gatedLinear(RowInput x, const Weight& gate, const Weight& up, const Weight& reader) {
    _products.gatedLinear(_pass.input(x), gate, up, reader);
}

// The embeddings come first, then what the output head read; each row then takes its place beside its token's.
void CudaOperations::joinDraft(const Weight& table, const float* norms, const float* sourceNorm, float eps,
                               const Weight& reader) {
    const int64_t width = _pass.limits.embedding, exact = _pass.exactRows(), fast = _pass.fastRows();
    const BatchView& view = _pass.view;
    float* const apart = _pass.floats(_pass.layout->apart);
    _pass.readTable(table, apart);
    cuda::rmsNorm(_pass.stream, _pass.floats(RowBuffer::Residual), view.sources, sourceNorm, eps, view.rows, width,
                  {apart + view.rows * width, {}, {}});
    const Activations& joined = _pass.shape(RowInput::Joined, {reader}, 2 * width);
    float* const floats = _pass.exactFloats(RowInput::Joined);
    if (exact) {
        cuda::rmsNorm(_pass.stream, apart, view.joined, norms, eps, 2 * exact, width, {floats, {}, {}}, 2);
        if (!joined.exact.floats) cuda::convertRows(_pass.stream, floats, exact, 2 * width, joined.exact);
    }
    if (fast) {
        cuda::rmsNorm(_pass.stream, apart, view.joined + 2 * exact, norms, eps, 2 * fast, width,
                      {nullptr, {}, joined.fast}, 2);
    }
}

void CudaOperations::head(const float* norm, const Weight& output, float eps, int64_t first, int64_t count) {
    const int64_t width = _pass.limits.embedding;
    const cuda::RowOutputs normed =
        _pass.exactForms({output}, _pass.layout->input(RowInput::Normed).exact, count, width);
    const bool inRegion = first == 0;
    if (!inRegion) _pass.weights->beginHead();
    cuda::rmsNorm(_pass.stream, _pass.floats(RowBuffer::Residual), _pass.view.logitRows + first, norm, eps, count,
                  width, normed);
    _products.logits(normed, output, count, inRegion);
    if (!inRegion) _pass.weights->end();
}

}  // namespace sharpi
