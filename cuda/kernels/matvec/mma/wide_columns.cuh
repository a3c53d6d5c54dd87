// Activations as wide tiles read them: what a tile copies at once lies side by side. QuantizedRows has the blocks of a
// row side by side; a stage of a tile has a few blocks of many rows.
#pragma once

#include "kernels/matvec/mma/mma_layout.cuh"

namespace sharpi::cuda {

// 32 rows of activations ("columns") make a *bundle*. For each block of a bundle there are:
// - codes: the first halves of all columns' blocks, 16 bytes each, then the second halves;
// - ends: their scales; then these times the blocks' sums; then times the sums of the first halves; of the second.
struct WideColumns {
    static constexpr int kBundle = kWideColumns, kCodeBytes = kBundle * 32, kEndFloats = kBundle * 4;
    uint8_t* codes;
    float* ends;

    // Over QuantizedRows::wide, which has room for `bundles` bundles of rows with `units` blocks.
    static __host__ __device__ __forceinline__ WideColumns over(uint8_t* wide, int64_t bundles, int64_t units) {
        return {wide, reinterpret_cast<float*>(wide + bundles * units * kCodeBytes)};
    }
    static __host__ __device__ __forceinline__ int64_t bundles(int64_t rows) {
        return (rows + kWideRows - 1) / kWideRows * (kWideRows / kBundle);
    }
    // A type's fields of ends: how many are copied, and where the sums begin that it reads.
    template <DType D>
    static constexpr int kFields = MmaNumbers<D>::kColumnFields == 3 ? 4 : MmaNumbers<D>::kColumnFields;
    template <DType D> static constexpr int kSums = MmaNumbers<D>::kColumnFields == 3 ? 2 : 1;
};

}  // namespace sharpi::cuda
