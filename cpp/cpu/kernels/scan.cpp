// Mamba 2's scan; core/rules/mamba.h has the order of operations. Columns of a head's matrix do not interact, so they
// are computed 16 at a time.
#include "cpu/kernels/state_rows.h"

namespace sharpi::cpu::SHARPI_ISA {

void scan(const ScanArgs& args, int32_t begin, int32_t end, void* scratch) {
    float* panel = static_cast<float*>(scratch);
    const Vec skip = vset(args.skip);
    for (int32_t column = begin; column < end; column += kLanes) {
        const int lanes = end - column < kLanes ? end - column : kLanes;
        loadPanel(panel, args.from ? args.from + column : nullptr, args.stateDim, args.headDim, lanes);
        for (int64_t t = 0; t < args.rows; t++) {
            const float* b = args.b + t * args.rowStride;
            const Vec decay = vset(args.decay[t * args.stepStride]), step = vset(args.step[t * args.stepStride]);
            const Vec x = some(args.x + t * args.rowStride + column, lanes), input = vmul(x, step);
            const auto update = [&](int32_t n) __attribute__((always_inline)) {
                const Vec line = vfma(vset(b[n]), input, vmul(vload(panel + n * kLanes), decay));
                vstore(panel + n * kLanes, line);
                return line;
            };
            const Vec out = updateAndSum(args.c + t * args.rowStride, args.stateDim, update);
            putSome(args.out + t * args.outStride + column, vfma(skip, x, out), lanes);
        }
        storePanel(panel, args.to + column, args.stateDim, args.headDim, lanes);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
