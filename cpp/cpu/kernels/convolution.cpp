// The short convolution of recurrent layers, and the SiLU after it. One order of operations, so its bits depend neither
// on how rows are cut into batches nor on the instruction set. Each operation rounds to nearest even; fma rounds once;
// exp is exp.h's. For each channel c of row t, over the inputs x[t - width + 1] .. x[t] (zeros before the sequence):
//   y = fma(weight[w][c], x[t - width + 1 + w][c], y) for w ascending, from bias[c], or from +0 if there is no bias
//   y / (1 + exp(0 - y))
#include "cpu/kernels/exp.h"
#include "cpu/kernels/state_rows.h"

namespace sharpi::cpu::SHARPI_ISA {

void convSilu(const ConvArgs& args, int64_t begin, int64_t end) {
    const int32_t past = args.width - 1;
    Vec window[kMaxConvWidth];
    for (int64_t c = begin; c < end; c += kLanes) {
        const int lanes = static_cast<int>(end - c < kLanes ? end - c : kLanes);
        const Vec bias = args.bias ? some(args.bias + c, lanes) : vzero();
        for (int32_t w = 0; w < past; w++)
            window[w] = args.from ? some(args.from + w * args.channels + c, lanes) : vzero();
        for (int64_t t = 0; t < args.rows; t++) {
            float* x = args.x + t * args.channels + c;
            window[past] = some(x, lanes);
            Vec y = bias;
            for (int32_t w = 0; w <= past; w++)
                y = vfma(some(args.weight + w * args.channels + c, lanes), window[w], y);
            putSome(x, vdiv(y, vadd(vset(1.0f), vexp(vsub(vzero(), y)))), lanes);
            for (int32_t w = 0; w < past; w++) window[w] = window[w + 1];
        }
        for (int32_t w = 0; w < past; w++) putSome(args.to + w * args.channels + c, window[w], lanes);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
