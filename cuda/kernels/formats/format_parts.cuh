// What the formats of packed weights are made of: loads, the unpacking of codes, and the planes of a matrix.
// formats.cuh and grid_formats.cuh have the formats.
#pragma once

#include <cuda_fp16.h>

#include "core/blocks.h"
#include "core/error.h"
#include "kernels/formats/packed_shape.h"

namespace sharpi::cuda {

// Element = d * sub * (code - kOffset) + m * min, as in core/contract.h. sub1 and min1 belong to the second 16
// elements; they equal sub0 and min0 unless kTwoScales. With kTwoFloats, the second 16 elements have m in place of d.
struct Scales {
    float d = 0, m = 0;
    int sub0 = 1, sub1 = 1, min0 = 0, min1 = 0;
};

// --- loads -------------------------------------------------------------------------------------------------------
// A product reads its weights once, so the wide loads leave the L1 cache to the activations. The next lanes read other
// parts of the same superblock's scales, so those loads are cached.

__device__ __forceinline__ uint4 loadWords4(const uint8_t* at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at));
    return v;
}
__device__ __forceinline__ uint2 loadWords2(const uint8_t* at) {
    uint2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
__device__ __forceinline__ uint32_t loadWord(const uint8_t* at) { return __ldg(reinterpret_cast<const uint32_t*>(at)); }
__device__ __forceinline__ uint32_t loadHalf(const uint8_t* at) { return __ldg(reinterpret_cast<const uint16_t*>(at)); }

// The same from shared memory. Loads by address, so that their order is the program's.
struct SharedBytes {
    uint32_t at;
    __device__ __forceinline__ SharedBytes operator+(int bytes) const { return {at + static_cast<uint32_t>(bytes)}; }
};
__device__ __forceinline__ uint4 loadWords4(SharedBytes from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from.at));
    return v;
}
__device__ __forceinline__ uint2 loadWords2(SharedBytes from) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from.at));
    return v;
}
__device__ __forceinline__ uint32_t loadWord(SharedBytes from) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from.at));
    return v;
}
__device__ __forceinline__ uint32_t loadHalf(SharedBytes from) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from.at));
    return v;
}
__device__ __forceinline__ uint32_t loadByte(SharedBytes from) {
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from.at));
    return v;
}

__device__ __forceinline__ float floatOfLowHalf(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word & 0xffffu)));
}
__device__ __forceinline__ float floatOfHighHalf(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)));
}

// --- codes -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void unpackNibbles(const uint4& w, uint32_t (&q)[8]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        q[k] = words[k] & 0x0f0f0f0fu;
        q[4 + k] = (words[k] >> 4) & 0x0f0f0f0fu;
    }
}

// Inserts one bit into each byte of eight words of codes, at position kBit.
template <int kBit> __device__ __forceinline__ void insertBits(uint32_t bits, uint32_t (&q)[8]) {
#pragma unroll
    for (int u = 0; u < 8; ++u) {
        const uint32_t shifted = u <= kBit ? bits << (kBit - u & 31) : bits >> (u - kBit & 31);
        q[u] |= shifted & (0x01010101u << kBit);
    }
}

// The pairs of bits for word v of a half, moved to position kBit of each byte.
template <int kBit> __device__ __forceinline__ uint32_t pairsOf(uint32_t half, int v) {
    const uint32_t shifted = 2 * v <= kBit ? half << (kBit - 2 * v & 31) : half >> (2 * v - kBit & 31);
    return shifted & (0x03030303u << kBit);
}
__device__ __forceinline__ void unpackPairs(const uint2& w, uint32_t (&q)[8]) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        q[v] = pairsOf<0>(w.x, v);
        q[4 + v] = pairsOf<0>(w.y, v);
    }
}

// Byte i of the result is the byte of the eight in a and b that nibble i of the selector names. The selector's upper
// half is ignored, and its nibbles are below 8. __byte_perm would spend an AND to ensure both.
__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t out;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
    return out;
}

struct TableWords {
    uint32_t word[4];
};
__host__ __device__ constexpr TableWords tableWords(const int8_t (&values)[16]) {
    TableWords table{};
    for (int i = 0; i < 16; ++i)
        table.word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(values[i])) << (i % 4 * 8);
    return table;
}

