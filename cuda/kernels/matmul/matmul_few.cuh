// The matrix product of prefill on Hopper for few rows: short prompts, and experts that few rows chose.
//
// Such a product is bound by its weights: each is loaded and expanded for a few rows only, and there are few tiles. If
// the same threads load, expand and multiply, each of these waits for the others. So warps have roles. *Producers* load
// packed weights, expand them into a ring of slots in shared memory, and copy the activations beside them. *Consumers*,
// one warpgroup, multiply. They meet at two mbarriers of each slot: one says that it is full, the other that it is
// empty. The consumers make what the producers wrote visible to the tensor cores, because publishToTensorCores() waits
// for all loads of its thread, and a producer always has loads in flight.
//
// A multiprocessor runs one block at a time, which takes one tile of y after the other (its *items*). A slot has a
// *stride*, one or two steps along k. Strides are numbered across items, so the ring does not drain between two items.
// A team of producers fills a slot, a warp for each step, and the teams take strides in turn.
//
// Products of several matrices with the same rows can run together: small ones leave multiprocessors free.
#pragma once

#include "core/contract.h"
#include "kernels/matmul/matmul_kernel.cuh"
#include "kernels/matmul/wgmma.cuh"
#include "kernels/matvec/mma/mbarrier.cuh"

namespace sharpi::cuda {

// What of a TilePlace differs among the tiles of a launch. element: the matrix's number in its stack.
struct alignas(16) FewItem {
    int32_t begin, firstRow, element;
    int16_t rows, head;
};

// kTileT: the most rows of x. kStride: steps of kTileDepth columns in a slot. kTeams: of producers. The consumers
// hold up to two slots, and each team can fill another one.
template <int kTileT_, int kStride_, int kSlots_, int kTeams_, int kMostItems_> struct FewTiling {
    static constexpr int kTileN = 64, kTileT = kTileT_, kStride = kStride_, kSlots = kSlots_, kTeams = kTeams_;
    static constexpr int kConsumers = 128, kThreads = kConsumers + kTeams * kStride * 32;
    static constexpr int kMostItems = kMostItems_;  // of a block
    // A slot has the weights of each step, then the activations of each step. Behind the slots are their barriers, then
    // the number of items and the items.
    static constexpr uint32_t kBytesW = kTileN * kTileRowBytes, kBytesX = kTileT * kTileRowBytes,  // of a step
        kSlotBytes = kStride * (kBytesW + kBytesX);
    static constexpr uint32_t kBarriersAt = kSlots * kSlotBytes, kCountAt = kBarriersAt + kSlots * 16,
                              kItemsAt = kCountAt + 16;
    static constexpr size_t kSharedBytes = kItemsAt + kMostItems * sizeof(FewItem);
    static_assert(kSharedBytes <= 227 * 1024 && kTeams <= kSlots - 2);
};

struct FewCall {
    MatmulCall call;
    int32_t tilesT = 0;  // along the rows of x, of all experts: `parts` for each tile of the call's groups
    int32_t parts = 1;
    int32_t tilesN = 0;  // along the rows of w, of each head
};

#ifdef SHARPI_WGMMA

// --- what all threads know -----------------------------------------------------------------------------------------

// The block's items, each with a row at least, and the ring.
template <typename Tiling> struct FewBlock {
    const FewCall& few;
    uint32_t shared;
    const FewItem* items;
    int count = 0, steps, strides;  // steps and strides of an item

    // All threads call it, and meet.
    __device__ __forceinline__ FewBlock(const FewCall& f, uint8_t* memory)
        : few(f),
          shared(sharedAddress(memory)),
          items(reinterpret_cast<const FewItem*>(memory + Tiling::kItemsAt)),
          steps(static_cast<int>((f.call.shape.cols + kTileDepth - 1) / kTileDepth)),
          strides((steps + Tiling::kStride - 1) / Tiling::kStride) {
        auto* found = reinterpret_cast<int*>(memory + Tiling::kCountAt);
        if (threadIdx.x == 0) {
            *found = 0;
            RingPlace place;
            for (int i = 0; i < Tiling::kSlots; ++i, place.move(1, Tiling::kSlots)) {
                full(place).init(Tiling::kStride * (32 + 1));
                empty(place).init(Tiling::kConsumers / 32);
            }
        }
        __syncthreads();
        find(reinterpret_cast<FewItem*>(memory + Tiling::kItemsAt), found);
        __syncthreads();
        count = *found;
    }

    __device__ __forceinline__ TilePlace placeOf(int item) const {
        const FewItem i = items[item];
        const MatmulCall& call = few.call;
        TilePlace place = headOf(call, i.head);
        place.begin = i.begin, place.end = i.begin + i.rows;
        place.firstRow = i.firstRow;
        place.w += static_cast<size_t>(i.element) * call.expertStride;
        return place;
    }

    __device__ __forceinline__ uint32_t weights(const RingPlace& place) const {
        return shared + place.at * Tiling::kSlotBytes;
    }
    __device__ __forceinline__ uint32_t activations(const RingPlace& place) const {
        return weights(place) + Tiling::kStride * Tiling::kBytesW;
    }
    __device__ __forceinline__ Mbarrier full(const RingPlace& place) const {
        return Mbarrier(shared + Tiling::kBarriersAt + place.at * 16);
    }
    __device__ __forceinline__ Mbarrier empty(const RingPlace& place) const {
        return Mbarrier(shared + Tiling::kBarriersAt + place.at * 16 + 8);
    }

private:
    // Each thread looks at some of the block's tiles. It does not matter in which order the items stand. Neighbouring
    // blocks have neighbouring outputs of the same rows. All first parts of experts' tiles come before all second ones,
    // of which few have rows, so that all blocks get as many items.
    __device__ __forceinline__ void find(FewItem* to, int* found) const {
        const MatmulCall& call = few.call;
        const int all = few.tilesN * few.tilesT * call.by.count, blocks = static_cast<int>(gridDim.x);
        for (int item = static_cast<int>(blockIdx.x + threadIdx.x * gridDim.x); item < all;
             item += Tiling::kThreads * blocks) {
            const int tile = item / few.tilesN, head = tile / few.tilesT, t = tile % few.tilesT,
                      wholeTiles = few.tilesT / few.parts;
            const TilePlace place = sharpi::cuda::placeOf<Tiling::kTileT, Tiling::kTileN>(
                call, t % wholeTiles * few.parts + t / wholeTiles, item % few.tilesN, head);
            if (place.begin >= place.end) continue;
            const size_t element = call.expertStride == 0 ? 0 : (place.w - call.w) / call.expertStride;
            to[atomicAdd(found, 1)] = {static_cast<int32_t>(place.begin), static_cast<int32_t>(place.firstRow),
                                       static_cast<int32_t>(element), static_cast<int16_t>(place.end - place.begin),
                                       static_cast<int16_t>(head)};
        }
    }
};

// --- producers -----------------------------------------------------------------------------------------------------

// A warp's share of a slot's weights, in kParts parts, and what a lane loads of a part. Lanes that store at once write
// to different banks, and each warp loads long pieces of a row. member: the warp's number in its team.
template <typename Tiling, DType T, bool kFloat = kIsFloat<T>> class SlotFeed {
public:
    using Loaded = LoadedBlock<T>;
    static constexpr int kParts = 4;

    __device__ __forceinline__ SlotFeed(const MatmulCall& call, int member, int lane)
        : _call(call),
          _blocks(static_cast<int>(call.shape.cols / kContractBlock)),
          _half(lane % 2),
          _row(member * (kParts * kRowsAtOnce) + lane / 2 % kRowsAtOnce),
          _step(lane / 2 / kRowsAtOnce) {}

    // Sets the item that fetch() loads from.
    __device__ __forceinline__ void begin(const TilePlace& place) {
        _w = place.w;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            _first[part] = min(static_cast<int>(place.firstRow) + _row + part * kRowsAtOnce,
                               static_cast<int>(_call.shape.rows) - 1) *
                           _blocks;
    }
    __device__ __forceinline__ void fetch(Loaded& to, int stride, int part) const {
        to.load(_call.type, _w, _call.shape, _first[part] + min(blockOf(stride), _blocks - 1));
    }
    __device__ __forceinline__ void store(const Loaded& from, uint32_t slot, int stride, int part) const {
        const int block = blockOf(stride), row = _row + part * kRowsAtOnce;
        from.store(_call.type, block & 7, block < _blocks,
                   {slot + _step * Tiling::kBytesW + static_cast<uint32_t>(row * kTileRowBytes), row & 7, _half});
    }

private:
    static constexpr int kRowsAtOnce = 16 / Tiling::kStride;
    static_assert(Tiling::kStride * kParts * kRowsAtOnce == Tiling::kTileN && kRowsAtOnce % 8 == 0);
    __device__ __forceinline__ int blockOf(int stride) const { return (stride * Tiling::kStride + _step) * 2 + _half; }

    const MatmulCall& _call;
    const uint8_t* _w = nullptr;
    int _blocks, _half, _row, _step;
    int _first[kParts];  // the first block of each part's row
};

template <typename Tiling, DType T> class SlotFeed<Tiling, T, true> {
    static_assert(T == DType::F16 || T == DType::BF16);
    static constexpr int kOfPart = 4;  // pieces of eight elements that a lane has of a part

public:
    static constexpr int kParts = 4;
    struct Loaded {
        uint4 raw[kOfPart][1];
    };

    __device__ __forceinline__ SlotFeed(const MatmulCall& call, int member, int lane)
        : _call(call), _row(member * (kParts * kOfPart * kRowsAtOnce) + lane / kChunks), _chunk(lane % kChunks) {}

    __device__ __forceinline__ void begin(const TilePlace& place) { _w = place.w, _firstRow = place.firstRow; }
    __device__ __forceinline__ void fetch(Loaded& to, int stride, int part) const {
        const int64_t k = static_cast<int64_t>(stride) * (Tiling::kStride * kTileDepth) + _chunk * 8;
#pragma unroll
        for (int i = 0; i < kOfPart; ++i) {
            const int64_t row = min(_firstRow + rowOf(part, i), _call.shape.rows - 1);
            to.raw[i][0] = k < _call.shape.cols
                               ? __ldg(reinterpret_cast<const uint4*>(_w + (row * _call.shape.cols + k) * 2))
                               : uint4{0, 0, 0, 0};
        }
    }
    __device__ __forceinline__ void store(const Loaded& from, uint32_t slot, int, int part) const {
#pragma unroll
        for (int i = 0; i < kOfPart; ++i)
            storeShared(slot + _chunk / kRowChunks * Tiling::kBytesW + tileOffset(rowOf(part, i), _chunk % kRowChunks),
                        expandFloats<T>(from.raw[i], false));
    }

private:
    static constexpr int kChunks = kRowChunks * Tiling::kStride,  // of a row's stride, a lane each
        kRowsAtOnce = 32 / kChunks;
    static_assert(Tiling::kStride * kParts * kOfPart * kRowsAtOnce == Tiling::kTileN);
    __device__ __forceinline__ int rowOf(int part, int i) const { return _row + (part * kOfPart + i) * kRowsAtOnce; }

    const MatmulCall& _call;
    const uint8_t* _w = nullptr;
    int64_t _firstRow = 0;
    int _row, _chunk;
};

// Copies steps of an item's activations. A warp copies four rows at once. What the slot holds in place of further rows
// does not matter: their products are never stored.
template <typename Tiling> class FewRows {
    static constexpr int kAtOnce = 32 / kRowChunks, kGroup = 4 * kAtOnce;

public:
    __device__ __forceinline__ FewRows(const MatmulCall& call, int lane)
        : _call(call), _lane(lane), _to(tileOffset(lane / kRowChunks, lane % kRowChunks)) {}

    __device__ __forceinline__ void begin(const TilePlace& place) {
        _rows = static_cast<int>(place.end - place.begin);
#pragma unroll
        for (int i = 0; i < Tiling::kTileT / 32; ++i) {
            const int64_t pair = place.begin + min(_lane + 32 * i, _rows - 1);
            _from[i] = static_cast<uint32_t>(rowOfX(_call, place, pair)) * static_cast<uint32_t>(_call.shape.cols / 8);
        }
    }
    __device__ __forceinline__ void copy(uint32_t tile, int step) const {
        const int k = step * kTileDepth + _lane % kRowChunks * 8;
        const bool valid = k < _call.shape.cols;
        const uint16_t* x = _call.x.hi + (valid ? k : 0);
#pragma unroll
        for (int first = 0; first < Tiling::kTileT; first += kGroup) {
            if (first >= _rows) return;
#pragma unroll
            for (int i = first; i < first + kGroup; i += kAtOnce) {
                // tileOffset() of row i + lane / kRowChunks: every other time, the row is in the second half of eight.
                const uint32_t to = tile + (i / kAtOnce % 2 ? _to ^ kAtOnce << 4 : _to) + i * kTileRowBytes;
                const uint32_t from = __shfl_sync(~0u, _from[i / 32], i % 32 + _lane / kRowChunks);
                if (i + _lane / kRowChunks < _rows) copyChunk(to, x + static_cast<uint64_t>(from) * 8, valid);
            }
        }
    }

private:
    const MatmulCall& _call;
    int _lane, _rows = 0;
    uint32_t _to;
    uint32_t _from[Tiling::kTileT / 32];  // rows lane, lane + 32, ..: in 16-byte chunks from x
};

// Fills every kTeams-th stride. The next one's weights are loaded while this one's are expanded.
template <typename Tiling, DType T> __device__ __forceinline__ void produce(const FewBlock<Tiling>& block) {
    using Feed = SlotFeed<Tiling, T>;
    constexpr int kParts = Feed::kParts;
    const int lane = static_cast<int>(threadIdx.x) % 32,
              warp = (static_cast<int>(threadIdx.x) - Tiling::kConsumers) / 32, member = warp % Tiling::kStride,
              team = warp / Tiling::kStride;
    Feed feed(block.few.call, member, lane);
    FewRows<Tiling> rows(block.few.call, lane);
    typename Feed::Loaded loaded[kParts];
    int item = 0, stride = team;  // to load next
    const auto findItem = [&] {
        const int before = item;
        while (stride >= block.strides) stride -= block.strides, ++item;
        if (item != before && item < block.count) feed.begin(block.placeOf(item));
    };
    if (block.count > 0) feed.begin(block.placeOf(0));
    findItem();
    const bool begins = item < block.count;
    if (begins) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) feed.fetch(loaded[part], stride, part);
    }
    awaitTogether(block.few.call.order);
    if (!begins) return;
    rows.begin(block.placeOf(item));
    RingPlace slot;
    slot.move(team, Tiling::kSlots);
