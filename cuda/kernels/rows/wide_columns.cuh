// Device code that writes WideColumns.
#pragma once

#include "core/contract.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Block `block` of a row's column. blocks: those of a row. The offsets fit in 32 bits: there are up to kMostWideRows.
struct WideBlock {
    const WideColumns& to;
    uint32_t column, at;

    __device__ __forceinline__ WideBlock(const WideColumns& to, int64_t row, int64_t blocks, int64_t block) : to(to) {
        const uint32_t all = static_cast<uint32_t>(row) + static_cast<uint32_t>(to.first);
        column = all % WideColumns::kBundle;
        at = all / WideColumns::kBundle * static_cast<uint32_t>(blocks) + static_cast<uint32_t>(block);
    }
    // The 16 bytes of a half.
    __device__ __forceinline__ uint8_t* half(uint32_t which) const {
        constexpr uint32_t kHalf = kContractBlock / 2;
        return to.codes + (at * WideColumns::kCodeBytes + which * (WideColumns::kBundle * kHalf) + column * kHalf);
    }
    // Stores field `which` of the ends. sums: as QuantizedRows has them.
    __device__ __forceinline__ void storeEnd(uint32_t which, float scale, int32_t sums) const {
        const int32_t first = static_cast<int16_t>(sums & 0xffff), second = sums >> 16;
        const int32_t sum = which == 1 ? first + second : which == 2 ? first : second;
        to.ends[at * WideColumns::kEndFloats + which * WideColumns::kBundle + column] =
            which == 0 ? scale : __fmul_rn(scale, static_cast<float>(sum));  // the sum is exact
    }
};

}  // namespace sharpi::cuda
