// Gated DeltaNet (Yang et al., 2024): what lies between its products. There is one order of operations, so a sequence's
// state and answers have the same bits however its tokens are cut into batches, on every instruction set and, for few
// rows, on a GPU. Each operation rounds to nearest even; fma rounds once; exp is exp.h's.
//
// The convolution, for each channel c of row t, over the inputs x[t - width + 1] .. x[t] (zeros before the sequence):
//   y = fma(weight[w][c], x[t - width + 1 + w][c], y) for w ascending from +0;  y / (1 + exp(0 - y))
//
// The delta rule, for each value head, with its matrix S [dim, dim] (row i: element i of a key; column j: of a value),
// the row's key k, query q, value v, decay a and step b:
//   S[i][j] = S[i][j] * a
//   r[j]    = sum over i of fma(S[i][j], k[i], .)
//   d[j]    = (v[j] - r[j]) * b
//   S[i][j] = fma(k[i], d[j], S[i][j])
//   o[j]    = sum over i of fma(S[i][j], q[i], .)
// Both sums use 8 accumulators that start at +0. Element i goes to accumulator i mod 8, in ascending order; then
// acc[n] += acc[n + 4], += acc[n + 2], += acc[n + 1]. Eight are enough to hide the latency of an fma, and few enough
// for eight of a GPU's threads to have one each.
//
// Columns do not interact, so they are computed 16 at a time, which stay in the first-level cache for all rows.
#include "cpu/kernels/exp.h"
#include "cpu/kernels/internal.h"

namespace sharpi::cpu::SHARPI_ISA {

namespace {

constexpr int kSums = 8;

SHARPI_INLINE Vec some(const float* p, int lanes) { return lanes == kLanes ? vload(p) : vloadPart(p, lanes); }
SHARPI_INLINE void putSome(float* p, Vec a, int lanes) { lanes == kLanes ? vstore(p, a) : vstorePart(p, a, lanes); }

SHARPI_INLINE Vec total(Vec* acc) {
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) acc[n] = vadd(acc[n], acc[n + 4]);
    acc[0] = vadd(acc[0], acc[2]);
    acc[1] = vadd(acc[1], acc[3]);
    return vadd(acc[0], acc[1]);
}

// The sum over i of fma(update(i), x[i], .), where update(i) changes line i of the panel and returns it.
template <class Update> SHARPI_INLINE Vec updateAndSum(const float* x, int32_t dim, Update update) {
    Vec acc[kSums];
#pragma GCC unroll 8
    for (int n = 0; n < kSums; n++) acc[n] = vzero();
    int32_t i = 0;
    for (; i + kSums <= dim; i += kSums) {
#pragma GCC unroll 8
        for (int n = 0; n < kSums; n++) acc[n] = vfma(update(i + n), vset(x[i + n]), acc[n]);
    }
    for (int n = 0; i + n < dim; n++) acc[n] = vfma(update(i + n), vset(x[i + n]), acc[n]);
    return total(acc);
}

}  // namespace

void convSilu(const ConvArgs& args, int64_t begin, int64_t end) {
    const int32_t past = args.width - 1;
    Vec window[kMaxConvWidth];
    for (int64_t c = begin; c < end; c += kLanes) {
        const int lanes = static_cast<int>(end - c < kLanes ? end - c : kLanes);
        for (int32_t w = 0; w < past; w++)
            window[w] = args.from ? some(args.from + w * args.channels + c, lanes) : vzero();
        for (int64_t t = 0; t < args.rows; t++) {
            float* x = args.x + t * args.channels + c;
            window[past] = some(x, lanes);
            Vec y = vzero();
            for (int32_t w = 0; w <= past; w++)
                y = vfma(some(args.weight + w * args.channels + c, lanes), window[w], y);
            putSome(x, vdiv(y, vadd(vset(1.0f), vexp(vsub(vzero(), y)))), lanes);
            for (int32_t w = 0; w < past; w++) window[w] = window[w + 1];
        }
        for (int32_t w = 0; w < past; w++) putSome(args.to + w * args.channels + c, window[w], lanes);
    }
}

void deltaRule(const DeltaArgs& args, int32_t begin, int32_t end, void* scratch) {
    float* panel = static_cast<float*>(scratch);
    const int32_t dim = args.dim;
    for (int32_t column = begin; column < end; column += kLanes) {
        const int lanes = end - column < kLanes ? end - column : kLanes;
        for (int32_t i = 0; i < dim; i++) {
            vstore(panel + i * kLanes, args.from ? some(args.from + int64_t{i} * dim + column, lanes) : vzero());
        }
        for (int64_t t = 0; t < args.rows; t++) {
            const float *k = args.k + t * args.rowStride, *q = args.q + t * args.rowStride;
            const Vec decay = vset(args.decay[t * args.stepStride]), step = vset(args.step[t * args.stepStride]);
            const Vec recalled = updateAndSum(k, dim, [&](int32_t i) __attribute__((always_inline)) {
                const Vec line = vmul(vload(panel + i * kLanes), decay);
                vstore(panel + i * kLanes, line);
                return line;
            });
            const Vec delta = vmul(vsub(some(args.v + t * args.rowStride + column, lanes), recalled), step);
            const Vec out = updateAndSum(q, dim, [&](int32_t i) __attribute__((always_inline)) {
                const Vec line = vfma(vset(k[i]), delta, vload(panel + i * kLanes));
                vstore(panel + i * kLanes, line);
                return line;
            });
            putSome(args.out + t * args.outStride + column, out, lanes);
        }
        for (int32_t i = 0; i < dim; i++)
            putSome(args.to + int64_t{i} * dim + column, vload(panel + i * kLanes), lanes);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
