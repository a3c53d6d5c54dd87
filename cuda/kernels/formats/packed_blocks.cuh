// Turns blocks as they lie in a file into the planes of packed.h. All kernels that pack share this code.
//
// A file's blocks have odd sizes and lie at odd addresses. So a thread block first copies its span of the file to
// shared memory in aligned pieces of 16 bytes. Each byte crosses once, in whole lines, and shared memory can be read at
// any address.
//
// Then each thread has one block of 32. It extracts the codes from the file's words, four at a time, one in each byte,
// and arranges them as formats.cuh expects. The first block of a superblock writes the words that its blocks share.
#pragma once

#include "kernels/formats/file_formats.cuh"

namespace sharpi::cuda {

// --- from the file to shared memory ------------------------------------------------------------------------------

// Room for a piece before the first byte, one after the last, and a word that Words reads but does not use.
constexpr int kStagingSlack = 16 + 16 + 4;

// All threads copy `bytes` bytes at `from`. Returns their address in shared memory. The rest of the first and the last
// piece is read too, except what lies at or past `end`.
__device__ __forceinline__ const uint8_t* stage(uint8_t* shared, const uint8_t* from, int bytes, const uint8_t* end) {
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15);
    const uint8_t* first = from - skew;
    const int pieces = (skew + bytes + 15) / 16;
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) {
        const uint8_t* piece = first + 16 * i;
        if (piece + 16 <= end) {
            reinterpret_cast<uint4*>(shared)[i] = *reinterpret_cast<const uint4*>(piece);
        } else {
#pragma unroll 1  // rare: at most one piece of a call
            for (int k = 0; k < 16 && piece + k < end; ++k) shared[16 * i + k] = piece[k];
        }
    }
    __syncthreads();
    return shared + skew;
}

// --- codes ---------------------------------------------------------------------------------------------------------

// The codes of a block of 32, a byte each: byte b of word k is element 4 k + b's.
struct Codes {
    uint32_t word[8];
};

// Reads kCount words from any address in the staged bytes.
template <int kCount> struct Words {
    uint32_t word[kCount];

    __device__ __forceinline__ explicit Words(const void* at) {
        const uint8_t* bytes = static_cast<const uint8_t*>(at);
        const unsigned skew = static_cast<unsigned>(reinterpret_cast<uintptr_t>(bytes) & 3);
        const uint32_t* from = reinterpret_cast<const uint32_t*>(bytes - skew);
        uint32_t low = from[0];
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const uint32_t high = from[k + 1];
            word[k] = __funnelshift_r(low, high, 8 * skew);
            low = high;
        }
    }
};

// The low nibbles of 16 bytes, then the high ones.
__device__ __forceinline__ Codes nibbles(const uint8_t* quants) {
    const Words<4> words(quants);
    Codes c;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        c.word[k] = words.word[k] & 0x0f0f0f0fu;
        c.word[4 + k] = words.word[k] >> 4 & 0x0f0f0f0fu;
    }
    return c;
}

// The bits of `mask` in each of 32 bytes, shifted down.
__device__ __forceinline__ Codes bits(const uint8_t* quants, int shift, uint32_t mask) {
    const Words<8> words(quants);
    Codes c;
#pragma unroll
    for (int k = 0; k < 8; ++k) c.word[k] = words.word[k] >> shift & mask;
    return c;
}

__device__ __forceinline__ Codes joined(Codes low, const Codes& high, int shift) {
#pragma unroll
    for (int k = 0; k < 8; ++k) low.word[k] |= high.word[k] << shift;
    return low;
}

// Moves bit i of a word to element i.
__device__ __forceinline__ Codes spreadBits(const uint8_t* high) {
    const uint32_t word = Words<1>(high).word[0];
    Codes c;
#pragma unroll
    for (int k = 0; k < 8; ++k) c.word[k] = (word >> 4 * k & 15) * 0x00204081u & 0x01010101u;
    return c;
}

