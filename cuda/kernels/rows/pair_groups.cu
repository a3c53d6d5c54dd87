// Groups the pairs of a step by expert.
//
// A stable counting sort in one block, since a step has few pairs and a second launch would take longer than the work.
// Each warp counts its contiguous part of the pairs by expert. The counts become places: after those of earlier warps
// and, within the warp, after those of lower lanes. No atomic decides a place, so the order is fixed.
#include "kernels/rows/pair_groups.h"

#include <string>

#include "kernels/rows/device_rows.cuh"

namespace sharpi::cuda {

namespace {

constexpr int kMostWarps = 8;
constexpr size_t kMostShared = 48 * 1024;

// The totals [elements], the first groups [elements + 1], and for each warp its places [elements].
size_t sharedBytes(int warps, int32_t elements) {
    return (static_cast<size_t>(warps + 2) * static_cast<size_t>(elements) + 1) * sizeof(int32_t);
}

// Turns counts into the sums of those before them. One warp calls it; counts[elements] becomes the sum of all.
__device__ __forceinline__ void sumBefore(int32_t* counts, int32_t elements, int lane) {
    int32_t before = 0;
    for (int32_t first = 0; first < elements; first += 32) {
        const int32_t e = first + lane, count = e < elements ? counts[e] : 0;
        int32_t through = count;
#pragma unroll
        for (int width = 1; width < 32; width *= 2) {
            const int32_t lower = __shfl_up_sync(kWholeWarp, through, width);
            if (lane >= width) through += lower;
        }
        if (e < elements) counts[e] = before + through - count;
        before += __shfl_sync(kWholeWarp, through, 31);
    }
    if (lane == 0) counts[elements] = before;
}

// Writes all of a group but its pairs.
__device__ __forceinline__ void describe(PairGroup& group, int32_t element, int32_t count) {
    group.element = element;
    group.count = count;
}

__global__ void groupPairsKernel(const int32_t* element, int32_t pairs, int32_t elements, PairGroup* to, int32_t groups,
                                 int32_t most) {
    extern __shared__ __align__(16) int32_t sharedPlaces[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int32_t* total = sharedPlaces;          // [elements]
    int32_t* begin = total + elements;      // [elements + 1]: an element's first group
    int32_t* place = begin + elements + 1;  // [warps][elements]: a warp's counts, then its next places
    int32_t* mine = place + warp * elements;
    allowNext();
    for (int32_t i = threadIdx.x; i < warps * elements; i += blockDim.x) place[i] = 0;
    waitForPrevious();
    __syncthreads();

    const int32_t part = (pairs + 32 * warps - 1) / (32 * warps) * 32;
    const int32_t first = warp * part, end = min(first + part, pairs);
    for (int32_t p = first + lane; p < end; p += 32) {
        const int32_t e = element[p];
        if (e >= 0) atomicAdd(&mine[e], 1);
    }
    __syncthreads();
    for (int32_t e = threadIdx.x; e < elements; e += blockDim.x) {
        int32_t before = 0;
        for (int w = 0; w < warps; ++w) {
            const int32_t count = place[w * elements + e];
            place[w * elements + e] = before;
            before += count;
        }
        total[e] = before;
        begin[e] = (before + most - 1) / most;
    }
    __syncthreads();
    if (warp == 0) sumBefore(begin, elements, lane);
    __syncthreads();

    for (int32_t e = threadIdx.x; e < elements; e += blockDim.x) {
        for (int32_t g = begin[e], left = total[e]; left > 0; ++g, left -= most) describe(to[g], e, min(left, most));
    }
    for (int32_t g = begin[elements] + threadIdx.x; g < groups; g += blockDim.x) describe(to[g], -1, 0);
    for (int32_t at = first; at < end; at += 32) {
        const int32_t p = at + lane, e = p < end ? element[p] : -1;
        const unsigned equals = __match_any_sync(kWholeWarp, e), earlier = equals & ((1u << lane) - 1u);
        const int32_t rank = e >= 0 ? mine[e] + __popc(earlier) : 0;
        __syncwarp();
        if (e >= 0) {
            if (earlier == 0) mine[e] += __popc(equals);
            to[begin[e] + rank / most].pair[rank % most] = p;
        }
        __syncwarp();
    }
}

}  // namespace

PairGroups groupPairs(Stream& stream, const int32_t* element, int64_t pairs, int32_t elements, int32_t distinct,
                      void* to) {
    int warps = kMostWarps;
    while (warps > 1 && sharedBytes(warps, elements) > kMostShared) warps /= 2;
    const size_t shared = sharedBytes(warps, elements);
    if (pairs < 0 || pairs > int64_t{1} << 30 || elements < 0 || distinct < 0 || shared > kMostShared)
        throw Error(ErrorKind::Internal,
                    std::to_string(pairs) + " pairs of " + std::to_string(elements) + " experts cannot be grouped");
    const int most = pairs >= int64_t{kSmallPairGroup} * distinct ? kPairGroup : kSmallPairGroup;
    const int64_t groups = maxPairGroups(pairs, distinct, most);
    if (groups == 0) return {};
    launch(stream, groupPairsKernel, dim3(1), dim3(static_cast<unsigned>(warps * 32)), shared, element,
           static_cast<int32_t>(pairs), elements, static_cast<PairGroup*>(to), static_cast<int32_t>(groups), most);
    return {static_cast<PairGroup*>(to), groups, most};
}

}  // namespace sharpi::cuda
