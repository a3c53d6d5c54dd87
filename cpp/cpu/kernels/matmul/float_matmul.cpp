// Products with float weights: F32, F16 and BF16 matrices, converted exactly as they are read.
//
// y[i, r] = vec.h's 32-accumulator sum of fma(w[r, c], x[i, c], acc), then + bias[r]. Every output has its own
// accumulators, so blocking over rows and tokens, which saves loads, cannot change a bit. One token runs at the speed
// of memory; many are taken in blocks that fit the second-level cache, so that w is read from memory once a block.
#include "cpu/kernels/internal.h"
#include "cpu/kernels/vec.h"

namespace sharpi::cpu::SHARPI_ISA {

// Outputs that are computed at once: as many as leave two registers free for operands.
#if defined(__AVX512F__)
constexpr int kRowBlock = 4, kTokenBlock = 3;
#elif defined(__AVX2__)
constexpr int kRowBlock = 1, kTokenBlock = 3;
#else
constexpr int kRowBlock = 1, kTokenBlock = 1;
#endif
constexpr int64_t kTokenBytesInCache = 256 * 1024;

static const float* inputRow(const MatmulArgs& args, int64_t i) {
    return args.xFloat + (args.rowIndex ? static_cast<int64_t>(args.rowIndex[i]) : i) * args.w.cols;
}

// acc[r][t] += w[r] * x[t] over 32 columns.
template <class Read, int kRows, int kTokens>
SHARPI_INLINE void step(Acc32 (&acc)[kRows][kTokens], const typename Read::Element* w, int64_t wStride,
                        const float* const* x, int64_t c) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
        const Vec lo = Read::load(w + r * wStride);
        const Vec hi = Read::load(w + r * wStride + kLanes);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; t++) {
            acc[r][t].lo = vfma(lo, vload(x[t] + c), acc[r][t].lo);
            acc[r][t].hi = vfma(hi, vload(x[t] + c + kLanes), acc[r][t].hi);
        }
    }
}

// The last n < 32 elements of a few rows, padded with zeros.
template <class Element>
static __attribute__((noinline)) void padTail(const Element* from, int64_t stride, int rows, int64_t n, Element* to) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0; i < 2 * kLanes; i++)
            to[r * 2 * kLanes + i] = i < n ? from[r * stride + i] : static_cast<Element>(0);
}

template <class Read, int kRows, int kTokens>
static __attribute__((noinline)) void matmulBlock(const MatmulArgs& args, int64_t row, int64_t token) {
    using Element = typename Read::Element;
    const int64_t cols = args.w.cols, whole = cols - cols % (2 * kLanes);
    const Element* w = reinterpret_cast<const Element*>(args.w.data) + row * cols;
    const float* x[kTokens];
    for (int t = 0; t < kTokens; t++) x[t] = inputRow(args, token + t);
    Element wTail[kRows * 2 * kLanes];
    float xTail[kTokens * 2 * kLanes];
    if (whole < cols) {
        padTail(w + whole, cols, kRows, cols - whole, wTail);
        for (int t = 0; t < kTokens; t++) padTail(x[t] + whole, 0, 1, cols - whole, xTail + t * 2 * kLanes);
    }

    Acc32 acc[kRows][kTokens];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; t++) acc[r][t] = {vzero(), vzero()};
    for (int64_t c = 0; c < whole; c += 2 * kLanes) step<Read, kRows, kTokens>(acc, w + c, cols, x, c);
    if (whole < cols) {
        for (int t = 0; t < kTokens; t++) x[t] = xTail + t * 2 * kLanes;
        step<Read, kRows, kTokens>(acc, wTail, 2 * kLanes, x, 0);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; t++) {
            const float sum = sum32(acc[r][t]);
            args.y[(token + t) * args.yStride + row + r] = args.bias ? sum + args.bias[row + r] : sum;
        }
}

// kRows rows against all tokens of [begin, end), so that the rows are in the cache after the first few.
template <class Read, int kRows>
static void matmulRows(const MatmulArgs& args, int64_t row, int64_t begin, int64_t end) {
    int64_t t = begin;
    for (; t + kTokenBlock <= end; t += kTokenBlock) matmulBlock<Read, kRows, kTokenBlock>(args, row, t);
    for (; t < end; t++) matmulBlock<Read, kRows, 1>(args, row, t);
}

template <class Read> static void matmulAs(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd) {
    int64_t perBlock = kTokenBytesInCache / (args.w.cols * static_cast<int64_t>(sizeof(float)));
    perBlock = perBlock < 8 * kTokenBlock ? 8 * kTokenBlock : perBlock - perBlock % kTokenBlock;
    for (int64_t begin = 0; begin < args.count; begin += perBlock) {
        const int64_t end = begin + perBlock < args.count ? begin + perBlock : args.count;
        int64_t row = rowBegin;
        for (; row + kRowBlock <= rowEnd; row += kRowBlock) matmulRows<Read, kRowBlock>(args, row, begin, end);
        for (; row < rowEnd; row++) matmulRows<Read, 1>(args, row, begin, end);
    }
}

void matmulFloat(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void*) {
    switch (args.w.type) {
    case DType::F32: return matmulAs<ReadF32>(args, rowBegin, rowEnd);
    case DType::BF16: return matmulAs<ReadBf16>(args, rowBegin, rowEnd);
    default: return matmulAs<ReadF16>(args, rowBegin, rowEnd);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
