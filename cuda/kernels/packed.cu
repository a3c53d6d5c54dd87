// Packing: a file's rows to planes, once, when a model is loaded; and rows of a packed embedding table to floats.
//
// Packing gives each thread one block of 32: it reads the codes one by one as file_formats.cuh understands them, and
// writes the words that formats.cuh expects. Reads are single bytes (a file's blocks are at odd addresses) whose cache
// lines neighbouring threads share; writes are whole words. That is far from the memory's speed, but a file's way to the
// device takes longer still. Words that a superblock shares are written by its first block.
//
// Embedding gives each thread four elements, so that a warp writes whole lines; the eight threads of a block load the
// same words, which costs nothing extra.
#include "device/launch.cuh"
#include "kernels/file_formats.cuh"
#include "kernels/packed.h"

namespace sharpi::cuda {
namespace {

constexpr int kThreads = 128;

struct Codes {
    uint8_t at[32];
};

__device__ __forceinline__ uint4 nibbleWords(const Codes& c) {
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        word[k] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word[k] |= static_cast<uint32_t>((c.at[4 * k + i] & 15) | (c.at[16 + 4 * k + i] & 15) << 4) << 8 * i;
    }
    return {word[0], word[1], word[2], word[3]};
}

__device__ __forceinline__ uint4 selectorWords(const Codes& c) {
    uint32_t word[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        word[k] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word[k] |= (c.at[4 * k + i] | static_cast<uint32_t>(c.at[16 + 4 * k + i]) << 16) << 4 * i;
    }
    return {word[0], word[1], word[2], word[3]};
}

// Four codes in a word, from element `first` on.
__device__ __forceinline__ uint32_t byteWord(const Codes& c, int first) {
    return c.at[first] | c.at[first + 1] << 8 | c.at[first + 2] << 16 | static_cast<uint32_t>(c.at[first + 3]) << 24;
}

// Bit `bit` of every code, to where insertBits looks for it.
__device__ __forceinline__ uint32_t bitWord(const Codes& c, int bit) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) word |= static_cast<uint32_t>(c.at[i] >> bit & 1) << (8 * (i % 4) + i / 4);
    return word;
}

// Bits `bit`, `bit` + 1 of every code, to where pairsOf looks for them.
__device__ __forceinline__ uint2 pairWords(const Codes& c, int bit) {
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 32; ++i) word[i / 16] |= static_cast<uint32_t>(c.at[i] >> bit & 3) << (8 * (i % 4) + i / 4 % 4 * 2);
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
        store(data, shape.plane[0], n, make_uint4(byteWord(c, 0), byteWord(c, 4), byteWord(c, 8), byteWord(c, 12)));
        store(data, shape.plane[1], n, make_uint4(byteWord(c, 16), byteWord(c, 20), byteWord(c, 24), byteWord(c, 28)));
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

// The four words of Q4_K and Q5_K, see formats.cuh.
template <class Block> __device__ __forceinline__ uint4 sixBitWords(const Block& b) {
    uint32_t high = 0, low[2] = {0, 0};
    for (int j = 0; j < 8; ++j) {
        const uint32_t sub = sixBitsOf(b.scales, j, false), min = sixBitsOf(b.scales, j, true);
        high |= (sub >> 4 | min >> 4 << 2) << 4 * j;
        low[j / 4] |= ((sub & 15) | (min & 15) << 4) << 8 * (j % 4);
    }
    return {halvesWord(b.d, b.dmin), high, low[0], low[1]};
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
    waitForPrevious();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= blocks) return;
    // Rows are whole blocks one after another, in the file as in the planes.
    const Block& block = reinterpret_cast<const Block*>(file)[i / File::kBlocks];
    const int j = static_cast<int>(i % File::kBlocks);
    const int64_t n = firstBlock + i;
    Codes codes;
#pragma unroll
    for (int e = 0; e < 32; ++e) codes.at[e] = static_cast<uint8_t>(File::code(block, j, e));
    packCodes<T>(codes, data, shape, n);
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

}  // namespace sharpi::cuda
