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

// x [rows][stride] += from [rows][pieces] in pieces of kFloats floats.
template <int kFloats>
__global__ void __launch_bounds__(kThreads)
    receiveAddKernel(const float* from, int total, int pieces, const uint32_t* returned, uint32_t ticket, float* x,
                     int64_t stride) {
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
            float* to = x + t * stride + static_cast<int64_t>(n - t * pieces) * kFloats;
            if constexpr (kFloats == 4) {
                float4 sum = *reinterpret_cast<const float4*>(to);
                sum.x = __fadd_rn(sum.x, __uint_as_float(value[k].x));
                sum.y = __fadd_rn(sum.y, __uint_as_float(value[k].y));
                sum.z = __fadd_rn(sum.z, __uint_as_float(value[k].z));
                sum.w = __fadd_rn(sum.w, __uint_as_float(value[k].w));
                *reinterpret_cast<float4*>(to) = sum;
            } else {
                *to = __fadd_rn(*to, __uint_as_float(value[k].x));
            }
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

void receiveAdd(Stream& stream, const float* from, int64_t rows, int64_t begin, int64_t count, const uint32_t* returned,
                uint32_t ticket, float* x, int64_t cols) {
    if (rows < 0 || begin < 0 || count < 0 || count > cols - begin || rows * count >= int64_t{1} << 30)
        throw Error(ErrorKind::Internal, "adding " + std::to_string(count) + " columns from " + std::to_string(begin) +
                                             " on to rows of " + std::to_string(cols));
    float* to = x + begin;
    const bool wide = isWhole(from, count * 4) && isWhole(to, cols * 4);
    const int64_t pieces = wide ? count / 4 : count, total = rows * pieces;
    launch(stream, wide ? receiveAddKernel<4> : receiveAddKernel<1>, blocksFor(total), crossingThreads(total), 0, from,
           static_cast<int>(total), static_cast<int>(std::max<int64_t>(pieces, 1)), returned, ticket, to, cols);
}

}  // namespace sharpi::cuda