// Eight bytes have the low nibbles of eight elements, then the high ones of the next eight; then eight more.
__device__ __forceinline__ Codes nibblesOfHalves(const uint8_t* quants) {
    const Codes c = nibbles(quants);
    return {{c.word[0], c.word[1], c.word[4], c.word[5], c.word[2], c.word[3], c.word[6], c.word[7]}};
}

__device__ __forceinline__ Codes doubled(Codes c) {
#pragma unroll
    for (int k = 0; k < 8; ++k) c.word[k] <<= 1;
    return c;
}

__device__ __forceinline__ Codes digits(const BlockTQ1_0& b, int j) {
    Codes c;
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
        const uint32_t digit = static_cast<uint32_t>(FileFormat<DType::TQ1_0>::code(b, j, i)) << i % 4 * 8;
        c.word[i / 4] = i % 4 == 0 ? digit : c.word[i / 4] | digit;
    }
    return c;
}

// The codes of 32-block j, the same that FileFormat<T>::code gives one by one.
template <DType T> __device__ __forceinline__ Codes codesOf(const typename FileFormat<T>::Block& b, int j) {
    if constexpr (T == DType::Q5_0 || T == DType::Q5_1) {
        return joined(nibbles(b.quants), spreadBits(b.high), 4);
    } else if constexpr (T == DType::Q8_0) {
        return bits(reinterpret_cast<const uint8_t*>(b.quants), 0, 0xffffffffu);
    } else if constexpr (T == DType::Q2_K || T == DType::TQ2_0) {
        return bits(b.quants + j / 4 * 32, j % 4 * 2, 0x03030303u);
    } else if constexpr (T == DType::Q3_K) {
        return joined(bits(b.quants + j / 4 * 32, j % 4 * 2, 0x03030303u), bits(b.high, j, 0x01010101u), 2);
    } else if constexpr (T == DType::Q4_K) {
        return bits(b.quants + j / 2 * 32, j % 2 * 4, 0x0f0f0f0fu);
    } else if constexpr (T == DType::Q5_K) {
        return joined(bits(b.quants + j / 2 * 32, j % 2 * 4, 0x0f0f0f0fu), bits(b.high, j, 0x01010101u), 4);
    } else if constexpr (T == DType::Q6_K) {
        return joined(bits(b.low + j / 4 * 64 + j % 2 * 32, j % 4 / 2 * 4, 0x0f0f0f0fu),
                      bits(b.high + j / 4 * 32, j % 4 * 2, 0x03030303u), 4);
    } else if constexpr (T == DType::NVFP4) {
        return nibblesOfHalves(b.quants + j * 16);
    } else if constexpr (T == DType::Q1_0) {
        return doubled(spreadBits(b.quants + 4 * j));
    } else if constexpr (T == DType::TQ1_0) {
        return digits(b, j);
    } else {
        return nibbles(b.quants + j * 16);
    }
}

// --- planes --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 nibbleWords(const Codes& c) {
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = (c.word[k] & 0x0f0f0f0fu) | (c.word[4 + k] & 0x0f0f0f0fu) << 4;
    return {word[0], word[1], word[2], word[3]};
}

// The low nibbles of a word's bytes, side by side in its low half.
__device__ __forceinline__ uint32_t squeezed(uint32_t word) {
    const uint32_t pairs = (word | word >> 4) & 0x00ff00ffu;
    return (pairs | pairs >> 8) & 0xffffu;
}

__device__ __forceinline__ uint4 selectorWords(const Codes& c) {
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = squeezed(c.word[k]) | squeezed(c.word[4 + k]) << 16;
    return {word[0], word[1], word[2], word[3]};
}

// Moves bit `bit` of every code to where insertBits expects it.
__device__ __forceinline__ uint32_t bitWord(const Codes& c, int bit) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) word |= (c.word[k] >> bit & 0x01010101u) << k;
    return word;
}

