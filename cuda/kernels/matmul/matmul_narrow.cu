// Products of narrow F32 matrices with many rows in halves: those of narrow.cuh, in the contract's order, because tiles
// for tensor cores would keep few multiprocessors busy.
#include "kernels/matmul/matmul_narrow.h"

#include "kernels/matmul/matmul_feed.cuh"
#include "kernels/matmul/mma.cuh"
#include "kernels/matvec/narrow/narrow.cuh"

namespace sharpi::cuda {

namespace {

struct HalfInput {
    static constexpr int kElements = 8;  // of a piece that a thread converts
    struct Fetched {
        uint4 hi, lo;
    };
    HalfRows x;
    __device__ __forceinline__ void fetch(float*, int64_t at, bool valid, Fetched& fetched) const {
        fetched = {};
        if (!valid) return;
        fetched.hi = *reinterpret_cast<const uint4*>(x.hi + at);
        if (x.lo) fetched.lo = *reinterpret_cast<const uint4*>(x.lo + at);
    }
    static __device__ __forceinline__ void put(float* to, const Fetched& fetched) {
        const uint32_t hi[] = {fetched.hi.x, fetched.hi.y, fetched.hi.z, fetched.hi.w},
                       lo[] = {fetched.lo.x, fetched.lo.y, fetched.lo.z, fetched.lo.w};
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            float4 quad;
            const float2 a = sumOf(hi[i], lo[i]), b = sumOf(hi[i + 1], lo[i + 1]);
            quad = {a.x, a.y, b.x, b.y};
            reinterpret_cast<float4*>(to)[i / 2] = quad;
        }
    }
    static __device__ __forceinline__ float2 sumOf(uint32_t hi, uint32_t lo) {
        const float2 a = unpackPair(hi), b = unpackPair(lo);
        return {a.x + b.x, a.y + b.y};
    }
};

}  // namespace

bool matmulNarrow(Stream& stream, const MatmulCall& call) {
    const bool isDense = !call.groups.begin && !call.by.heads;
    // The stride is the whole matrix's rows. A part of a large matrix must not be narrow: it has the bits of the whole.
    if (!isDense || call.stride > kNarrowOutputs || call.shape.cols % HalfInput::kElements != 0) return false;
    Products p;
    Product& product = p.product[p.count++];
    product.data = call.w;
    product.bias = call.bias;
    product.y = call.y;
    product.rows = static_cast<int32_t>(call.shape.rows);
    product.stride = static_cast<int32_t>(call.stride);
    p.rows = static_cast<int32_t>(call.rows);
    p.cols = static_cast<int32_t>(call.shape.cols);
    p.add = call.add;
    launchNarrow(stream, p, HalfInput{call.x});
    return true;
}

}  // namespace sharpi::cuda
