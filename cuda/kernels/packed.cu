// Packing: a file's rows to planes, when a model is loaded and again and again where weights are streamed; and rows of an
// embedding table, packed or as in the file, to floats.
//
// A file's blocks are at odd addresses and of odd sizes. So a thread block first copies its span of the file to shared
// memory in aligned pieces of 16 bytes: each byte crosses once, in whole lines, and what is read from shared memory then may
// lie as it likes.
//
// Packing gives each thread one block of 32: it takes the codes out of the file's words four at a time, a byte each, and puts
// them together as formats.cuh expects them. Words that a superblock shares are written by its first block.
//
// Embedding gives each thread four elements, so that a warp writes whole lines; the eight threads of a block load the
// same words, which costs nothing extra.
#include "device/launch.cuh"
#include "kernels/file_formats.cuh"
#include "kernels/packed.h"

namespace sharpi::cuda {
namespace {

constexpr int kThreads = 128;

// --- from the file to shared memory ------------------------------------------------------------------------------

// A piece before the first byte and one after the last, and a word that wordAt() reads and does not use.
constexpr int kStagingSlack = 16 + 16 + 4;

// Copies `bytes` bytes at `from` by all threads and tells where they are. What lies around them in their first and last piece
// is read as well, but for what is at or past `end`.
__device__ __forceinline__ const uint8_t* stage(uint8_t* shared, const uint8_t* from, int bytes, const uint8_t* end) {
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(from) & 15);
    const uint8_t* first = from - skew;
    const int pieces = (skew + bytes + 15) / 16;
    for (int i = static_cast<int>(threadIdx.x); i < pieces; i += static_cast<int>(blockDim.x)) {
        const uint8_t* piece = first + 16 * i;
        if (piece + 16 <= end) {
            reinterpret_cast<uint4*>(shared)[i] = *reinterpret_cast<const uint4*>(piece);
        } else {
#pragma unroll 1  // rare: one piece of a whole call
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

// kCount words from any address in staged bytes.
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

// Of 16 bytes: the low nibbles, then the high ones.
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

// Of 32 bytes: of each the bits that `mask` has, shifted down.
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

// Bit i of a word to element i.
__device__ __forceinline__ Codes spreadBits(const uint8_t* high) {
    const uint32_t word = Words<1>(high).word[0];
    Codes c;
#pragma unroll
    for (int k = 0; k < 8; ++k) c.word[k] = (word >> 4 * k & 15) * 0x00204081u & 0x01010101u;
    return c;
}

// The codes of 32-block j, as FileFormat<T>::code has them one by one.
template <DType T> __device__ __forceinline__ Codes codesOf(const typename FileFormat<T>::Block& b, int j) {
    if constexpr (T == DType::Q5_0 || T == DType::Q5_1) {
        return joined(nibbles(b.quants), spreadBits(b.high), 4);
    } else if constexpr (T == DType::Q8_0) {
        return bits(reinterpret_cast<const uint8_t*>(b.quants), 0, 0xffffffffu);
    } else if constexpr (T == DType::Q2_K) {
        return bits(b.quants + j / 4 * 32, j % 4 * 2, 0x03030303u);
    } else if constexpr (T == DType::Q3_K) {
        return joined(bits(b.quants + j / 4 * 32, j % 4 * 2, 0x03030303u), bits(b.high, j, 0x01010101u), 2);
    } else if constexpr (T == DType::Q4_K) {
        return bits(b.quants + j / 2 * 32, j % 2 * 4, 0x0f0f0f0fu);
    } else if constexpr (T == DType::Q5_K) {
        return joined(bits(b.quants + j / 2 * 32, j % 2 * 4, 0x0f0f0f0fu), bits(b.high, j, 0x01010101u), 4);
    } else if constexpr (T == DType::Q6_K) {
        return joined(bits(b.low + j / 4 * 64 + j % 2 * 32, j % 4 / 2 * 4, 0x0f0f0f0fu), bits(b.high + j / 4 * 32, j % 4 * 2, 0x03030303u), 4);
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

// Bit `bit` of every code, to where insertBits looks for it.
__device__ __forceinline__ uint32_t bitWord(const Codes& c, int bit) {
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) word |= (c.word[k] >> bit & 0x01010101u) << k;
    return word;
}

// Bits `bit`, `bit` + 1 of every code, to where pairsOf looks for them.
__device__ __forceinline__ uint2 pairWords(const Codes& c, int bit) {
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; ++k) word[k / 4] |= (c.word[k] >> bit & 0x03030303u) << k % 4 * 2;
    return {word[0], word[1]};
}

template <typename Word> __device__ __forceinline__ void store(uint8_t* data, int64_t plane, int64_t index, Word word) {
    reinterpret_cast<Word*>(data + plane)[index] = word;
}

// Two f16 in a word, as floatOfLowHalf and floatOfHighHalf take them apart.
__device__ __forceinline__ uint32_t halvesWord(uint16_t low, uint16_t high) { return low | static_cast<uint32_t>(high) << 16; }

template <DType T>
__device__ __forceinline__ void packCodes(const Codes& c, uint8_t* data, const PackedShape& shape, int64_t n) {
    if constexpr (T == DType::Q8_0) {
        store(data, shape.plane[0], n, make_uint4(c.word[0], c.word[1], c.word[2], c.word[3]));
        store(data, shape.plane[1], n, make_uint4(c.word[4], c.word[5], c.word[6], c.word[7]));
    } else if constexpr (T == DType::Q2_K || T == DType::Q3_K) {
        store(data, shape.plane[0], n, pairWords(c, 0));
        if constexpr (T == DType::Q3_K) store(data, shape.plane[1], n, bitWord(c, 2));
    } else if constexpr (T == DType::IQ4_NL || T == DType::IQ4_XS || T == DType::MXFP4) {
        store(data, shape.plane[0], n, selectorWords(c));
    } else {
        store(data, shape.plane[0], n, nibbleWords(c));
        if constexpr (T == DType::Q5_0 || T == DType::Q5_1 || T == DType::Q5_K) store(data, shape.plane[1], n, bitWord(c, 4));
        if constexpr (T == DType::Q6_K) store(data, shape.plane[1], n, pairWords(c, 4));
    }
}

// Scales of formats whose blocks have 32 elements.
template <DType T, class Block>
__device__ __forceinline__ void packBlockScales(const Block& b, uint8_t* data, const PackedShape& shape, int64_t n) {
    if constexpr (T == DType::Q4_1) {
        store(data, shape.plane[1], n, halvesWord(b.d, b.m));
    } else if constexpr (T == DType::Q5_1) {
        store(data, shape.plane[2], n, halvesWord(b.d, b.m));
    } else if constexpr (T == DType::MXFP4) {
        store(data, shape.plane[1], n, b.e);
    } else {
        constexpr int kPlane = T == DType::Q5_0 || T == DType::Q8_0 ? 2 : 1;
        store(data, shape.plane[kPlane], n, static_cast<uint16_t>(b.d));
    }
}

// The four words of Q4_K and Q5_K, see formats.cuh. The file has 12 bytes: of four scales, then of their mins, six bits in
// each byte; then, in nibbles, the low bits of the other four of both, whose upper two stand above the six bits.
template <class Block> __device__ __forceinline__ uint4 sixBitWords(const Block& b) {
    const Words<3> stored(b.scales);
    const uint32_t subs = stored.word[0], mins = stored.word[1];
    const auto upper = [&](int shift) { return squeezed((subs >> shift & 0x03030303u) | (mins >> shift & 0x03030303u) << 2); };
    return {halvesWord(b.d, b.dmin), upper(4) | upper(6) << 16, (subs & 0x0f0f0f0fu) | (mins & 0x0f0f0f0fu) << 4, stored.word[2]};
}

// Three words of scales, then d.
__device__ __forceinline__ void packQ3Scales(const BlockQ3_K& b, uint8_t* data, const PackedShape& shape, int64_t s) {
    uint32_t high = 0, low[2] = {0, 0};
    for (int j = 0; j < 8; ++j) {
        const uint32_t first = FileFormat<DType::Q3_K>::stored(b, 2 * j), second = FileFormat<DType::Q3_K>::stored(b, 2 * j + 1);
        high |= (first >> 4 | second >> 4 << 2) << 4 * j;
        low[j / 4] |= ((first & 15) | (second & 15) << 4) << 8 * (j % 4);
    }
    store(data, shape.plane[2], 3 * s, low[0]);
    store(data, shape.plane[2], 3 * s + 1, low[1]);
    store(data, shape.plane[2], 3 * s + 2, high);
    store(data, shape.plane[3], s, static_cast<uint16_t>(b.d));
}

// Scales of 32-block j of a superblock; what the superblock shares is written with its first.
template <DType T, class Block>
__device__ __forceinline__ void packSuperScales(const Block& b, int j, uint8_t* data, const PackedShape& shape, int64_t n) {
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
    if constexpr (T == DType::IQ4_XS) {
        uint32_t low = 0;
        for (int i = 0; i < 4; ++i) low |= static_cast<uint32_t>(b.scalesLow[i]) << 8 * i;
        store(data, shape.plane[1], s, make_uint2(low, halvesWord(b.d, b.scalesHigh)));
    }
}

// No allowNext(): kernels after this one fetch weights before they wait for it, so none may start while it runs.
template <DType T>
__global__ void __launch_bounds__(kThreads)
    packKernel(uint8_t* data, PackedShape shape, int64_t firstBlock, int64_t blocks, const uint8_t* file) {
    using File = FileFormat<T>;
    using Block = typename File::Block;
    constexpr int kBlocks = kThreads / File::kBlocks, kBytes = static_cast<int>(sizeof(Block));  // the file's, of a thread block
    __shared__ __align__(16) uint8_t shared[kBlocks * kBytes + kStagingSlack];
    waitForPrevious();
    // Rows are whole blocks one after another, in the file as in the planes.
    const int64_t fileBlocks = blocks / File::kBlocks, first = static_cast<int64_t>(blockIdx.x) * kBlocks;
    const int count = static_cast<int>(min(fileBlocks - first, static_cast<int64_t>(kBlocks)));
    const uint8_t* staged = stage(shared, file + first * kBytes, count * kBytes, file + fileBlocks * kBytes);
    const int mine = static_cast<int>(threadIdx.x) / File::kBlocks, j = static_cast<int>(threadIdx.x) % File::kBlocks;
    if (mine >= count) return;
    const Block& block = reinterpret_cast<const Block*>(staged)[mine];
    const int64_t n = firstBlock + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    packCodes<T>(codesOf<T>(block, j), data, shape, n);
    if constexpr (File::kBlocks == 1)
        packBlockScales<T>(block, data, shape, n);
    else
        packSuperScales<T>(block, j, data, shape, n);
    __threadfence();
}

template <DType T>
__global__ void __launch_bounds__(kThreads)
    embedKernel(const uint8_t* data, PackedShape shape, const int32_t* index, float* out) {
    allowNext();
    waitForPrevious();
    const int64_t blocksPerRow = shape.cols / 32;
    const int64_t first = index[blockIdx.x] * blocksPerRow;
    float4* to = reinterpret_cast<float4*>(out + blockIdx.x * shape.cols);
    for (int64_t i = threadIdx.x; i < shape.cols / 4; i += kThreads) {
        const int64_t n = first + i / 8;
        const int u = static_cast<int>(i % 8);
        const typename Format<T>::Raw raw = Format<T>::load(data, shape, n);
        uint32_t q[8], mine = 0;
        Format<T>::codes(raw, q);
#pragma unroll
        for (int k = 0; k < 8; ++k) mine = k == u ? q[k] : mine;
        const Scales scales = Format<T>::scales(raw, static_cast<int>(n & 7));
        float four[4];
        expandWord<T>(mine, halfScale<T>(scales, u / 4), four);
        to[i] = make_float4(four[0], four[1], four[2], four[3]);
    }
}

template <typename Word>
__global__ void __launch_bounds__(kThreads)
    embedFloatKernel(const Word* table, int64_t cols, bool isBf16, const int32_t* index, float* out) {
    allowNext();
    waitForPrevious();
    const Word* row = table + index[blockIdx.x] * cols;
    for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
        float value;
        if constexpr (sizeof(Word) == 4)
            value = __uint_as_float(row[i]);
        else
            value = isBf16 ? __uint_as_float(static_cast<uint32_t>(row[i]) << 16) : floatOfLowHalf(row[i]);
        out[blockIdx.x * cols + i] = value;
    }
}

// Bytes of a file's row that a thread block of kFileThreads takes: what a piece for each of them covers wherever it begins, since
// a second round of loads would be a second way across PCIe.
constexpr int kFileThreads = 256;
constexpr int kFileBytes = kFileThreads * 16 - 30;

// Block (t, p): part p of row index[t].
template <DType T>
__global__ void __launch_bounds__(kFileThreads) embedFileKernel(const uint8_t* table, int64_t cols, const int32_t* index, float* out) {
    using File = FileFormat<T>;
    using Block = typename File::Block;
    constexpr int kBytes = static_cast<int>(sizeof(Block)), kPart = kFileBytes / kBytes, kElements = File::kBlocks * 32;
    __shared__ __align__(16) uint8_t shared[kFileThreads * 16 + 4];
    allowNext();
    waitForPrevious();
    const int64_t blocks = cols / kElements, first = static_cast<int64_t>(blockIdx.y) * kPart;
    const int count = static_cast<int>(min(blocks - first, static_cast<int64_t>(kPart)));
    const uint8_t* from = table + (index[blockIdx.x] * blocks + first) * kBytes;
    const Block* staged = reinterpret_cast<const Block*>(stage(shared, from, count * kBytes, from + count * kBytes + 15));
    float4* to = reinterpret_cast<float4*>(out + blockIdx.x * cols + first * kElements);
    for (int i = static_cast<int>(threadIdx.x); i < count * kElements / 4; i += kFileThreads) {
        const Block& block = staged[i / (kElements / 4)];
        const int j = i / 8 % File::kBlocks, element = i % 8 * 4;
        const HalfScale scale = halfScale<T>(File::scales(block, j), element / 16);
        float four[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float product = __fmul_rn(scale.scale, static_cast<float>(quantOf<T>(File::code(block, j, element + k))));
            four[k] = Format<T>::kHasMin ? __fadd_rn(product, scale.min) : product;
        }
        to[i] = make_float4(four[0], four[1], four[2], four[3]);
    }
}

// The same for floats of kBytes bytes.
template <int kBytes>
__global__ void __launch_bounds__(kFileThreads)
    embedFileFloatKernel(const uint8_t* table, int64_t cols, bool isBf16, const int32_t* index, float* out) {
    constexpr int kPart = kFileBytes / kBytes;
    __shared__ __align__(16) uint8_t shared[kFileThreads * 16 + 4];
    allowNext();
    waitForPrevious();
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kPart;
    const int count = static_cast<int>(min(cols - first, static_cast<int64_t>(kPart)));
    const uint8_t* from = table + (index[blockIdx.x] * cols + first) * kBytes;
    const uint8_t* staged = stage(shared, from, count * kBytes, from + count * kBytes + 15);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kFileThreads) {
        const uint32_t word = Words<1>(staged + i * kBytes).word[0];
        const float half = isBf16 ? __uint_as_float(word << 16) : floatOfLowHalf(word);
        out[blockIdx.x * cols + first + i] = kBytes == 4 ? __uint_as_float(word) : half;
    }
}

void requireInside(const Matrix& to, int64_t rowBegin, int64_t rows) {
    if (rowBegin < 0 || rows < 0 || rows > to.rows - rowBegin)
        throw Error(ErrorKind::Internal, "packing rows " + std::to_string(rowBegin) + " to " + std::to_string(rowBegin + rows) +
                                             " of a matrix of " + std::to_string(to.rows));
}

}  // namespace

void packRows(Stream& stream, const Matrix& to, int64_t rowBegin, int64_t rows, const uint8_t* file) {
    requireInside(to, rowBegin, rows);
    uint8_t* data = const_cast<uint8_t*>(to.data);
    const PackedShape shape = packedShape(to.type, to.rows, to.cols);
    if (rows == 0 || to.cols == 0) return;
    if (info(to.type).isFloat) {
        const size_t row = rowBytes(to.type, to.cols);
        check(cudaMemcpyAsync(data + rowBegin * row, file, rows * row, cudaMemcpyDeviceToDevice, stream.handle()), "packing weights");
        return;
    }
    const int64_t blocksPerRow = to.cols / 32, blocks = rows * blocksPerRow;
    const dim3 grid(static_cast<unsigned>((blocks + kThreads - 1) / kThreads));
    withFormat(to.type, [&](auto tag) {
        launch(stream, packKernel<decltype(tag)::kType>, grid, dim3(kThreads), 0, data, shape, rowBegin * blocksPerRow, blocks,
               file);
    });
}

void embed(Stream& stream, const Matrix& table, const int32_t* index, int64_t count, float* out) {
    const dim3 grid(static_cast<unsigned>(count));
    if (table.type == DType::F32) {
        launch(stream, embedFloatKernel<uint32_t>, grid, dim3(kThreads), 0, reinterpret_cast<const uint32_t*>(table.data),
               table.cols, false, index, out);
    } else if (info(table.type).isFloat) {
        launch(stream, embedFloatKernel<uint16_t>, grid, dim3(kThreads), 0, reinterpret_cast<const uint16_t*>(table.data),
               table.cols, table.type == DType::BF16, index, out);
    } else {
        const PackedShape shape = packedShape(table.type, table.rows, table.cols);
        withFormat(table.type, [&](auto tag) {
            launch(stream, embedKernel<decltype(tag)::kType>, grid, dim3(kThreads), 0, table.data, shape, index, out);
        });
    }
}

void embedFromFile(Stream& stream, const Matrix& table, const int32_t* index, int64_t count, float* out) {
    if (count == 0 || table.cols == 0) return;
    const auto grid = [&](int64_t blocks, int64_t bytes) {
        const int64_t part = kFileBytes / bytes;
        return dim3(static_cast<unsigned>(count), static_cast<unsigned>((blocks + part - 1) / part));
    };
    if (table.type == DType::F32) {
        launch(stream, embedFileFloatKernel<4>, grid(table.cols, 4), dim3(kFileThreads), 0, table.data, table.cols, false, index, out);
    } else if (info(table.type).isFloat) {
        launch(stream, embedFileFloatKernel<2>, grid(table.cols, 2), dim3(kFileThreads), 0, table.data, table.cols,
               table.type == DType::BF16, index, out);
    } else {
        withFormat(table.type, [&](auto tag) {
            using File = FileFormat<decltype(tag)::kType>;
            launch(stream, embedFileKernel<decltype(tag)::kType>, grid(table.cols / (File::kBlocks * 32), sizeof(typename File::Block)),
                   dim3(kFileThreads), 0, table.data, table.cols, index, out);
        });
    }
}

}  // namespace sharpi::cuda