// Moves bits `bit` and `bit` + 1 of every code to where pairsOf expects them.
__device__ __forceinline__ uint2 pairWords(const Codes& c, int bit) {
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; ++k) word[k / 4] |= (c.word[k] >> bit & 0x03030303u) << k % 4 * 2;
    return {word[0], word[1]};
}

template <typename Word> __device__ __forceinline__ void store(uint8_t* data, int64_t plane, int64_t index, Word word) {
    reinterpret_cast<Word*>(data + plane)[index] = word;
}

// Two f16 in a word, which floatOfLowHalf and floatOfHighHalf take apart.
__device__ __forceinline__ uint32_t halvesWord(uint16_t low, uint16_t high) {
    return low | static_cast<uint32_t>(high) << 16;
}

template <DType T>
__device__ __forceinline__ void packCodes(const Codes& c, uint8_t* data, const PackedShape& shape, int64_t n) {
    if constexpr (T == DType::Q8_0) {
        store(data, shape.plane[0], n, make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]));
        store(data, shape.plane[1], n, make_uint4(c.word[4], c.word[5], c.word[6], c.word[7]));
    } else if constexpr (T == DType::Q1_0) {
        store(data, shape.plane[0], n, bitWord(c, 1));
    } else if constexpr (T == DType::Q2_K || T == DType::Q3_K || T == DType::TQ2_0) {
        store(data, shape.plane[0], n, pairWords(c, 0));
        if constexpr (T == DType::Q3_K) store(data, shape.plane[1], n, bitWord(c, 2));
    } else if constexpr (T == DType::IQ4_NL || T == DType::IQ4_XS || T == DType::MXFP4 || T == DType::NVFP4) {
        store(data, shape.plane[0], n, selectorWords(c));
    } else {
        store(data, shape.plane[0], n, nibbleWords(c));
        if constexpr (T == DType::Q5_0 || T == DType::Q5_1 || T == DType::Q5_K)
            store(data, shape.plane[1], n, bitWord(c, 4));
        if constexpr (T == DType::Q6_K) store(data, shape.plane[1], n, pairWords(c, 4));
    }
}

// Packs the scales of formats whose blocks have fewer than 256 elements.
template <DType T, class Block>
__device__ __forceinline__ void packBlockScales(const Block& b, int j, uint8_t* data, const PackedShape& shape,
                                                int64_t n) {
    if constexpr (T == DType::Q4_1) {
        store(data, shape.plane[1], n, halvesWord(b.d, b.m));
    } else if constexpr (T == DType::Q5_1) {
        store(data, shape.plane[2], n, halvesWord(b.d, b.m));
    } else if constexpr (T == DType::MXFP4) {
        store(data, shape.plane[1], n, b.e);
    } else if constexpr (T == DType::NVFP4) {
        store(data, shape.plane[1], n, static_cast<uint16_t>(b.d[2 * j] | b.d[2 * j + 1] << 8));
    } else if constexpr (T == DType::Q1_0) {
        if (j == 0) store(data, shape.plane[1], n / 4, static_cast<uint16_t>(b.d));
    } else {
        constexpr int kPlane = T == DType::Q5_0 || T == DType::Q8_0 ? 2 : 1;
        store(data, shape.plane[kPlane], n, static_cast<uint16_t>(b.d));
    }
}

// The four words of Q4_K and Q5_K (see formats.cuh). The file has 12 bytes. The first four have six bits of a scale
// each and the next four six bits of a min each, for the first four blocks. The last four have the low nibbles of the
// other blocks' scales and mins, whose upper two bits stand above those six bits.
template <class Block> __device__ __forceinline__ uint4 sixBitWords(const Block& b) {
    const Words<3> stored(b.scales);
    const uint32_t subs = stored.word[0], mins = stored.word[1];
    const auto upper = [&](int shift) {
        return squeezed((subs >> shift & 0x03030303u) | (mins >> shift & 0x03030303u) << 2);
    };
    return {halvesWord(b.d, b.dmin), upper(4) | upper(6) << 16, (subs & 0x0f0f0f0fu) | (mins & 0x0f0f0f0fu) << 4,
            stored.word[2]};
}