#pragma unroll 1
    for (;;) {
        const int present = stride, presentItem = item;
        stride += Tiling::kTeams;
        findItem();
        const bool goesOn = item < block.count;
        block.empty(slot).wait(slot.parity ^ 1);  // returns at once in the ring's first round
        const int step = present * Tiling::kStride + member;
        if (step < block.steps) rows.copy(block.activations(slot) + member * Tiling::kBytesX, step);
        block.full(slot).arriveWithCopies();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            feed.store(loaded[part], block.weights(slot), present, part);
            if (goesOn) feed.fetch(loaded[part], stride, part);
        }
        __syncwarp();
        if (lane == 0) block.full(slot).arrive();
        if (!goesOn) return;
        if (item != presentItem) rows.begin(block.placeOf(item));
        slot.move(Tiling::kTeams, Tiling::kSlots);
    }
}

// --- consumers -----------------------------------------------------------------------------------------------------

// Adds the bias and what y had, if they are wanted, and writes the sums, which lie as WarpgroupProduct leaves them.
template <int kN>
__device__ __forceinline__ void storeFew(const MatmulCall& call, const TilePlace& place, const float (&sum)[kN / 2]) {
    constexpr int kBatch = 8;  // rows whose old values are loaded at once
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32,
              rows = static_cast<int>(place.end - place.begin);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int64_t n = place.firstRow + warp * 16 + lane / 4 + half * 8;
        if (n >= place.endRow) continue;
        float* y = place.y + place.begin * call.stride + n;
        // 0 + bias, as storeTile() adds them: that makes -0 to 0.
        const float bias = call.bias ? 0.0f + call.bias[n] : 0.0f;
#pragma unroll
        for (int first = 0; first < kN / 4; first += kBatch) {
            // The lane's row number j of the kN / 4.
            const auto forRows = [&](const auto& f) {
#pragma unroll
                for (int j = first; j < first + kBatch && j < kN / 4; ++j) {
                    const int t = j / 2 * 8 + lane % 4 * 2 + j % 2;
                    if (t < rows) f(j, y + t * call.stride);
                }
            };
            float added[kBatch];
            forRows([&](int j, const float* at) { added[j - first] = call.add ? bias + *at : bias; });
            forRows([&](int j, float* at) { *at = sum[j / 2 * 4 + half * 2 + j % 2] + added[j - first]; });
        }
    }
}

