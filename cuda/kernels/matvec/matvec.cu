// Launches the products of quantized weights with few rows, which take most of a token's time. matvec_kernel.cuh and
// matvec_product.cuh have the kernels for few rows, stream_tile.cuh, mma_tile.cuh and mma_product.cuh those for more.
// matvec_float.cu compiles those for float weights.
//
// Matrices of one type that read the same activations share a launch, because the beginning and the end of a launch are
// a large part of its time at batch 1.
#include <algorithm>
#include <utility>

#include "kernels/matvec/grouped.cuh"
#include "kernels/matvec/mma/mma_product.cuh"
#include "kernels/matvec/narrow/narrow.cuh"

namespace sharpi::cuda {

// A stride of 0 means that rows have no more than the outputs.
static int32_t outputStride(const Matrix& w, int64_t stride) {
    if (stride == 0) return static_cast<int32_t>(w.rows);
    if (stride < w.rows || stride > int64_t{1} << 30)
        throw Error(ErrorKind::Internal,
                    "matvec: " + std::to_string(w.rows) + " outputs do not fit in rows of " + std::to_string(stride));
    return static_cast<int32_t>(stride);
}

static Product productOf(const Matrix& w, const float* bias, float* y, int64_t stride) {
    checkShape(w);
    Product product;
    product.data = w.data;
    product.shape = packedShape(w.type, w.rows, w.cols);
    product.bias = bias;
    product.y = y;
    product.rows = static_cast<int32_t>(w.rows);
    product.stride = outputStride(w, stride);
    return product;
}

static Products productsOf(const MatvecInput& x, int rows, int64_t cols) {
    checkRows(rows);
    Products p;
    p.x = x;
    p.rows = rows;
    p.cols = static_cast<int32_t>(cols);
    return p;
}

// Groups pay from one pair for two experts on. With fewer pairs, hardly any of them meet, and grouping takes a launch.
constexpr int64_t kExpertsPerPair = 2;

static void launchProductsOf(Stream& stream, DType type, const Products& p, int64_t pairs) {
    if (p.count == 0) return;
    withType(type, [&](auto tag) { launchProducts<decltype(tag)::kType>(stream, p, pairs); });
}

// The part of p with `rows` rows of activations from `first` on.
static Products rowsOf(const Products& p, int first, int rows) {
    Products part = p;
    part.x = rowsFrom(p.x, first, p.cols);
    part.rows = rows;
    for (int i = 0; i < p.count; ++i) part.product[i].y += static_cast<int64_t>(first) * p.product[i].stride;
    return part;
}

// The same for dense matrices and up to kMaxMatvecRows rows.
static void launchDense(Stream& stream, DType type, Products& p) {
    if (p.count == 0) return;
    withType(type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        if constexpr (!kIsFloat<kType>)
            if (usesMma(stream, kType, p.rows)) return launchMmaProducts<kType>(stream, p);
        if constexpr (kType == DType::F32)
            if (isNarrow(p, FloatInput::kElements)) return launchNarrow(stream, p, FloatInput{p.x.floats});
        for (int first = 0; first < p.rows; first += kPlainMatvecRows)
            launchProducts<kType>(stream, rowsOf(p, first, std::min(kPlainMatvecRows, p.rows - first)), 1);
    });
}

// Whether launchDense makes one launch, whose inputs are all there when those of the launch before it are.
static bool canBeTogether(const Stream& stream, DType type, const QuantizedRows& x, int rows) {
    if (usesMma(stream, type, rows)) return isRareType(type) || x.wide.written || !x.wide.codes;
    return !isFloatType(type) && rows <= kPlainMatvecRows;
}

bool readsColumns(const Stream& stream, DType type, int64_t rows) {
    return rows >= kMmaFromRows && rows <= kMaxMatvecRows && hasMma(stream, type) && !isRareType(type);
}

void matvec(Stream& stream, const MatvecInput& x, int rows, const std::vector<MatvecOutput>& outputs) {
    if (rows == 0) return;
    std::vector<bool> done(outputs.size());
    std::vector<std::pair<DType, Products>> launches;
    for (size_t first = 0; first < outputs.size(); ++first) {
        if (done[first]) continue;
        const Matrix& leader = outputs[first].w;
        Products p = productsOf(x, rows, leader.cols);
        for (size_t i = first; i < outputs.size() && p.count < kMaxProducts; ++i) {
            if (done[i] || outputs[i].w.type != leader.type) continue;
            if (outputs[i].w.cols != leader.cols)
                throw Error(ErrorKind::Internal, "matvec: matrices with different numbers of columns");
            done[i] = true;
            if (outputs[i].w.rows > 0)
                p.product[p.count++] = productOf(outputs[i].w, outputs[i].bias, outputs[i].y, outputs[i].stride);
        }
        if (p.count > 0) launches.emplace_back(leader.type, p);
    }
    const bool together = launches.size() > 1 && std::all_of(launches.begin(), launches.end(), [&](const auto& one) {
                              return canBeTogether(stream, one.first, x.quantized, rows);
                          });
    QuantizedRows in = x.quantized;  // columns that are arranged for a type serve the others
    for (auto& [type, p] : launches) {
        p.x.quantized = in;
        if (together) p.order = &p == &launches.front().second ? Together::First : Together::Later;
        launchDense(stream, type, p);
        in = p.x.quantized;
    }
}

void matvecAdd(Stream& stream, const MatvecInput& x, int rows, const Matrix& w, const float* bias, float* residual,
               int64_t stride) {
    if (rows == 0 || w.rows == 0) return;
    Products p = productsOf(x, rows, w.cols);
    p.product[p.count++] = productOf(w, bias, residual, stride);
    p.add = true;
    launchDense(stream, w.type, p);
}

bool sharesExperts(const Stream& stream, const ExpertStack& w, int64_t rows, int32_t used) {
    return hasMma(stream, w.first.type) && w.count > 0 && rows > 1 && kExpertsPerPair * rows * used >= w.count;
}

void expertMatvec(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& w, const int32_t* chosen,
                  int32_t used, bool rowPerPair, float* y, const PairGroups& groups) {
    if (rows == 0 || used == 0 || w.first.rows == 0) return;
    if (groups.count && hasMma(stream, w.first.type)) {
        GroupedProduct p;
        p.w = groupedWeights(x, w, groups, rowPerPair ? 1 : used);
        p.y = y;
        return launchGrouped(stream, w.first.type, p, groups);
    }
    Products p = productsOf(x, 1, w.first.cols);
    p.product[p.count++] = productOf(w.first, nullptr, y, 0);
    p.chosen = chosen;
    p.stride = static_cast<int64_t>(w.stride);
    p.used = used;
    p.rowPerPair = rowPerPair;
    launchProductsOf(stream, w.first.type, p, static_cast<int64_t>(rows) * used);
}

}  // namespace sharpi::cuda
