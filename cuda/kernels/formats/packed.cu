// Packs a file's rows into planes (packed_blocks.cuh), once when a model is loaded, and in every pass for weights that
// are streamed. Also turns rows of an embedding table, packed or as in the file, into floats.
//
// When embedding, each thread has four elements, so that a warp writes whole lines. The eight threads of a block load
// the same words, which costs nothing extra.
#include "device/launch.cuh"
#include "kernels/formats/packed.h"
#include "kernels/formats/packed_blocks.cuh"

namespace sharpi::cuda {
namespace {

constexpr int kThreads = 128;

// It does not call allowNext(): later kernels fetch weights before they wait for this one, so none may start while it
// runs.
template <DType T>
__global__ void __launch_bounds__(kThreads)
    packKernel(uint8_t* data, PackedShape shape, int64_t firstBlock, int64_t blocks, const uint8_t* file) {
    using File = FileFormat<T>;
    using Block = typename File::Block;
    constexpr int kBlocks = kThreads / File::kBlocks,
                  kBytes = static_cast<int>(sizeof(Block));  // bytes of the file for each thread block
    __shared__ __align__(16) uint8_t shared[kBlocks * kBytes + kStagingSlack];
    waitForPrevious();
    // Rows are contiguous whole blocks, both in the file and in the planes.
    const int64_t fileBlocks = blocks / File::kBlocks, first = static_cast<int64_t>(blockIdx.x) * kBlocks;
    const int count = static_cast<int>(min(fileBlocks - first, static_cast<int64_t>(kBlocks)));
    const uint8_t* staged = stage(shared, file + first * kBytes, count * kBytes, file + fileBlocks * kBytes);
    packStaged<T>(staged, count, data, shape, firstBlock + static_cast<int64_t>(blockIdx.x) * kThreads);
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
        if constexpr (sizeof(Word) == 4) value = __uint_as_float(row[i]);
        else value = isBf16 ? __uint_as_float(static_cast<uint32_t>(row[i]) << 16) : floatOfLowHalf(row[i]);
        out[blockIdx.x * cols + i] = value;
    }
}

// Bytes of a file's row for a thread block of kFileThreads: as many as one piece for each thread covers, wherever the
// first one begins. A second round of loads would cross PCIe a second time.
constexpr int kFileThreads = 256;
constexpr int kFileBytes = kFileThreads * 16 - 30;

// Block (t, p) takes part p of row t.
template <DType T>
__global__ void __launch_bounds__(kFileThreads) expandKernel(const uint8_t* rows, int64_t cols, float* out) {
    using File = FileFormat<T>;
    using Block = typename File::Block;
    constexpr int kBytes = static_cast<int>(sizeof(Block)), kPart = kFileBytes / kBytes, kElements = File::kBlocks * 32;
    __shared__ __align__(16) uint8_t shared[kFileThreads * 16 + 4];
    allowNext();
    waitForPrevious();
    const int64_t blocks = cols / kElements, first = static_cast<int64_t>(blockIdx.y) * kPart;
    const int count = static_cast<int>(min(blocks - first, static_cast<int64_t>(kPart)));
    const uint8_t* from = rows + (blockIdx.x * blocks + first) * kBytes;
    const Block* staged =
        reinterpret_cast<const Block*>(stage(shared, from, count * kBytes, from + count * kBytes + 15));
    float4* to = reinterpret_cast<float4*>(out + blockIdx.x * cols + first * kElements);
    for (int i = static_cast<int>(threadIdx.x); i < count * kElements / 4; i += kFileThreads) {
        const Block& block = staged[i / (kElements / 4)];
        const int j = i / 8 % File::kBlocks, element = i % 8 * 4;
        const HalfScale scale = halfScale<T>(File::scales(block, j), element / 16);
        float four[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float product =
                __fmul_rn(scale.scale, static_cast<float>(quantOf<T>(File::code(block, j, element + k))));
            four[k] = Format<T>::kHasMin ? __fadd_rn(product, scale.min) : product;
        }
        to[i] = make_float4(four[0], four[1], four[2], four[3]);
    }
}

// The same for floats of kBytes bytes.
template <int kBytes>
__global__ void __launch_bounds__(kFileThreads)
    expandFloatsKernel(const uint8_t* rows, int64_t cols, bool isBf16, float* out) {
    constexpr int kPart = kFileBytes / kBytes;
    __shared__ __align__(16) uint8_t shared[kFileThreads * 16 + 4];
    allowNext();
    waitForPrevious();
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kPart;
    const int count = static_cast<int>(min(cols - first, static_cast<int64_t>(kPart)));
    const uint8_t* from = rows + (blockIdx.x * cols + first) * kBytes;
    const uint8_t* staged = stage(shared, from, count * kBytes, from + count * kBytes + 15);
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kFileThreads) {
        const uint32_t word = Words<1>(staged + i * kBytes).word[0];
        const float half = isBf16 ? __uint_as_float(word << 16) : floatOfLowHalf(word);
        out[blockIdx.x * cols + first + i] = kBytes == 4 ? __uint_as_float(word) : half;
    }
}

