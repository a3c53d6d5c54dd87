// See cuda_operations.h. Rows, products, drafts and the output head.
#include "backend/operations/cuda_operations.h"

#include "kernels/rows/rows.h"

namespace sharpi {

void CudaOperations::embed(const Weight& table, float scale) {
    float* const x = _pass.floats(RowBuffer::Residual);
    _pass.readTable(table, x);
    if (scale != 1.0f) cuda::scaleRows(_pass.stream, x, _pass.view.rows * _pass.limits.embedding, scale);
}

void CudaOperations::addPart(const PartCall& part) { _pass.nextRows(part, {}, 0, _pass.view.rows, {}); }

// Fast rows that are also read as floats lie where the shared expert's output will be: they are read before it is
// written.
void CudaOperations::norm(const OptionalPart& part, const NormCall& norm, Readers readers, bool floats) {
    const int64_t width = _pass.limits.embedding, exact = _pass.exactRows(), fast = _pass.fastRows();
    const cuda::NextRows next = CudaPass::nextOf(norm);
    Activations to = _pass.shape(RowInput::Normed, readers, width);
    float* fastFloats = nullptr;
    if (floats) {
        to.exact.floats = _pass.exactFloats(RowInput::Normed);
        fastFloats = _pass.floats(RowBuffer::SharedOut) + exact * width;
    }
    _pass.nextRows(part, next, 0, exact, to.exact);
    _pass.nextRows(part, next, exact, fast, {fastFloats, {}, to.fast});
}

void CudaOperations::linear(RowInput x, std::initializer_list<Product> products) {
    _products.linear(_pass.input(x), products);
}

void CudaOperations::addLinear(RowInput x, const Weight& w, const float* bias) {
    _products.addLinear(_pass.input(x), w, bias);
}

void CudaOperations::gatedLinear(RowInput x, const GatedProduct& product, const Weight& reader) {
    _products.gatedLinear(_pass.input(x), product, reader);
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

void CudaOperations::head(const HeadCall& call, int64_t first, int64_t count) {
    const int64_t width = _pass.limits.embedding;
    const cuda::RowOutputs normed =
        _pass.exactForms({call.output}, _pass.layout->input(RowInput::Normed).exact, count, width);
    const bool inRegion = first == 0;
    if (!inRegion) _pass.weights->beginHead();
    _pass.normRows(_pass.view.logitRows + first, CudaPass::nextOf(call.norm), count, normed);
    _products.logits(normed, call.output, count, inRegion);
    if (call.scale != 1.0f)
        cuda::scaleRows(_pass.stream, _pass.floats(_pass.layout->logits), count * call.output.rows, call.scale);
    if (call.softcap != 0)
        cuda::softcap(_pass.stream, _pass.floats(_pass.layout->logits), count * call.output.rows, call.softcap);
    if (!inRegion) _pass.weights->end();
}

}  // namespace sharpi
