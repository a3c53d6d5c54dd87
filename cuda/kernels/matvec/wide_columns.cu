// See wide_columns.cuh.
#include "kernels/matvec/mma/wide_columns.cuh"
#include "kernels/matvec/wide_columns.h"

namespace sharpi::cuda {

constexpr int kWideWarps = 4;

// A warp has a block of a bundle, a lane one of its columns. Columns past the last row repeat it.
__global__ void __launch_bounds__(32 * kWideWarps) arrangeColumnsKernel(QuantizedRows x, int rows, int units) {
    allowNext();
    waitForPrevious();
    const int unit = static_cast<int>(blockIdx.x) * kWideWarps + static_cast<int>(threadIdx.x) / 32,
              column = threadIdx.x % 32;
    if (unit >= units) return;
    const int64_t bundle = blockIdx.y, row = min(blockIdx.y * 32 + column, rows - 1), at = bundle * units + unit;
    const WideColumns to = WideColumns::over(x.wide, gridDim.y, units);
    const auto* const from = reinterpret_cast<const uint4*>(x.q) + row * 2 * units + unit;
    auto* const codes = reinterpret_cast<uint4*>(to.codes + at * WideColumns::kCodeBytes) + column;
    codes[0] = from[0];
    codes[WideColumns::kBundle] = from[units];
    const float scale = x.scale[row * units + unit];
    const int sums = x.sums[row * units + unit];
    float* const ends = to.ends + at * WideColumns::kEndFloats + column;
    const auto times = [&](int first, int second) {
        return scaled(scale, __int_as_float(addPair(sums, first, second, kIntegerBiasBits)));
    };
    ends[0] = scale;
    ends[WideColumns::kBundle] = times(1, 1);
    ends[2 * WideColumns::kBundle] = times(1, 0);
    ends[3 * WideColumns::kBundle] = times(0, 1);
}

void arrangeColumns(Stream& stream, const QuantizedRows& x, int rows, int64_t cols) {
    const int units = static_cast<int>(cols / kContractBlock);
    const dim3 grid(static_cast<unsigned>((units + kWideWarps - 1) / kWideWarps),
                    static_cast<unsigned>(WideColumns::bundles(rows)));
    launch(stream, arrangeColumnsKernel, grid, dim3(32 * kWideWarps), 0, x, rows, units);
}

}  // namespace sharpi::cuda
