// The steps through a layer of experts of which some are not in VRAM (expert_cache.h lists them).
//
// Every token passes sendExperts and combineAnswers, hit or miss, so they do as little as possible if nothing was
// missed.
//
// fetchExperts reads the file's pages across PCIe, which needs a few hundred kilobytes in flight at all times. The
// experts are cut into units of about 5 KB, and the thread blocks take turns. A thread loads its pieces of a unit
// together, into registers, while the unit before is packed. So every multiprocessor always has loads in flight.
//
// Kernels that fetch never let their successor start early, since they write weights (packed.cu). combineAnswers does
// so when the CPU has answered (crossing.cuh).
#include "kernels/experts/expert_cache.h"

#include <algorithm>

#include "core/portable.h"
#include "kernels/formats/packed_blocks.cuh"
#include "kernels/rows/crossing.cuh"

namespace sharpi::cuda {
namespace {

// --- telling the CPU ---------------------------------------------------------------------------------------------

// There is one block, so that a barrier is enough before the flag is set.
__global__ void __launch_bounds__(kCrossingThreads)
    sendExpertsKernel(const __grid_constant__ Crossing rows, int pieces, int pairs, const int32_t* chosen,
                      const int32_t* table, const int32_t* predicted, int32_t* slot, DeviceOrders* orders,
                      const float* weight, HostChoices host, uint32_t* sent, uint32_t ticket) {
    allowNext();
    waitForPrevious();
    int missed = 0;
    for (int first = 0; first < pairs; first += static_cast<int>(blockDim.x)) {
        const int p = first + static_cast<int>(threadIdx.x);
        int32_t found = 0;
        if (p < pairs) {
            const int32_t expert = chosen[p];
            if (predicted) host.predicted[p] = predicted[p];
            if (weight) host.weight[p] = weight[p];
            found = table[expert];
            slot[p] = found;
            host.chosen[p] = expert;
            host.slot[p] = found;
        }
        missed += __syncthreads_count(found < 0);
    }
    if (threadIdx.x == 0) {
        orders->missed = static_cast<uint32_t>(missed);
        orders->ready = 0;
    }
    if (missed) copyPieces<false>(rows, pieces);
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence_system();
    storeFlag(sent, ticket);
}

constexpr int kLookUpThreads = 256;

__global__ void __launch_bounds__(kLookUpThreads)
    lookUpKernel(const int32_t* chosen, int pairs, ExpertIndex which, int32_t* element) {
    allowNext();
    waitForPrevious();
    const int p = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (p >= pairs) return;
    const int32_t place = which.index ? which.index[chosen[p]] : chosen[p];
    element[p] = place >= which.first && place < which.end ? place - which.first : -1;
}

// --- fetching experts --------------------------------------------------------------------------------------------

constexpr int kFetchThreads = 256;
constexpr int kFetchBlocks = 2;   // resident blocks of a multiprocessor
constexpr int kFloatUnit = 8192;  // bytes of a unit of floats; a unit of quantized blocks has one block for each thread
constexpr int kPiecesAtOnce = 3;  // all pieces that a thread has of a unit
constexpr int kLine = 128;
constexpr int kUnitBytes = kFetchThreads * 34;  // the largest: Q8_0's
static_assert(kFloatUnit <= kUnitBytes && kUnitBytes + kLine + 15 <= kPiecesAtOnce * kFetchThreads * 16);

// One of the three matrices of every expert.
struct FetchMatrix {
    DType type = DType::F32;
    PackedShape shape;
    uint8_t* slots = nullptr;
    int64_t stride = 0;      // from slot to slot
    int64_t bytes = 0;       // of an expert in the file
    int32_t unitBytes = 0;   // in the file
    int32_t unitBlocks = 0;  // of 32 elements each
    int32_t units = 0;
};
struct FetchMatrices {
    FetchMatrix matrix[3];  // gate, up, down
    int32_t units = 0;
};

// A part of a matrix of an expert.
struct FetchUnit {
    const FetchMatrix* matrix;
    const uint8_t* from;  // in the file
    int bytes;
    uint8_t* to;         // the packed matrix
    int64_t firstBlock;  // the number of its first block in that matrix
};

__device__ __forceinline__ FetchUnit unitOf(const FetchMatrices& all, const ExpertFetch* fetch, int number) {
    const ExpertFetch& expert = fetch[number / all.units];
    int unit = number % all.units, which = 0;
    while (unit >= all.matrix[which].units) unit -= all.matrix[which++].units;
    const FetchMatrix& m = all.matrix[which];
    const int64_t begin = static_cast<int64_t>(unit) * m.unitBytes;
    const uint8_t* file = which == 0 ? expert.gate : which == 1 ? expert.up : expert.down;
    return {&m, file + begin, static_cast<int>(min(m.bytes - begin, static_cast<int64_t>(m.unitBytes))),
            m.slots + expert.slot * m.stride, static_cast<int64_t>(unit) * m.unitBlocks};
}

// Volatile, so that the load is issued here and not where its value is needed.
__device__ __forceinline__ uint4 loadFar(const uint8_t* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

// A thread's pieces of a unit. Pieces are counted from the beginning of the line in which the unit begins, so that
// warps read whole lines. Pieces before the unit's first byte and past its last are not read.
struct Pieces {
    uint4 value[kPiecesAtOnce];

    static __device__ __forceinline__ int skew(const FetchUnit& unit) {
        return static_cast<int>(reinterpret_cast<uintptr_t>(unit.from) % kLine);
    }
    static __device__ __forceinline__ int index(int k) { return k * kFetchThreads + static_cast<int>(threadIdx.x); }
    static __device__ __forceinline__ bool has(const FetchUnit& unit, int k) {
        return index(k) >= skew(unit) / 16 && index(k) < (skew(unit) + unit.bytes + 15) / 16;
    }
    __device__ __forceinline__ void load(const FetchUnit& unit) {
#pragma unroll
        for (int k = 0; k < kPiecesAtOnce; ++k)
            if (has(unit, k)) value[k] = loadFar(unit.from - skew(unit) + 16 * index(k));
    }
    // Returns the address of the unit in shared memory.
    __device__ __forceinline__ const uint8_t* store(const FetchUnit& unit, uint8_t* shared) const {
#pragma unroll
        for (int k = 0; k < kPiecesAtOnce; ++k)
            if (has(unit, k)) reinterpret_cast<uint4*>(shared)[index(k)] = value[k];
        return shared + skew(unit);
    }
};

// Fetches the block's share of all units of `count` experts. fetch: in shared memory.
__device__ __forceinline__ void fetchUnits(const FetchMatrices& all, const ExpertFetch* fetch, int count) {
    __shared__ __align__(16) uint8_t shared[kLine + kUnitBytes + 16 + 4];
    const int total = count * all.units;
    int number = static_cast<int>(blockIdx.x);
    if (number >= total) return;
    FetchUnit unit = unitOf(all, fetch, number);
    Pieces pieces;
    pieces.load(unit);
    while (true) {
        const FetchUnit now = unit;
        const uint8_t* staged = pieces.store(now, shared);
        __syncthreads();
        number += static_cast<int>(gridDim.x);
        if (number < total) {
            unit = unitOf(all, fetch, number);
            pieces.load(unit);
        }
        packStaged(now.matrix->type, staged, now.bytes, now.to, now.matrix->shape, now.firstBlock);
        if (number >= total) return;
        __syncthreads();
    }
}

constexpr int kOrderWords = static_cast<int>(sizeof(ExpertOrders) / 4);
static_assert(sizeof(ExpertOrders) % 4 == 0);

__device__ __forceinline__ int bounded(int32_t count, int most) { return min(max(count, 0), most); }

// Like loadFlag and storeFlag, but between threads of the device.
__device__ __forceinline__ uint32_t loadReady(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ void storeReady(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Block 0's part: waits for the CPU and passes its orders on; no orders if the CPU aborted.
__device__ __forceinline__ void receiveOrders(const ExpertOrders* host, const uint32_t* instructed, uint32_t ticket,
                                              DeviceOrders* orders, uint32_t* words, int pairs, const int32_t* chosen,
                                              int32_t* slot) {
    const bool given = waitForTicket(instructed, ticket);
    for (int i = static_cast<int>(threadIdx.x); i < kOrderWords; i += kFetchThreads) {
        words[i] = given ? loadFresh4(reinterpret_cast<const uint32_t*>(host) + i) : 0;
        reinterpret_cast<uint32_t*>(&orders->orders)[i] = words[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        storeReady(&orders->ready, 1);
    }
    const ExpertOrders& mine = *reinterpret_cast<const ExpertOrders*>(words);
    for (int p = static_cast<int>(threadIdx.x); p < pairs; p += kFetchThreads) {
        if (slot[p] >= 0) continue;
        for (int i = 0; i < bounded(mine.demanded, kMaxExpertFetches); ++i)
            if (mine.fetch[i].expert == chosen[p]) slot[p] = mine.fetch[i].slot;
    }
}

// Reads the orders that are already in the device's memory.
__device__ __forceinline__ void readOrders(const DeviceOrders* orders, uint32_t* words) {
    for (int i = static_cast<int>(threadIdx.x); i < kOrderWords; i += kFetchThreads)
        words[i] = loadFresh4(reinterpret_cast<const uint32_t*>(&orders->orders) + i);
    __syncthreads();
}

// It does not call allowNext() (see the top of the file). If nothing was missed, it ends at once anyway.
__global__ void __launch_bounds__(kFetchThreads, kFetchBlocks)
    fetchExpertsKernel(const __grid_constant__ FetchMatrices matrices, const ExpertOrders* host,
                       const uint32_t* instructed, uint32_t ticket, DeviceOrders* orders, int pairs,
                       const int32_t* chosen, int32_t* slot) {
    __shared__ __align__(16) uint8_t shared[sizeof(ExpertOrders)];
    waitForPrevious();
    if (orders->missed == 0) return;
    uint32_t* words = reinterpret_cast<uint32_t*>(shared);
    if (blockIdx.x == 0) {
        receiveOrders(host, instructed, ticket, orders, words, pairs, chosen, slot);
    } else {
        if (threadIdx.x == 0)
            while (loadReady(&orders->ready) == 0) __nanosleep(100);
        __syncthreads();
        readOrders(orders, words);
    }
    const ExpertOrders& mine = *reinterpret_cast<const ExpertOrders*>(words);
    fetchUnits(matrices, mine.fetch, bounded(mine.demanded, kMaxExpertFetches));
    __threadfence();
}

// A later kernel reads the table, so it does not matter when an expert's entry is written.
__global__ void __launch_bounds__(kFetchThreads, kFetchBlocks)
    fetchAheadKernel(const __grid_constant__ FetchMatrices matrices, const DeviceOrders* orders, int32_t* table) {
    __shared__ __align__(16) uint8_t shared[sizeof(ExpertOrders)];
    waitForPrevious();
    if (orders->ready == 0) return;  // nothing was missed, so nothing was ordered
    uint32_t* words = reinterpret_cast<uint32_t*>(shared);
    readOrders(orders, words);
    const ExpertOrders& mine = *reinterpret_cast<const ExpertOrders*>(words);
    const int count = bounded(mine.ahead, kMaxFetchesAhead);
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < count)
        table[mine.aheadFetch[threadIdx.x].expert] = mine.aheadFetch[threadIdx.x].slot;
    fetchUnits(matrices, mine.aheadFetch, count);
    __threadfence();
}

// --- adding up ---------------------------------------------------------------------------------------------------

constexpr int kAnswerThreads = 128;
constexpr int kRanksAtOnce = 8;  // ranks of an element that are loaded together

// Block (i, t) takes pieces of kFloats floats of row t.
template <int kFloats>
__global__ void __launch_bounds__(kAnswerThreads)
    combineAnswersKernel(const float* y, const float* hostY, const int32_t* slot, const float* weight, int32_t used,
                         int pieces, const uint32_t* returned, uint32_t ticket, SharedAnswer shared, AnswerTerms terms,
                         float* out) {
    waitForPrevious();
    const int64_t firstPair = static_cast<int64_t>(blockIdx.y) * used;
    bool isHosts = false;
    for (int k = static_cast<int>(threadIdx.x); k < used; k += static_cast<int>(blockDim.x))
        isHosts |= slot[firstPair + k] < 0;
    if (__syncthreads_or(isHosts)) waitForTicket(returned, ticket);
    allowNext();  // not earlier: see crossing.cuh
    const int piece = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (piece >= pieces) return;

    float sum[kFloats] = {};
    for (int first = 0; first < used; first += kRanksAtOnce) {
        int32_t where[kRanksAtOnce];
        float factor[kRanksAtOnce];
        uint4 value[kRanksAtOnce];
#pragma unroll
        for (int k = 0; k < kRanksAtOnce; ++k) {
            const int64_t pair = firstPair + min(first + k, used - 1);
            where[k] = slot[pair];
            factor[k] = weight ? weight[pair] : 1.0f;
        }
#pragma unroll
        for (int k = 0; k < kRanksAtOnce; ++k) {
            if (first + k >= used) continue;
            const int64_t at = ((firstPair + first + k) * pieces + piece) * kFloats;
            value[k] = where[k] < 0 ? loadPiece<true>(reinterpret_cast<const uint8_t*>(hostY + at), kFloats == 4)
                                    : loadPiece<false>(reinterpret_cast<const uint8_t*>(y + at), kFloats == 4);
        }
#pragma unroll
        for (int k = 0; k < kRanksAtOnce; ++k) {
            if (first + k >= used) continue;
            const uint32_t words[4] = {value[k].x, value[k].y, value[k].z, value[k].w};
#pragma unroll
            for (int i = 0; i < kFloats; ++i) {
                float answer = __uint_as_float(words[i]);
                if (terms.bias) {
                    const int64_t expert = terms.expert[firstPair + first + k];
                    answer = __fadd_rn(answer, terms.bias[(expert * pieces + piece) * kFloats + i]);
                }
                sum[i] = fmaf(factor[k], answer, sum[i]);
            }
        }
    }
    const int64_t at = (static_cast<int64_t>(blockIdx.y) * pieces + piece) * kFloats;
    if (shared.y) {
        const float factor = shared.scale ? portableSigmoid(shared.scale[blockIdx.y]) : 1.0f;
#pragma unroll
        for (int i = 0; i < kFloats; ++i) sum[i] = fmaf(factor, shared.y[at + i], sum[i]);
    }
    float* to = out + at;
    if constexpr (kFloats == 4) {
        if (!terms.adds) {
            *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            return;
        }
        const float4 old = *reinterpret_cast<const float4*>(to);
        *reinterpret_cast<float4*>(to) = make_float4(__fadd_rn(old.x, sum[0]), __fadd_rn(old.y, sum[1]),
                                                     __fadd_rn(old.z, sum[2]), __fadd_rn(old.w, sum[3]));
    } else {
        *to = terms.adds ? __fadd_rn(*to, sum[0]) : sum[0];
    }
}

// --- launching ---------------------------------------------------------------------------------------------------

FetchMatrix matrixOf(const MatrixStack& stack) {
    const Matrix& first = stack.first;
    FetchMatrix m;
    m.type = first.type;
    m.shape = packedShape(first.type, first.rows, first.cols);
    m.slots = const_cast<uint8_t*>(first.data);
    m.stride = static_cast<int64_t>(stack.stride);
    m.bytes = first.rows * static_cast<int64_t>(rowBytes(first.type, first.cols));
    const DTypeInfo& type = info(first.type);
    m.unitBytes = type.isFloat
                      ? kFloatUnit
                      : kFetchThreads * 32 / static_cast<int>(type.blockElements) * static_cast<int>(type.blockBytes);
    m.unitBlocks = type.isFloat ? kFloatUnit / static_cast<int>(type.blockBytes) / 32 : kFetchThreads;
    const int64_t units = (m.bytes + m.unitBytes - 1) / m.unitBytes;
    if (m.unitBytes > kUnitBytes || units > (int64_t{1} << 24) || !isWhole(m.slots, m.stride))
        throw Error(ErrorKind::Internal, std::string("no kernel fetches experts of ") + std::to_string(first.rows) +
                                             " x " + std::to_string(first.cols) + " into slots " +
                                             std::to_string(m.stride) + " bytes apart");
    m.units = static_cast<int32_t>(units);
    return m;
}

FetchMatrices matricesOf(const ExpertStacks& slots) {
    FetchMatrices all;
    all.matrix[0] = matrixOf(slots.gate);
    if (slots.gated()) all.matrix[1] = matrixOf(slots.up);
    all.matrix[2] = matrixOf(slots.down);
    for (const FetchMatrix& m : all.matrix) all.units += m.units;
    return all;
}

// No more blocks than there can be units: those of the largest number of experts that may be ordered.
dim3 fetchGrid(const Stream& stream, const FetchMatrices& all) {
    const int64_t room = static_cast<int64_t>(stream.device().multiprocessors) * kFetchBlocks;
    return dim3(static_cast<unsigned>(
        std::max<int64_t>(std::min(room, static_cast<int64_t>(all.units) * kMaxExpertFetches), 1)));
}

int pairCount(int64_t pairs) {
    if (pairs < 0 || pairs >= int64_t{1} << 24)
        throw Error(ErrorKind::Internal,
                    std::to_string(pairs) + " pairs of rows and experts are more than one call takes");
    return static_cast<int>(pairs);
}

}  // namespace

void sendExperts(Stream& stream, const RowOutputs& from, int64_t rows, int32_t used, const int32_t* chosen,
                 const int32_t* table, const int32_t* predicted, int32_t* slot, DeviceOrders* orders,
                 const HostRows& to, const HostChoices& host, uint32_t* sent, uint32_t ticket, const float* weight) {
    const Crossing c = crossingOf(from, rows, 0, to.cols, to);
    const int pairs = pairCount(rows * used);
    launch(stream, sendExpertsKernel, dim3(1), crossingThreads(std::max<int64_t>(c.pieces(), pairs)), 0, c, c.pieces(),
           pairs, chosen, table, host.predicted ? predicted : nullptr, slot, orders, host.weight ? weight : nullptr,
           host, sent, ticket);
}

void fetchExperts(Stream& stream, const ExpertStacks& slots, const ExpertOrders* host, const uint32_t* instructed,
                  uint32_t ticket, DeviceOrders* orders, int64_t pairs, const int32_t* chosen, int32_t* slot) {
    const FetchMatrices all = matricesOf(slots);
    launch(stream, fetchExpertsKernel, fetchGrid(stream, all), dim3(kFetchThreads), 0, all, host, instructed, ticket,
           orders, pairCount(pairs), chosen, slot);
}

void fetchAhead(Stream& stream, const ExpertStacks& slots, const DeviceOrders* orders, int32_t* table) {
    const FetchMatrices all = matricesOf(slots);
    launch(stream, fetchAheadKernel, fetchGrid(stream, all), dim3(kFetchThreads), 0, all, orders, table);
}

void combineAnswers(Stream& stream, const float* y, const float* hostY, const int32_t* slot, const float* weight,
                    int64_t rows, int32_t used, int64_t cols, const uint32_t* returned, uint32_t ticket, float* to,
                    const SharedAnswer& shared, const AnswerTerms& terms) {
    pairCount(rows * used);
    if (cols < 0 || cols > int64_t{1} << 30)
        throw Error(ErrorKind::Internal, "no kernel adds up answers of " + std::to_string(cols) + " columns");
    const bool wide = isWhole(y, cols * 4) && isWhole(hostY, 0) && isWhole(to, 0);
    const int64_t pieces = wide ? cols / 4 : cols;
    const dim3 grid(static_cast<unsigned>((pieces + kAnswerThreads - 1) / kAnswerThreads), static_cast<unsigned>(rows));
    launch(stream, wide ? combineAnswersKernel<4> : combineAnswersKernel<1>, grid, dim3(kAnswerThreads), 0, y, hostY,
           slot, weight, used, static_cast<int>(pieces), returned, ticket, shared, terms, to);
}

void lookUpExperts(Stream& stream, const int32_t* chosen, int64_t pairs, const ExpertIndex& which, int32_t* element) {
    const int count = pairCount(pairs);
    if (count == 0) return;
    launch(stream, lookUpKernel, dim3(static_cast<unsigned>((count + kLookUpThreads - 1) / kLookUpThreads)),
           dim3(kLookUpThreads), 0, chosen, count, which, element);
}

}  // namespace sharpi::cuda
