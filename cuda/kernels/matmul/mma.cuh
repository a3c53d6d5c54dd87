// The tensor cores' instructions as functions: a 16 x 8 x 16 product of bf16 (of f16 before compute capability 8.0,
// which lacks bf16 units), the loads that feed it from shared memory, and the copies that fill shared memory.
//
// Tiles lie in shared memory as rows of kTileDepth elements (128 bytes). tileOffset() swizzles the eight 16-byte chunks
// of a row so that the chunks of one column in eight rows are in different banks, since ldmatrix reads those at once.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/copies.cuh"

namespace sharpi::cuda {

// Elements along k in one step of the pipeline: two blocks of a quantized format.
constexpr int kTileDepth = 64;
constexpr int kTileRowBytes = kTileDepth * 2;
constexpr int kRowChunks = kTileRowBytes / 16;

__device__ __forceinline__ uint32_t tileOffset(int row, int chunk) {
    return static_cast<uint32_t>(row * kTileRowBytes + ((chunk ^ (row & 7)) << 4));
}

// Two floats rounded to the operands' type, `first` in the low half.
__device__ __forceinline__ uint32_t packPair(float first, float second) {
#if __CUDA_ARCH__ >= 800
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
#endif
}

// The two values that packPair rounded to.
__device__ __forceinline__ float2 unpackPair(uint32_t pair) {
#if __CUDA_ARCH__ >= 800
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
#else
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
#endif
}

__device__ __forceinline__ void storeShared(uint32_t address, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Loads four 8 x 8 matrices. Lanes 8 i .. 8 i + 7 have the addresses of matrix i's rows.
__device__ __forceinline__ void loadMatrices(uint32_t (&out)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// c += a b; a: 16 x 16 by rows, b: 16 x 8 by columns.
__device__ __forceinline__ void multiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Copies 16 aligned bytes from global to shared memory, or stores zeros if not `valid`. Complete after a waitForCopies.
__device__ __forceinline__ void copyChunk(uint32_t to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
#else
    storeShared(to, valid ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0});
#endif
}

}  // namespace sharpi::cuda