template <typename Tiling, DType T> class FewProducts {
public:
    __device__ __forceinline__ explicit FewProducts(const FewBlock<Tiling>& block) : _block(block) {}

    // Begins to bring an item's weights to the L2 cache, since producers have too few loads in flight for memory's
    // latency. Eight threads take eight neighbouring rows each, which are contiguous in each plane.
    __device__ __forceinline__ void fetchAhead(int item) const {
        if constexpr (!kIsFloat<T>) {
            constexpr int kFetchers = 8, kRows = Tiling::kTileN / kFetchers;
            if (item >= _block.count || threadIdx.x >= kFetchers) return;
            const TilePlace place = _block.placeOf(item);
            const PackedShape& shape = _block.few.call.shape;
            const int64_t row = place.firstRow + threadIdx.x * kRows, rows = min(shape.rows - row, int64_t{kRows}),
                          blocks = shape.cols / kContractBlock;
            if (rows > 0)
                fetchBlocksAhead<T>(_block.few.call, place.w, static_cast<uint32_t>(row * blocks), rows * blocks);
        }
    }
    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (int item = 0; item < _block.count; ++item) {
            fetchAhead(item + 1);
            const TilePlace place = _block.placeOf(item);
            const int64_t rows = place.end - place.begin;
            if constexpr (Tiling::kTileT == 64) {
                if (rows <= 16) multiply<16>(place);
                else if (rows <= 32) multiply<32>(place);
                else multiply<64>(place);
            } else {
                if (rows <= 96) multiply<96>(place);
                else multiply<128>(place);
            }
        }
    }

