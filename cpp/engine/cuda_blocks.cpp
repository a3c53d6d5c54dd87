// The GPU backend's blocks, each for few rows (the contract's products, few launches) and for many (tensor cores).
#include "core/error.h"
#include "engine/cuda_backend.h"
#include "kernels/packed.h"
#include "kernels/router.h"

namespace sharpi {

namespace {

bool isFloat(const Matrix& m) { return info(m.type).isFloat; }
bool sameType(const Matrix& a, const Matrix& b) { return a.type == b.type; }

}  // namespace

cuda::RowOutputs CudaBackend::formsFor(std::initializer_list<Matrix> readers, size_t floatsAt, size_t quantizedAt,
                                       int64_t formRows, int64_t cols) const {
    cuda::RowOutputs forms;
    for (const Matrix& m : readers) {
        if (isFloat(m)) forms.floats = floats(floatsAt);
        else forms.quantized = cuda::quantizedRowsOver(at<uint8_t>(quantizedAt), formRows, cols);
    }
    return forms;
}

void CudaBackend::embed(const Matrix& table) { cuda::embed(_stream, table, _tokens, _rows, floats(_layout->x)); }

cuda::HeadPreparation CudaBackend::preparation(const AttentionWeights& w, float eps) const {
    cuda::HeadPreparation how;
    how.norm = w.qkNorm == AttentionSpec::QkNorm::PerHead   ? cuda::HeadNorm::PerHead
               : w.qkNorm == AttentionSpec::QkNorm::FullRow ? cuda::HeadNorm::FullRow
                                                            : cuda::HeadNorm::None;
    how.qNorm = w.qNorm;
    how.kNorm = w.kNorm;
    how.eps = eps;
    how.cos = w.rope.cos;
    how.sin = w.rope.sin;
    how.ropeDims = w.rope.dims;
    how.adjacent = w.rope.adjacent;
    return how;
}

void CudaBackend::attention(const AttentionWeights& w, const KvPages& pages, float eps) {
    few() ? attentionFew(w, pages, eps) : attentionMany(w, pages, eps);
}

void CudaBackend::attentionFew(const AttentionWeights& w, const KvPages& pages, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::HeadShape shape{w.heads, pages.kvHeads, pages.headDim};
    const cuda::RowOutputs normed = formsFor({w.q, w.k, w.v}, s.normed, s.normedQuant, _rows, _limits.embedding);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    cuda::matvec(_stream, input(normed), rows(),
                 {{w.q, w.qBias, floats(s.q)}, {w.k, w.kBias, floats(s.k)}, {w.v, w.vBias, floats(s.v)}});
    cuda::prepareHeads(_stream, floats(s.q), floats(s.k), floats(s.v), shape, preparation(w, eps), _batch, pages, {});

    cuda::RowOutputs attended = formsFor({w.output}, s.attended, s.attendedQuant, _rows, w.output.cols);
    // Contract blocks do not cross heads only where a head is whole blocks.
    const bool convert = !isFloat(w.output) && pages.headDim % 32 != 0;
    cuda::RowOutputs written = attended;
    if (convert) written = {floats(s.attended), {}, {}};
    cuda::attentionDecode(_stream, floats(s.q), shape, w.scale, _batch, pages, at<uint8_t>(s.attention), written);
    if (convert) cuda::convertRows(_stream, floats(s.attended), _rows, w.output.cols, attended);
    cuda::matvecAdd(_stream, input(attended), rows(), w.output, w.outputBias, floats(s.x));
}

void CudaBackend::attentionMany(const AttentionWeights& w, const KvPages& pages, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::HeadShape shape{w.heads, pages.kvHeads, pages.headDim};
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo), q = halves(s.qHi, s.qLo), attended = halves(s.attendedHi, s.attendedLo);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, {nullptr, {}, normed});
    cuda::matmul(_stream, w.q, normed, _rows, w.qBias, floats(s.q), cuda::Store::Write);
    cuda::matmul(_stream, w.k, normed, _rows, w.kBias, floats(s.k), cuda::Store::Write);
    cuda::matmul(_stream, w.v, normed, _rows, w.vBias, floats(s.v), cuda::Store::Write);
    cuda::prepareHeads(_stream, floats(s.q), floats(s.k), floats(s.v), shape, preparation(w, eps), _batch, pages, q);
    cuda::attentionPrefill(_stream, q, shape, w.scale, _batch, _tiles, pages, {nullptr, {}, attended});
    cuda::matmul(_stream, w.output, attended, _rows, w.outputBias, floats(s.x), cuda::Store::Add);
}

void CudaBackend::dense(const DenseWeights& w, float eps) { few() ? denseFew(w, eps) : denseMany(w, eps); }