// Three words of scales, then d.
__device__ __forceinline__ void packQ3Scales(const BlockQ3_K& b, uint8_t* data, const PackedShape& shape, int64_t s) {
    uint32_t high = 0, low[2] = {0, 0};
    for (int j = 0; j < 8; ++j) {
        const uint32_t first = FileFormat<DType::Q3_K>::stored(b, 2 * j),
                       second = FileFormat<DType::Q3_K>::stored(b, 2 * j + 1);
        high |= (first >> 4 | second >> 4 << 2) << 4 * j;
        low[j / 4] |= ((first & 15) | (second & 15) << 4) << 8 * (j % 4);
    }
    store(data, shape.plane[2], 3 * s, low[0]);
    store(data, shape.plane[2], 3 * s + 1, low[1]);
    store(data, shape.plane[2], 3 * s + 2, high);
    store(data, shape.plane[3], s, static_cast<uint16_t>(b.d));
}

// Packs the scales of 32-block j of a superblock. The first block also writes what the superblock shares.
template <DType T, class Block>
__device__ __forceinline__ void packSuperScales(const Block& b, int j, uint8_t* data, const PackedShape& shape,
                                                int64_t n) {
    const int64_t s = n / 8;
    if constexpr (T == DType::Q2_K || T == DType::Q6_K) {
        const uint16_t both = static_cast<uint8_t>(b.scales[2 * j]) | static_cast<uint8_t>(b.scales[2 * j + 1]) << 8;
        store(data, shape.plane[T == DType::Q2_K ? 1 : 2], n, both);
    }
    if (j != 0) return;
    if constexpr (T == DType::Q2_K) store(data, shape.plane[2], s, halvesWord(b.d, b.dmin));
    if constexpr (T == DType::Q3_K) packQ3Scales(b, data, shape, s);
    if constexpr (T == DType::Q4_K) store(data, shape.plane[1], s, sixBitWords(b));
    if constexpr (T == DType::Q5_K) store(data, shape.plane[2], s, sixBitWords(b));
    if constexpr (T == DType::Q6_K) store(data, shape.plane[3], s, static_cast<uint16_t>(b.d));
    if constexpr (T == DType::TQ2_0) store(data, shape.plane[1], s, static_cast<uint16_t>(b.d));
    if constexpr (T == DType::IQ4_XS) {
        uint32_t low = 0;
        for (int i = 0; i < 4; ++i) low |= static_cast<uint32_t>(b.scalesLow[i]) << 8 * i;
        store(data, shape.plane[1], s, make_uint2(low, halvesWord(b.d, b.scalesHigh)));
    }
}

// --- grids and ternary digits ------------------------------------------------------------------------------------

// Four sign bytes as IQ2's packed word has them.
__device__ __forceinline__ uint32_t signWordIQ2(uint32_t bytes) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= ((bytes >> i & 0x01010101u) * 0x01020408u >> 24 & 15u) << 4 * i;
    return word;
}
// And as IQ3's: bits 0 .. 3 of byte g go to bit 2 g of the four bytes, bits 4 .. 7 to bit 2 g + 1.
__device__ __forceinline__ uint32_t signWordIQ3(uint32_t bytes) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) word |= (bytes >> i & 1u) << (i % 4 * 8 + i / 8 * 2 + i / 4 % 2);
    return word;
}
// Four times seven bits, a byte each.
__device__ __forceinline__ uint32_t sevensOf(uint32_t word) {
    return (word & 0x7fu) | (word << 1 & 0x7f00u) | (word << 2 & 0x7f0000u) | (word << 3 & 0x7f000000u);
}

