// Sends rows to the CPU in the middle of a step and receives its answers (crossing.h has the protocol). The answer for
// one row has about ten kilobytes, so only the latency of the round trip counts (crossing.cuh).
#include "kernels/rows/crossing.cuh"

#include <algorithm>

namespace sharpi::cuda {
namespace {

constexpr int kThreads = kCrossingThreads, kAtOnce = kCrossingAtOnce;
constexpr int kMaxBlocks = 16;

// There is one block, so that a barrier is enough before the flag is set.
__global__ void __launch_bounds__(kThreads)
    sendKernel(const __grid_constant__ Crossing c, int total, uint32_t* sent, uint32_t ticket) {
    allowNext();
    waitForPrevious();
    copyPieces<false>(c, total);
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();
    storeFlag(sent, ticket);
}

__global__ void __launch_bounds__(kThreads)
    receiveKernel(const __grid_constant__ Crossing c, int total, const uint32_t* returned, uint32_t ticket) {
    waitForPrevious();
    waitForTicket(returned, ticket);
    allowNext();  // not earlier: see crossing.cuh
    copyPieces<true>(c, total);
}

// x [rows][stride] (+)= from [rows][pieces] + bias in pieces of kFloats floats. x and bias begin at the first column.
template <int kFloats>
__global__ void __launch_bounds__(kThreads)
    receiveProductKernel(const float* from, int total, int pieces, const uint32_t* returned, uint32_t ticket, float* x,
                         int64_t stride, const float* bias, bool adds) {
    waitForPrevious();
    waitForTicket(returned, ticket);
    allowNext();  // not earlier: see crossing.cuh
    const int apart = static_cast<int>(gridDim.x * blockDim.x);
    for (int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); first < total; first += kAtOnce * apart) {
        uint4 value[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int n = first + k * apart;
            if (n < total)
                value[k] = loadPiece<true>(reinterpret_cast<const uint8_t*>(from + static_cast<int64_t>(n) * kFloats),
                                           kFloats == 4);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const int n = first + k * apart, t = n / pieces;
            if (n >= total) continue;
            const int64_t column = static_cast<int64_t>(n - t * pieces) * kFloats;
            float* to = x + t * stride + column;
            const uint32_t words[4] = {value[k].x, value[k].y, value[k].z, value[k].w};
            float old[kFloats], sum[kFloats];
            if constexpr (kFloats == 4) {
                const float4 quad = adds ? *reinterpret_cast<const float4*>(to) : float4{};
                old[0] = quad.x, old[1] = quad.y, old[2] = quad.z, old[3] = quad.w;
            } else {
                old[0] = adds ? *to : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < kFloats; ++i) {
                const float product = __uint_as_float(words[i]);
                const float y = bias ? __fadd_rn(product, bias[column + i]) : product;
                sum[i] = adds ? __fadd_rn(old[i], y) : y;
            }
            if constexpr (kFloats == 4) *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            else *to = sum[0];
        }
    }
}

// --- what is copied -------------------------------------------------------------------------------------------------

void addForm(Crossing& c, int64_t rows, Form form, int64_t pieces) {
    const int64_t end = c.pieces() + rows * pieces;
    if (end >= int64_t{1} << 30)
        throw Error(ErrorKind::Internal, "a crossing of " + std::to_string(rows) + " rows is too large");
    if (pieces == 0 || rows == 0) return;
    form.pieces = static_cast<int32_t>(pieces);
    form.end = static_cast<int32_t>(end);
    c.form[c.count++] = form;
}

// Adds `words` words of each row. deviceRow and hostRow are the words from one row to the next.
void addWords(Crossing& c, int64_t rows, int64_t words, void* device, int64_t deviceRow, void* host, int64_t hostRow) {
    Form form;
    form.wide = isWhole(device, deviceRow * 4) && isWhole(host, hostRow * 4) && words % 4 == 0;
    const int bytes = form.wide ? 16 : 4;
    form.device = {static_cast<uint8_t*>(device), deviceRow * 4, bytes, 2 * bytes};
    form.host = {static_cast<uint8_t*>(host), hostRow * 4, bytes, 2 * bytes};
    addForm(c, rows, form, form.wide ? words / 4 : words);
}

// Adds blocks [first, first + blocks) of the `all` blocks in a row.
void addQuantized(Crossing& c, int64_t rows, const QuantizedRows& device, const HostRows& host, int64_t first,
                  int64_t blocks, int64_t all) {
    const int64_t stride = host.qStride, words = stride / 32;
    Form form;
    form.wide = true;
    form.device = {reinterpret_cast<uint8_t*>(device.q + first * 16), all * 32, all * 16, 16};
    form.host = {reinterpret_cast<uint8_t*>(host.q + first * 32), stride, 16, 32};
    if (!isWhole(form.device.data, 0) || !isWhole(form.host.data, stride) || stride < all * 32)
        throw Error(ErrorKind::Internal, "quantized rows that are not aligned cannot cross");
    addForm(c, rows, form, 2 * blocks);
    addWords(c, rows, blocks, device.scale + first, all, host.scale + first, words);
    addWords(c, rows, blocks, device.sums + first, all, host.sums + 2 * first,
             words);  // two int16 of the host are one word of the device
}

}  // namespace