private:
    // Begins the products of the next stride, or of its first kSteps steps.
    template <int kN, int kSteps> __device__ __forceinline__ void begin(float (&sum)[kN / 2]) const {
        const uint64_t w = tileDescriptor(_block.weights(_slot)), x = tileDescriptor(_block.activations(_slot));
        _block.full(_slot).wait(_slot.parity);
        publishToTensorCores();
        beginProducts();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int k = 0; k < kTileDepth / 16; ++k)
                WarpgroupProduct<kN>::add(sum, w + step * (Tiling::kBytesW / 16) + k * kNextProduct,
                                          x + step * (Tiling::kBytesX / 16) + k * kNextProduct);
        closeProducts();
    }
    // Moves to the next stride and releases the slot of the one before: this warp's part of its products is done.
    __device__ __forceinline__ void advance() {
        if (_isFirst) _isFirst = false;
        else if (threadIdx.x % 32 == 0) _block.empty(_before).arrive();
        _before = _slot;
        _slot.move(1, Tiling::kSlots);
    }
    template <int kN> __device__ __forceinline__ void multiply(const TilePlace& place) {
        float sum[kN / 2] = {};
        const int whole = _block.steps / Tiling::kStride;
#pragma unroll 1
        for (int stride = 0; stride < whole; ++stride) {
            begin<kN, Tiling::kStride>(sum);
            waitForProducts<1>();
            advance();
        }
        static_assert(Tiling::kStride <= 2, "the rest is one step");
        if (Tiling::kStride > 1 && whole < _block.strides) {
            begin<kN, 1>(sum);
            waitForProducts<1>();
            advance();
        }
        waitForProducts<0>();
        storeFew<kN>(_block.few.call, place, sum);
    }

    const FewBlock<Tiling>& _block;
    RingPlace _slot, _before;  // of the next stride and of the one before
    bool _isFirst = true;
};

#endif

// Without Hopper's own instructions the kernel is compiled empty.
template <DType T, typename Tiling>
__global__ void __launch_bounds__(Tiling::kThreads, 1) matmulFewKernel(const __grid_constant__ FewCall few) {
#ifdef SHARPI_WGMMA
    extern __shared__ __align__(1024) uint8_t shared[];
    beginTogether(few.call.order);
    if (few.call.groups.begin) waitForPrevious();  // another kernel writes the tiles' arrays
    const FewBlock<Tiling> block(few, shared);
    if (__shfl_sync(~0u, threadIdx.x / Tiling::kConsumers, 0) > 0) {
        produce<Tiling, T>(block);
    } else {
        FewProducts<Tiling, T> products(block);
        products.fetchAhead(0);
        awaitTogether(few.call.order);
        products.run();
    }
    endTogether(few.call.order);
#endif
}

}  // namespace sharpi::cuda
