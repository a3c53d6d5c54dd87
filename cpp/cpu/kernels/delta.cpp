// Gated DeltaNet's delta rule (Yang et al., 2024). There is one order of operations, so a sequence's state and answers
// have the same bits however its tokens are cut into batches, on every instruction set and, for few rows, on a GPU.
// Each operation rounds to nearest even; fma rounds once.
//
// For each value head, with its matrix S [dim, dim] (row i: element i of a key; column j: of a value), the row's key k,
// query q, value v, decay a and step b:
//   S[i][j] = S[i][j] * a
//   r[j]    = sum over i of fma(S[i][j], k[i], .)
//   d[j]    = (v[j] - r[j]) * b
//   S[i][j] = fma(k[i], d[j], S[i][j])
//   o[j]    = sum over i of fma(S[i][j], q[i], .)
// Both sums use 8 accumulators that start at +0. Element i goes to accumulator i mod 8, in ascending order; then
// acc[n] += acc[n + 4], += acc[n + 2], += acc[n + 1]. Eight are enough to hide the latency of an fma, and few enough
// for eight of a GPU's threads to have one each.
//
// Columns do not interact, so they are computed 16 at a time.
#include "cpu/kernels/state_rows.h"

namespace sharpi::cpu::SHARPI_ISA {

void deltaRule(const DeltaArgs& args, int32_t begin, int32_t end, void* scratch) {
    float* panel = static_cast<float*>(scratch);
    const int32_t dim = args.dim;
    for (int32_t column = begin; column < end; column += kLanes) {
        const int lanes = end - column < kLanes ? end - column : kLanes;
        loadPanel(panel, args.from ? args.from + column : nullptr, dim, dim, lanes);
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
        storePanel(panel, args.to + column, dim, dim, lanes);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