void requireInside(const Matrix& to, int64_t rowBegin, int64_t rows) {
    if (rowBegin < 0 || rows < 0 || rows > to.rows - rowBegin)
        throw Error(ErrorKind::Internal, "packing rows " + std::to_string(rowBegin) + " to " +
                                             std::to_string(rowBegin + rows) + " of a matrix of " +
                                             std::to_string(to.rows));
}

}  // namespace

void packRows(Stream& stream, const Matrix& to, int64_t rowBegin, int64_t rows, const uint8_t* file) {
    requireInside(to, rowBegin, rows);
    uint8_t* data = const_cast<uint8_t*>(to.data);
    const PackedShape shape = packedShape(to.type, to.rows, to.cols);
    if (rows == 0 || to.cols == 0) return;
    if (info(to.type).isFloat) {
        const size_t row = rowBytes(to.type, to.cols);
        check(cudaMemcpyAsync(data + rowBegin * row, file, rows * row, cudaMemcpyDeviceToDevice, stream.handle()),
              "packing weights");
        return;
    }
    const int64_t blocksPerRow = to.cols / 32, blocks = rows * blocksPerRow;
    const dim3 grid(static_cast<unsigned>((blocks + kThreads - 1) / kThreads));
    withFormat(to.type, [&](auto tag) {
        launch(stream, packKernel<decltype(tag)::kType>, grid, dim3(kThreads), 0, data, shape, rowBegin * blocksPerRow,
               blocks, file);
    });
}

void embed(Stream& stream, const Matrix& table, const int32_t* index, int64_t count, float* out) {
    const dim3 grid(static_cast<unsigned>(count));
    if (table.type == DType::F32) {
        launch(stream, embedFloatKernel<uint32_t>, grid, dim3(kThreads), 0,
               reinterpret_cast<const uint32_t*>(table.data), table.cols, false, index, out);
    } else if (info(table.type).isFloat) {
        launch(stream, embedFloatKernel<uint16_t>, grid, dim3(kThreads), 0,
               reinterpret_cast<const uint16_t*>(table.data), table.cols, table.type == DType::BF16, index, out);
    } else {
        const PackedShape shape = packedShape(table.type, table.rows, table.cols);
        withFormat(table.type, [&](auto tag) {
            launch(stream, embedKernel<decltype(tag)::kType>, grid, dim3(kThreads), 0, table.data, shape, index, out);
        });
    }
}

void expandRows(Stream& stream, const Matrix& rows, float* out) {
    if (rows.rows == 0 || rows.cols == 0) return;
    const auto grid = [&](int64_t blocks, int64_t bytes) {
        const int64_t part = kFileBytes / bytes;
        return dim3(static_cast<unsigned>(rows.rows), static_cast<unsigned>((blocks + part - 1) / part));
    };
    if (rows.type == DType::F32) {
        launch(stream, expandFloatsKernel<4>, grid(rows.cols, 4), dim3(kFileThreads), 0, rows.data, rows.cols, false,
               out);
    } else if (info(rows.type).isFloat) {
        launch(stream, expandFloatsKernel<2>, grid(rows.cols, 2), dim3(kFileThreads), 0, rows.data, rows.cols,
               rows.type == DType::BF16, out);
    } else {
        withFormat(rows.type, [&](auto tag) {
            using File = FileFormat<decltype(tag)::kType>;
            launch(stream, expandKernel<decltype(tag)::kType>,
                   grid(rows.cols / (File::kBlocks * 32), sizeof(typename File::Block)), dim3(kFileThreads), 0,
                   rows.data, rows.cols, out);
        });
    }
}

}  // namespace sharpi::cuda
