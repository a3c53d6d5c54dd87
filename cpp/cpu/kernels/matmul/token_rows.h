// A token's activations, with what a group's products need of its sums: computed once for each call or tile.
#pragma once

#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/unpack_vector.h"

namespace sharpi::cpu::SHARPI_ISA {

// For a group of eight blocks: the start of each integer sum, which takes the quants' offset off, and the sums of q for
// minima times the scale.
struct alignas(64) TokenSums {
    int32_t start[16];  // see startOf
    float sum[16];      // of the blocks; or of their first halves, then of their second ones
};

// Where the start is for half `half` of block b, if the halves are apart: those of the first halves of four blocks, of
// their second halves, and likewise for the other four.
constexpr int startOf(int b, int half) { return b / 4 * 8 + half * 4 + b % 4; }

struct TokenRow {
    const int8_t* q;
    const float* scale;
    const TokenSums* sums;
};

template <class Block> static void readSums(const int16_t* sums, const float* scale, int64_t groups, TokenSums* to) {
    using F = Format<Block>;
    const __m256i offset = _mm256_set1_epi32(-registerOffset<Block>());
    for (int64_t g = 0; g < groups; ++g) {
        const __m256i s = loadBytes(sums + g * 16), first = evenOf(s), second = oddOf(s);
        const __m256i both = _mm256_add_epi32(first, second);
        const auto storeStart = [&](int at, __m256i v) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(to[g].start + at), _mm256_mullo_epi32(v, offset));
        };
        const auto storeSum = [&](int at, __m256i v) {
            _mm256_store_ps(to[g].sum + at, times(_mm256_loadu_ps(scale + g * 8), v));
        };
        storeStart(0, F::kHalves ? _mm256_permute2x128_si256(first, second, 0x20) : both);
        if constexpr (F::kHalves) storeStart(8, _mm256_permute2x128_si256(first, second, 0x31));
        if constexpr (F::kHasMin) storeSum(0, F::kMins == Sub::PerHalf ? first : both);
        if constexpr (F::kMins == Sub::PerHalf) storeSum(8, second);
    }
}

// sums: room for all groups.
template <class Block> static TokenRow tokenRow(const MatmulArgs& args, int64_t token, TokenSums* sums) {
    const QuantizedRows& x = *args.xQuant;
    const int64_t row = args.rowIndex ? args.rowIndex[token] : token;
    const float* scale = x.scale + row * x.scaleStride;
    readSums<Block>(x.sums + row * x.sumStride, scale, (args.w.cols + 255) / 256, sums);
    return {x.q + row * x.qStride, scale, sums};
}

}  // namespace sharpi::cpu::SHARPI_ISA
