// See WideColumns.
#include "kernels/rows/wide_columns.cuh"

#include "device/launch.cuh"
#include "kernels/rows/wide_columns.h"

namespace sharpi::cuda {

constexpr int kWideWarps = 4;

// A warp has a block of a bundle, a lane one of its columns.
__global__ void __launch_bounds__(32 * kWideWarps) arrangeColumnsKernel(QuantizedRows x, int rows, int units) {
    allowNext();
    waitForPrevious();
    const int unit = static_cast<int>(blockIdx.x) * kWideWarps + static_cast<int>(threadIdx.x) / 32,
              row = static_cast<int>(blockIdx.y) * WideColumns::kBundle + static_cast<int>(threadIdx.x) % 32;
    if (unit >= units || row >= rows) return;
    const auto* const from = reinterpret_cast<const uint4*>(x.q) + int64_t{row} * 2 * units + unit;
    const int64_t at = int64_t{row} * units + unit;
    const WideBlock to(x.wide, row, units, unit);
    *reinterpret_cast<uint4*>(to.half(0)) = from[0];
    *reinterpret_cast<uint4*>(to.half(1)) = from[units];
    const float scale = x.scale[at];
    const int32_t sums = x.sums[at];
#pragma unroll
    for (int field = 0; field < WideColumns::kFields; ++field) to.storeEnd(field, scale, sums);
}

void arrangeColumns(Stream& stream, QuantizedRows& x, int rows, int64_t cols) {
    if (x.wide.written && x.wide.first != 0)
        throw Error(ErrorKind::Internal, "a product reads columns that begin within others");
    if (x.wide.written) return;
    x.wide.first = 0;
    x.wide.written = true;
    const int units = static_cast<int>(cols / kContractBlock);
    const dim3 grid(static_cast<unsigned>((units + kWideWarps - 1) / kWideWarps),
                    static_cast<unsigned>((rows + WideColumns::kBundle - 1) / WideColumns::kBundle));
    launch(stream, arrangeColumnsKernel, grid, dim3(32 * kWideWarps), 0, x, rows, units);
}

}  // namespace sharpi::cuda
