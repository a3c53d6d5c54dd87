// What kernels that exchange data with the CPU in the middle of a step share: the counters, the common memory, and
// copies in both directions.
//
// Every form is copied in pieces of 16 bytes, or of 4 if the addresses are not aligned. Each thread has a few pieces in
// flight at once. Loads of words that the CPU has just written bypass the L1 cache.
//
// A kernel that waits for the CPU must not let its successor start before the wait is over. Successors that start early
// would occupy the multiprocessors for milliseconds, while another stream's packing kernels need them for the weights
// that the step uses next.
#pragma once

#include "device/launch.cuh"
#include "kernels/rows/crossing.h"

namespace sharpi::cuda {

constexpr int kCrossingThreads = 512;
constexpr int kCrossingAtOnce = 4;  // pieces that a thread loads together

// The pieces of a form on one side. Piece i of row t is at data + t * row + i / 2 * pair + i % 2 * odd, all in bytes.
// With that, both sides go through the halves of blocks in the CPU's order, although the device keeps the halves apart.
struct Side {
    uint8_t* data = nullptr;
    int64_t row = 0, odd = 0;
    int32_t pair = 0;

    __device__ __forceinline__ uint8_t* at(int t, int i) const {
        return data + t * row + static_cast<int64_t>(i / 2) * pair + i % 2 * odd;
    }
};

struct Form {
    Side device, host;
    int32_t pieces = 0;  // pieces of a row
    int32_t end = 0;     // pieces of this form and of those before it, in all rows
    bool wide = false;   // pieces have 16 bytes
};

// The forms that one call copies.
struct Crossing {
    static constexpr int kForms = 4;
    Form form[kForms];
    int32_t count = 0;
    int32_t pieces() const { return count ? form[count - 1].end : 0; }
};

// Columns [begin, end) of `rows` rows in the forms that both sides have. Throws Error(Internal) if they cannot cross.
Crossing crossingOf(const RowOutputs& device, int64_t rows, int64_t begin, int64_t end, const HostRows& host);

// Whether rows that are `bytes` apart all begin at multiples of 16 bytes.
inline bool isWhole(const void* at, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(at) % 16 == 0 && bytes % 16 == 0;
}

// As many threads as this number of pieces needs, in whole warps.
inline dim3 crossingThreads(int64_t pieces) {
    const int64_t warps = (pieces + 31) / 32;
    return dim3(static_cast<unsigned>(32 * (warps < 1                       ? 1
                                            : warps < kCrossingThreads / 32 ? warps
                                                                            : kCrossingThreads / 32)));
}

// --- the two processors' common memory ------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t loadFlag(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
// A thread that sees the value also sees what the block's threads wrote before the last barrier.
__device__ __forceinline__ void storeFlag(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 loadFresh16(const void* at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint32_t loadFresh4(const void* at) {
    uint32_t v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

// One thread polls, since every poll crosses PCIe, and the block goes on together. Returns false if the crossing was
// aborted.
__device__ __forceinline__ bool waitForTicket(const uint32_t* returned, uint32_t ticket) {
    uint32_t value = 0;
    if (threadIdx.x == 0)
        while ((value = loadFlag(returned)) < ticket)
            __nanosleep(50);  // kCrossingAborted is at least as large as any ticket
    return !__syncthreads_or(value == kCrossingAborted);
}

template <bool kReceive> __device__ __forceinline__ uint4 loadPiece(const uint8_t* from, bool wide) {
    if (wide) return kReceive ? loadFresh16(from) : *reinterpret_cast<const uint4*>(from);
    return {kReceive ? loadFresh4(from) : *reinterpret_cast<const uint32_t*>(from), 0, 0, 0};
}

template <bool kReceive> __device__ __forceinline__ void copyPieces(const Crossing& c, int total) {
    const int apart = static_cast<int>(gridDim.x * blockDim.x);
    for (int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); first < total;
         first += kCrossingAtOnce * apart) {
        uint4 value[kCrossingAtOnce];
        uint8_t* to[kCrossingAtOnce];
        bool wide[kCrossingAtOnce];
#pragma unroll
        for (int k = 0; k < kCrossingAtOnce; ++k) {
            const int n = first + k * apart;
            to[k] = nullptr;
            if (n >= total) continue;
            int which = 0;
            while (n >= c.form[which].end) ++which;
            const Form& form = c.form[which];
            const int at = n - (which ? c.form[which - 1].end : 0), t = at / form.pieces, i = at - t * form.pieces;
            wide[k] = form.wide;
            to[k] = kReceive ? form.device.at(t, i) : form.host.at(t, i);
            value[k] = loadPiece<kReceive>(kReceive ? form.host.at(t, i) : form.device.at(t, i), wide[k]);
        }
#pragma unroll
        for (int k = 0; k < kCrossingAtOnce; ++k) {
            if (!to[k]) continue;
            if (wide[k]) *reinterpret_cast<uint4*>(to[k]) = value[k];
            else *reinterpret_cast<uint32_t*>(to[k]) = value[k].x;
        }
    }
}

}  // namespace sharpi::cuda