__device__ __forceinline__ void packGrid(const BlockIQ2_XXS& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    const Words<2> words(b.quants + 8 * j);
    store(data, shape.plane[0], n,
          make_uint2(words.word[0], signWordIQ2(sevensOf(words.word[1])) | words.word[1] >> 28 << 28));
    if (j == 0) store(data, shape.plane[1], n / 8, static_cast<uint16_t>(b.d));
}
__device__ __forceinline__ void packGrid(const BlockIQ2_XS& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    uint32_t low = 0, sevens = 0, high = 0;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const uint32_t both = b.quants[4 * j + g];
        low |= (both & 255) << 8 * g;
        high |= (both >> 8 & 1) << (28 + g);
        sevens |= both >> 9 << 8 * g;
    }
    store(data, shape.plane[0], n, make_uint2(low, signWordIQ2(sevens) | high));
    store(data, shape.plane[1], n, b.scales[j]);
    if (j == 0) store(data, shape.plane[2], n / 8, static_cast<uint16_t>(b.d));
}
__device__ __forceinline__ void packGrid(const BlockIQ2_S& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    store(data, shape.plane[0], n, make_uint2(wordOf(b.quants + 4 * j), signWordIQ2(wordOf(b.signs + 4 * j))));
    store(data, shape.plane[1], n, static_cast<uint16_t>(b.high[j] | b.scales[j] << 8));
    if (j == 0) store(data, shape.plane[2], n / 8, static_cast<uint16_t>(b.d));
}
__device__ __forceinline__ void packGrid(const BlockIQ3_XXS& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    const uint32_t word = wordOf(b.signs + 4 * j);
    uint32_t scale = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) scale |= (word >> (28 + i) & 1) << (25 + 2 * i);
    store(data, shape.plane[0], n, make_uint2(wordOf(b.quants + 8 * j), wordOf(b.quants + 8 * j + 4)));
    store(data, shape.plane[1], n, signWordIQ3(sevensOf(word)) | scale);
    if (j == 0) store(data, shape.plane[2], n / 8, static_cast<uint16_t>(b.d));
}
__device__ __forceinline__ void packGrid(const BlockIQ3_S& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    store(data, shape.plane[0], n, make_uint2(wordOf(b.quants + 8 * j), wordOf(b.quants + 8 * j + 4)));
    store(data, shape.plane[1], n, signWordIQ3(wordOf(b.signs + 4 * j)));
    store(data, shape.plane[2], n, b.high[j]);
    if (j != 0) return;
    store(data, shape.plane[3], n / 8 * 3, static_cast<uint16_t>(b.d));
    store(data, shape.plane[3], n / 8 * 3 + 1, static_cast<uint16_t>(b.scales[0] | b.scales[1] << 8));
    store(data, shape.plane[3], n / 8 * 3 + 2, static_cast<uint16_t>(b.scales[2] | b.scales[3] << 8));
}
__device__ __forceinline__ void packGrid(const BlockIQ1_S& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    store(data, shape.plane[0], n, wordOf(b.quants + 4 * j));
    store(data, shape.plane[1], n, static_cast<uint16_t>(b.high[j]));
    if (j == 0) store(data, shape.plane[2], n / 8, static_cast<uint16_t>(b.d));
}
__device__ __forceinline__ void packGrid(const BlockIQ1_M& b, int j, uint8_t* data, const PackedShape& shape,
                                         int64_t n) {
    store(data, shape.plane[0], n, wordOf(b.quants + 4 * j));
    store(data, shape.plane[1], n, static_cast<uint16_t>(b.high[2 * j] | b.high[2 * j + 1] << 8));
    if (j == 0)
        store(data, shape.plane[2], n / 8,
              make_uint2(halvesWord(b.scales[0], b.scales[1]), halvesWord(b.scales[2], b.scales[3])));
}