// Looks up four values by the four nibbles in the low half of each selector. A nibble of `low` has the index's three
// low bits. A nibble of `bank` has the byte's own number, plus 4 if the index's fourth bit is set.
__device__ __forceinline__ uint32_t lookUp(const TableWords& table, uint32_t low, uint32_t bank) {
    const uint32_t below = permute(table.word[0], table.word[1], low);
    const uint32_t above = permute(table.word[2], table.word[3], low);
    return permute(below, above, bank);
}
__device__ __forceinline__ void unpackTable(const uint4& w, const TableWords& table, uint32_t (&q)[8]) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint32_t low = words[k] & 0x77777777u;
        const uint32_t bank = ((words[k] >> 1) & 0x44444444u) | 0x32103210u;
        q[k] = lookUp(table, low, bank);
        q[4 + k] = lookUp(table, low >> 16, bank >> 16);
    }
}

// One thread prefetches bytes [begin, end) of packed weights. Matrices begin and end at multiples of 16 bytes.
__device__ __forceinline__ void fetchToCache(const void* begin, const void* end) {
#if __CUDA_ARCH__ >= 900
    const uint64_t from = __cvta_generic_to_global(begin) & ~uint64_t{15},
                   to = (__cvta_generic_to_global(end) + 15) & ~uint64_t{15};
    if (to == from) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(static_cast<uint32_t>(to - from))
                 : "memory");
#endif
}

// --- planes ------------------------------------------------------------------------------------------------------

// The address of a block in each plane of its matrix.
struct Planes {
    const uint8_t* plane[PackedShape::kPlanes];
};

template <DType T> struct Format;

// Bytes of plane p for each block or superblock.
template <DType T> struct PlanesOf {
    static constexpr PlaneSizes kSizes = planeSizes(T);
    template <int p> static constexpr int kBytes = kSizes.plane[p].bytes;
    template <int p> static constexpr int kBlocks = kSizes.plane[p].blocks;

    // The planes of block 0 of the matrix at `data`.
    static __device__ __forceinline__ Planes begin(const uint8_t* data, const PackedShape& shape) {
        return {{data + shape.plane[0], data + shape.plane[1], data + shape.plane[2], data + shape.plane[3]}};
    }
    // The planes of the block that is n blocks behind `begin`, the first of a superblock.
    template <typename Index> static __device__ __forceinline__ Planes at(const Planes& begin, Index n) {
        return {{step<0>(begin, n), step<1>(begin, n), step<2>(begin, n), step<3>(begin, n)}};
    }
    // Bytes from plane p's beginning to block n, or to its superblock.
    template <int p, typename Index> static __device__ __forceinline__ int64_t offset(Index n) {
        constexpr int kShift = kBlocks<p> == 8 ? 3 : kBlocks<p> == 4 ? 2 : 0;
        static_assert(kBlocks<p> == 1 << kShift);
        return static_cast<int64_t>(n >> kShift) * kBytes<p>;
    }
    // One thread prefetches blocks into the L2 cache. The first of them is the first of a superblock.
    static __device__ __forceinline__ void fetchAhead(const Planes& base, uint32_t first, int64_t blocks) {
        const Planes begin = at(base, first), end = at(base, first + blocks);
        if constexpr (kBytes<0> != 0) fetchToCache(begin.plane[0], end.plane[0]);
        if constexpr (kBytes<1> != 0) fetchToCache(begin.plane[1], end.plane[1]);
        if constexpr (kBytes<2> != 0) fetchToCache(begin.plane[2], end.plane[2]);
        if constexpr (kBytes<3> != 0) fetchToCache(begin.plane[3], end.plane[3]);
    }

private:
    template <int p, typename Index>
    static __device__ __forceinline__ const uint8_t* step(const Planes& begin, Index n) {
        return begin.plane[p] + offset<p>(n);
    }
};

// Format<T>::Raw is a block as loaded. loadAt() loads it from its planes, with j = n % 8, and does nothing else, so
// that many loads can be in flight. codes() gives eight words of four bytes: q[0 .. 3] are elements 0 .. 15, q[4 .. 7]
// elements 16 .. 31. Tables are applied, but kOffset is not subtracted. scales() takes the same j.
//
// kSigned: codes are signed bytes (table values, Q8_0). Others are below 64.
template <DType T, bool hasMin, bool twoScales, int offset, bool isSigned, bool twoFloats = false> struct FormatTraits {
    static constexpr bool kHasMin = hasMin;
    static constexpr bool kTwoScales = twoScales;
    static constexpr bool kTwoFloats = twoFloats;
    static constexpr int kOffset = offset;
    static constexpr bool kSigned = isSigned;
    // Loads block n of the matrix at `data`.
    static __device__ __forceinline__ auto load(const uint8_t* data, const PackedShape& shape, int64_t n) {
        return Format<T>::loadAt(PlanesOf<T>::at(PlanesOf<T>::begin(data, shape), n), static_cast<int>(n % 8));
    }
};

}  // namespace sharpi::cuda
