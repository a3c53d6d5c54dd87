// A token's activations as products read them, prepared once for each call or tile.
#pragma once

#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/unpack_vector.h"

namespace sharpi::cpu::SHARPI_ISA {

// A group of eight blocks: also the start of each integer sum, which takes the quants' offset off, and the sums of q
// for minima times the scale.
struct alignas(64) TokenGroup {
    int8_t q[256];
    int32_t start[16];  // see startOf
    float sum[16];      // of the blocks; or of their first halves, then of their second ones
    float scale[8];
};
static_assert(sizeof(TokenGroup) == 448, "as matmulScratchBytes counts");

// Where the start is for half `half` of block b, if the halves are apart: those of the first halves of four blocks, of
// their second halves, and likewise for the other four.
constexpr int startOf(int b, int half) { return b / 4 * 8 + half * 4 + b % 4; }

template <class Block> SHARPI_INLINE void readGroup(const int8_t* q, const float* scale, __m256i sums, TokenGroup& to) {
    using F = Format<Block>;
    const __m256i offset = _mm256_set1_epi32(-registerOffset<Block>());
    const __m256i first = evenOf(sums), second = oddOf(sums), both = _mm256_add_epi32(first, second);
    const __m256 scales = _mm256_loadu_ps(scale);
    const auto storeStart = [&](int at, __m256i v) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to.start + at), _mm256_mullo_epi32(v, offset));
    };
    for (int i = 0; i < 256; i += 32) _mm256_store_si256(reinterpret_cast<__m256i*>(to.q + i), loadBytes(q + i));
    _mm256_store_ps(to.scale, scales);
    storeStart(0, F::kHalves ? _mm256_permute2x128_si256(first, second, 0x20) : both);
    if constexpr (F::kHalves) storeStart(8, _mm256_permute2x128_si256(first, second, 0x31));
    if constexpr (F::kHasMin) _mm256_store_ps(to.sum, times(scales, F::kMins == Sub::PerHalf ? first : both));
    if constexpr (F::kMins == Sub::PerHalf) _mm256_store_ps(to.sum + 8, times(scales, second));
}

// Input `token` of a call. Group g goes to to[g * stride].
template <class Block> static void readToken(const MatmulArgs& args, int64_t token, TokenGroup* to, int64_t stride) {
    const QuantizedRows& x = *args.xQuant;
    const int64_t row = args.rowIndex ? args.rowIndex[token] : token;
    for (int64_t g = 0; g * 256 < args.w.cols; ++g)
        readGroup<Block>(x.q + row * x.qStride + g * 256, x.scale + row * x.scaleStride + g * 8,
                         loadBytes(x.sums + row * x.sumStride + g * 16), to[g * stride]);
}

}  // namespace sharpi::cpu::SHARPI_ISA