Crossing crossingOf(const RowOutputs& device, int64_t rows, int64_t begin, int64_t end, const HostRows& host) {
    const int64_t cols = host.cols;
    const bool quantized = device.quantized.q && host.q;
    if (rows < 0 || begin < 0 || begin > end || end > cols || begin % 32 != 0 || (end % 32 != 0 && end != cols) ||
        (quantized && cols % 32 != 0))
        throw Error(ErrorKind::Internal, "columns " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                             std::to_string(cols) + " cannot cross");
    Crossing c;
    if (quantized) addQuantized(c, rows, device.quantized, host, begin / 32, (end - begin) / 32, cols / 32);
    if (device.floats && host.floats)
        addWords(c, rows, end - begin, device.floats + begin, cols, host.floats + begin, cols);
    return c;
}

namespace {

dim3 blocksFor(int64_t pieces) {
    constexpr int64_t kShare = kThreads * kAtOnce;
    return dim3(
        static_cast<unsigned>(std::min<int64_t>(kMaxBlocks, std::max<int64_t>((pieces + kShare - 1) / kShare, 1))));
}

}  // namespace

void sendRows(Stream& stream, const RowOutputs& from, int64_t rows, int64_t begin, int64_t end, const HostRows& to,
              uint32_t* sent, uint32_t ticket) {
    const Crossing c = crossingOf(from, rows, begin, end, to);
    launch(stream, sendKernel, dim3(1), crossingThreads(c.pieces()), 0, c, c.pieces(), sent, ticket);
}

void receiveRows(Stream& stream, const HostRows& from, int64_t rows, int64_t begin, int64_t end,
                 const uint32_t* returned, uint32_t ticket, const RowOutputs& to) {
    const Crossing c = crossingOf(to, rows, begin, end, from);
    launch(stream, receiveKernel, blocksFor(c.pieces()), crossingThreads(c.pieces()), 0, c, c.pieces(), returned,
           ticket);
}

void receiveProduct(Stream& stream, const float* from, int64_t rows, int64_t begin, int64_t count,
                    const uint32_t* returned, uint32_t ticket, float* x, int64_t cols, const float* bias, bool adds) {
    if (rows < 0 || begin < 0 || count < 0 || count > cols - begin || rows * count >= int64_t{1} << 30)
        throw Error(ErrorKind::Internal, "adding " + std::to_string(count) + " columns from " + std::to_string(begin) +
                                             " on to rows of " + std::to_string(cols));
    float* to = x + begin;
    const bool wide = isWhole(from, count * 4) && isWhole(to, cols * 4);
    const int64_t pieces = wide ? count / 4 : count, total = rows * pieces;
    launch(stream, wide ? receiveProductKernel<4> : receiveProductKernel<1>, blocksFor(total), crossingThreads(total),
           0, from, static_cast<int>(total), static_cast<int>(std::max<int64_t>(pieces, 1)), returned, ticket, to, cols,
           bias ? bias + begin : nullptr, adds);
}

}  // namespace sharpi::cuda