// The byte with five base-3 digits, from the first on, of each of four neighbours.
__device__ __forceinline__ uint32_t digitBytes(const uint32_t (&digit)[5]) {
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        uint32_t number = 0;
#pragma unroll
        for (int n = 0; n < 5; ++n) number = 3 * number + (digit[n] >> 8 * b & 3);
        word |= (number * 256 + 242) / 243 << 8 * b;  // rounded up, as files have it
    }
    return word;
}
__device__ __forceinline__ void packDigits(const BlockTQ1_0& b, int j, uint8_t* data, const PackedShape& shape,
                                           int64_t n) {
    const Codes c = digits(b, j);
    store(data, shape.plane[0], n, digitBytes({c.word[0], c.word[1], c.word[2], c.word[3], c.word[4]}));
    if (j != 0) return;
    store(data, shape.plane[2], n / 8, static_cast<uint16_t>(b.d));
#pragma unroll 1
    for (int word = 0; word < 5; ++word) {
        uint32_t digit[5] = {};
        for (int k = 0; k < 5; ++k) {
            const int place = 5 * word + k;
            if (place < 24) digit[k] = digits(b, place / 3).word[5 + place % 3];
        }
        store(data, shape.plane[1], n / 8 * 5 + word, digitBytes(digit));
    }
}

// Copies floats unchanged: `bytes` bytes, to an address that is a multiple of 16.
__device__ __forceinline__ void copyStaged(const uint8_t* staged, int bytes, uint8_t* to) {
    for (int i = static_cast<int>(threadIdx.x); i < bytes / 16; i += static_cast<int>(blockDim.x)) {
        const Words<4> words(staged + 16 * i);
        reinterpret_cast<uint4*>(to)[i] = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
    }
    for (int i = bytes / 16 * 16 + static_cast<int>(threadIdx.x); i < bytes; i += static_cast<int>(blockDim.x))
        to[i] = staged[i];
}

// --- a thread's block ----------------------------------------------------------------------------------------------

// The calling thread packs its part of `count` blocks of the file, which are staged contiguously. firstBlock: the
// number of their first block of 32 in the matrix.
template <DType T>
__device__ __forceinline__ void packStaged(const uint8_t* staged, int count, uint8_t* data, const PackedShape& shape,
                                           int64_t firstBlock) {
    using File = FileFormat<T>;
    const int mine = static_cast<int>(threadIdx.x) / File::kBlocks, j = static_cast<int>(threadIdx.x) % File::kBlocks;
    if (mine >= count) return;
    const typename File::Block& block = reinterpret_cast<const typename File::Block*>(staged)[mine];
    const int64_t n = firstBlock + threadIdx.x;
    if constexpr (kIsGrid<T>) {
        packGrid(block, j, data, shape, n);
    } else if constexpr (T == DType::TQ1_0) {
        packDigits(block, j, data, shape, n);
    } else {
        packCodes<T>(codesOf<T>(block, j), data, shape, n);
        if constexpr (File::kBlocks < 8) packBlockScales<T>(block, j, data, shape, n);
        else packSuperScales<T>(block, j, data, shape, n);
    }
}

// The same for a type that is known only at run time, and for `bytes` bytes of blocks.
__device__ __forceinline__ void packStaged(DType type, const uint8_t* staged, int bytes, uint8_t* data,
                                           const PackedShape& shape, int64_t firstBlock) {
    const auto pack = [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        packStaged<kType>(staged, bytes / static_cast<int>(sizeof(typename FileFormat<kType>::Block)), data, shape,
                          firstBlock);
    };
    switch (type) {
#define SHARPI_CASE(T) \
    case DType::T: return pack(Tag<DType::T>{});
        SHARPI_QUANTIZED_TYPES(SHARPI_CASE)
#undef SHARPI_CASE
    default: return copyStaged(staged, bytes, data + firstBlock * 32 * (type == DType::F32 ? 4 : 2));
    }
}

}  // namespace sharpi::cuda
