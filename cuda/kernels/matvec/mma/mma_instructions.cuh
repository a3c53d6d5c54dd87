// The instructions of tensor-core products: fragments, integer products of blocks, copies and loads of shared memory.
#pragma once

#include "kernels/matvec/matvec_kernel.cuh"

namespace sharpi::cuda {

// Shared memory is read and written by address throughout, so that the order of these instructions is the program's.

__device__ __forceinline__ void loadFragments(uint32_t (&out)[4], uint32_t at) {
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at));
#endif
}

// The sums over a block, or over one half of it, as floats that kIntegerBias was added to. Volatile, so that a tile's
// products come before what is done with those of the tile before it, as the program has it.
__device__ __forceinline__ void multiplyBlock(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    int out[4];
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, "
        "%10, %10};"
        : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(kIntegerBiasBits));
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = __int_as_float(out[c]);
#endif
}
__device__ __forceinline__ void multiplyHalf(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t b) {
#if __CUDA_ARCH__ >= 800
    int out[4];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(a0), "r"(a1), "r"(b), "r"(kIntegerBiasBits));
#pragma unroll
    for (int c = 0; c < 4; ++c) sum[c] = __int_as_float(out[c]);
#endif
}

// 1, 2 or 4 words, or 8 as two times 4.
template <int kCount> __device__ __forceinline__ void readShared(uint32_t at, float (&v)[kCount]) {
    if constexpr (kCount == 1) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[0]) : "r"(at));
    if constexpr (kCount == 2) asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at));
    if constexpr (kCount >= 4)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(at));
    if constexpr (kCount == 8)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + 16];"
                     : "=f"(v[4]), "=f"(v[5]), "=f"(v[6]), "=f"(v[7])
                     : "r"(at));
}
// The same in loads of at most two words.
template <int kCount> __device__ __forceinline__ void readPairs(uint32_t at, float (&v)[kCount]) {
    if constexpr (kCount == 1) readShared(at, v);
#pragma unroll
    for (int i = 0; i + 1 < kCount; i += 2) {
        float pair[2];
        readShared(at + 4 * i, pair);
        v[i] = pair[0];
        v[i + 1] = pair[1];
    }
}
template <int kCount> __device__ __forceinline__ void writeShared(uint32_t at, const float (&v)[kCount]) {
    if constexpr (kCount == 1) asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v[0]) : "memory");
    if constexpr (kCount == 2)
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(v[0]), "f"(v[1]) : "memory");
    if constexpr (kCount >= 4)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                     : "memory");
    if constexpr (kCount == 8)
        asm volatile("st.shared.v4.f32 [%0 + 16], {%1, %2, %3, %4};" ::"r"(at), "f"(v[4]), "f"(v[5]), "f"(v[6]),
                     "f"(v[7])
                     : "memory");
}
__device__ __forceinline__ void writeShared4(uint32_t at, const uint32_t* v) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// Copies through the L1 cache: other blocks of the multiprocessor read the same activations.
template <int kBytes> __device__ __forceinline__ void copyAsync(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(kBytes)
                 : "memory");
#endif
}
template <int kThreads> __device__ __forceinline__ void meet(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace sharpi::cuda