void CudaBackend::denseFew(const DenseWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::RowOutputs normed = formsFor({w.gate, w.up}, s.normed, s.normedQuant, _rows, _limits.embedding);
    const cuda::RowOutputs hidden = formsFor({w.down}, s.hidden, s.hiddenQuant, _rows, w.down.cols);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    if (sameType(w.gate, w.up)) {
        cuda::matvecGated(_stream, input(normed), rows(), w.gate, w.up, hidden);
    } else {
        cuda::matvec(_stream, input(normed), rows(), {{w.gate, nullptr, floats(s.gate)}, {w.up, nullptr, floats(s.up)}});
        cuda::siluMul(_stream, floats(s.gate), floats(s.up), _rows, w.down.cols, hidden);
    }
    cuda::matvecAdd(_stream, input(hidden), rows(), w.down, nullptr, floats(s.x));
}

void CudaBackend::denseMany(const DenseWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo), hidden = halves(s.hiddenHi, s.hiddenLo);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, {nullptr, {}, normed});
    cuda::matmul(_stream, w.gate, normed, _rows, nullptr, floats(s.manyGate), cuda::Store::Write);
    cuda::matmul(_stream, w.up, normed, _rows, nullptr, floats(s.manyUp), cuda::Store::Write);
    cuda::siluMul(_stream, floats(s.manyGate), floats(s.manyUp), _rows, w.down.cols, {nullptr, {}, hidden});
    cuda::matmul(_stream, w.down, hidden, _rows, nullptr, floats(s.x), cuda::Store::Add);
}

void CudaBackend::experts(const ExpertWeights& w, float eps) { few() ? expertsFew(w, eps) : expertsMany(w, eps); }

void CudaBackend::expertsFew(const ExpertWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const Matrix &gate = w.gate.first, &up = w.up.first, &down = w.down.first;
    const int64_t pairs = _rows * w.used;
    auto* chosen = at<int32_t>(s.chosen);
    const cuda::RowOutputs normed = formsFor({w.router, gate, up}, s.normed, s.normedQuant, _rows, _limits.embedding);
    const cuda::RowOutputs hidden = formsFor({down}, s.hidden, s.hiddenQuant, pairs, down.cols);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    cuda::matvec(_stream, input(normed), rows(), {{w.router, nullptr, floats(s.routerLogits)}});
    cuda::route(_stream, floats(s.routerLogits), _rows, w.gate.count, w.used, w.renormalize, w.weightScale, chosen, floats(s.weight));
    if (sameType(gate, up)) {
        cuda::expertGated(_stream, input(normed), rows(), w.gate, w.up, chosen, w.used, hidden);
    } else {
        cuda::expertMatvec(_stream, input(normed), rows(), w.gate, chosen, w.used, false, floats(s.gate));
        cuda::expertMatvec(_stream, input(normed), rows(), w.up, chosen, w.used, false, floats(s.up));
        cuda::siluMul(_stream, floats(s.gate), floats(s.up), pairs, down.cols, hidden);
    }
    cuda::expertDownAdd(_stream, input(hidden), rows(), w.down, chosen, floats(s.weight), w.used, floats(s.x));
}

void CudaBackend::expertsMany(const ExpertWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const int64_t pairs = _rows * w.used;
    const int32_t count = w.gate.count;
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo), hidden = halves(s.hiddenHi, s.hiddenLo);
    auto* chosen = at<int32_t>(s.chosen);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, {nullptr, {}, normed});
    cuda::matmul(_stream, w.router, normed, _rows, nullptr, floats(s.manyRouterLogits), cuda::Store::Write);
    cuda::route(_stream, floats(s.manyRouterLogits), _rows, count, w.used, w.renormalize, w.weightScale, chosen, floats(s.weight));
    const cuda::ExpertGrouping made = cuda::expertGroupingOver(at<uint8_t>(s.grouping), _rows, w.used, count);
    cuda::groupExperts(_stream, chosen, _rows, w.used, count, made);
    const cuda::ExpertGroups groups{made.begin, made.pairToken, made.tileExpert, made.tileBegin, pairs, cuda::maxExpertTiles(pairs, count)};
    cuda::matmulExperts(_stream, w.gate, normed, groups, true, floats(s.manyGate));
    cuda::matmulExperts(_stream, w.up, normed, groups, true, floats(s.manyUp));
    cuda::siluMul(_stream, floats(s.manyGate), floats(s.manyUp), pairs, w.down.first.cols, {nullptr, {}, hidden});
    cuda::matmulExperts(_stream, w.down, hidden, groups, false, floats(s.expertOut));
    cuda::combineExperts(_stream, floats(s.expertOut), made.pairOf, floats(s.weight), _rows, w.used, w.down.first.rows, floats(s.x));
}

void CudaBackend::head(const HeadWeights& w, float eps, int64_t first, int64_t count) {
    const GpuScratch& s = *_layout;
    const cuda::RowOutputs normed = formsFor({w.output}, s.normed, s.normedQuant, count, _limits.embedding);
    cuda::rmsNorm(_stream, floats(s.x), _wanted + first, w.norm, eps, count, _limits.embedding, normed);
    cuda::matvec(_stream, input(normed), static_cast<int>(count), {{w.output, nullptr, floats(s.logits)}});
}

}  // namespace sharpi
