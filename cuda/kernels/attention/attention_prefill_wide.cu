// Causal attention of many rows on tensor cores, for heads of 257 to 512 elements.
//
// A warp has no registers for 16 rows of 512 outputs, so two warps share 16 rows: each owns half of the output's
// elements. If tiles of keys are large enough, each also takes half of a tile's keys: the two exchange their maxima
// through shared memory, turn scores into weights, and read the weights of all keys from there. With 16 keys, on
// devices with little shared memory, each warp computes all weights for itself.
//
// Keys and values have one buffer each. Values arrive while queries are multiplied by keys, and the next keys while
// weights are multiplied by values. A smaller device has one buffer for both in turn.
#include "kernels/attention/attention_prefill.cuh"

namespace sharpi::cuda {

namespace {

template <KvType kType_, bool kSplit_, int kRows_, int kKeys_, bool kOneBuffer_ = false> struct WideTile {
    static constexpr KvType kType = kType_;
    static constexpr bool kRuled = true, kSplit = kSplit_, kSplitKv = kSplit && kType != KvType::BF16;
    static constexpr bool kOneBuffer = kOneBuffer_;
    static constexpr int kDim = 512, kHeads = 1, kRows = kRows_, kKeys = kKeys_;
    static constexpr int kColumns = 2, kWarpDim = kDim / kColumns, kThreads = 32 * kColumns * (kRows / 16);
    static constexpr bool kSharesScores = kKeys / kColumns % 16 == 0, kKeepsQueries = false;
    static constexpr int kWarpKeys = kSharesScores ? kKeys / kColumns : kKeys;
    static constexpr int kRowBytes = 2 * kDim, kChunks = kDim / 8;
    static constexpr int kQueryPartBytes = kRows * kRowBytes;  // hi or lo
    static constexpr int kPartBytes = kKeys * kRowBytes;       // keys or values, hi or lo
    static constexpr int kWeightPartBytes = kSharesScores ? kRows * kKeys * 2 : 0;
    // Shared memory: queries, keys, values, weights, and a float for each row and column.
    static constexpr int kKeysAt = kQueryPartBytes * (kSplit ? 2 : 1);
    static constexpr int kBufferBytes = kPartBytes * (kSplitKv ? 2 : 1);
    static constexpr int kValuesAt = kOneBuffer ? 0 : kBufferBytes;  // behind the keys
    static constexpr int kWeightsAt = kKeysAt + kValuesAt + kBufferBytes;
    static constexpr int kFloatsAt = kWeightsAt + kWeightPartBytes * (kSplit ? 2 : 1);
    static constexpr int kSharedBytes = kFloatsAt + (kSharesScores ? kRows * kColumns * 4 : 0);
};

// Gives the warps that share rows each other's floats, one for each row: returns in `theirs` those of the other column.
// The whole block calls it, and again only after another barrier.
template <class T>
__device__ __forceinline__ void exchange(uint8_t* shared, const float (&ours)[2], float (&theirs)[2]) {
    const int lane = threadIdx.x % 32, row = warpRow<T>() + lane / 4, column = warpColumn<T>();
    auto* floats = reinterpret_cast<float*>(shared + T::kFloatsAt);
    if (lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) floats[column * T::kRows + row + 8 * r] = ours[r];
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 2; r++) theirs[r] = floats[(1 - column) * T::kRows + row + 8 * r];
}

// Puts the weights of the warp's keys where multiplyValues() reads those of all keys.
template <class T> __device__ __forceinline__ void shareWeights(const PrefillWarp<T>& w, uint8_t* shared) {
    const int lane = threadIdx.x % 32, row = warpRow<T>() + lane / 4;
#pragma unroll
    for (int j = 0; j < T::kWarpKeys / 16; j++) {
        uint32_t hi[4], lo[4];
        packWeights<T>(w, 0, j, hi, lo);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int chunk = warpKey<T>() / 8 + 2 * j + i / 2;
            uint8_t* to = shared + T::kWeightsAt + swizzled<T::kKeys / 8>(row + 8 * (i % 2), chunk) + lane % 4 * 4;
            *reinterpret_cast<uint32_t*>(to) = hi[i];
            if constexpr (T::kSplit) *reinterpret_cast<uint32_t*>(to + T::kWeightPartBytes) = lo[i];
        }
    }
}

// Turns the scores of a tile into weights.
template <class T> __device__ __forceinline__ void weighTile(PrefillWarp<T>& w, uint8_t* shared, float scale) {
    float top[2], kept[2];
#pragma unroll
    for (int r = 0; r < 2; r++) top[r] = largestScore<T>(w, 0, r);
    if constexpr (T::kSharesScores) {
        float others[2];
        exchange<T>(shared, top, others);
#pragma unroll
        for (int r = 0; r < 2; r++) top[r] = fmaxf(top[r], others[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) kept[r] = weighRow<T>(w, 0, r, top[r], scale);
    rescale<T>(w, 0, kept);
    if constexpr (T::kSharesScores) shareWeights<T>(w, shared);
}

// Joins the sums of the warps that share rows, as the first column's plus the second's.
template <class T> __device__ __forceinline__ void joinColumns(PrefillWarp<T>& w, uint8_t* shared) {
    float theirs[2];
#pragma unroll
    for (int r = 0; r < 2; r++) joinLanes<T>(w, 0, r);
    exchange<T>(shared, w.sum[0], theirs);
#pragma unroll
    for (int r = 0; r < 2; r++) w.sum[0][r] += theirs[r];
}

template <class T> __global__ void __launch_bounds__(T::kThreads) attendWide(PrefillArgs args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const PrefillPlace place = findPlace<T>(args);
    if (place.rows <= 0) return;
    const uint32_t queries = sharedAddress(shared), keys = queries + T::kKeysAt;
    const auto loadKeys = [&](int t) { loadTile<T, KeysAlone>(args, place, t * T::kKeys, keys); };
    const auto loadValues = [&](int t) { loadTile<T, ValuesAlone>(args, place, t * T::kKeys, keys); };
    const int firstTile = place.firstKey / T::kKeys, tiles = place.lastPosition / T::kKeys + 1;
    const int firstPosition = args.batch.positions[place.firstRow];
    loadQueries<T>(args, place, queries, queries + T::kQueryPartBytes);
    loadKeys(firstTile);
    closeCopies();
    PrefillWarp<T> w;
    beginWarp<T>(w, args, place, queries);
    for (int t = firstTile; t < tiles; t++) {
        waitForCopies<0>();
        __syncthreads();  // the keys are there, and the values before them are used
        if constexpr (!T::kOneBuffer) loadValues(t);
        closeCopies();
        multiplyKeys<T>(w, queries, keys);
        if (args.intoTanh != 0.0f) capScores<T>(w, args.intoTanh);
        if (needsMask<T>(place, firstPosition, t * T::kKeys)) maskScores<T>(w, args.reach, t * T::kKeys);
        weighTile<T>(w, shared, args.scale);
        if constexpr (T::kOneBuffer) {
            __syncthreads();
            loadValues(t);
            closeCopies();
        }
        waitForCopies<0>();
        __syncthreads();  // the values and the weights are there, and the keys are used
        if constexpr (!T::kOneBuffer) {
            if (t + 1 < tiles) loadKeys(t + 1);
            closeCopies();
        }
        multiplyValues<T>(w, keys + T::kValuesAt, queries + T::kWeightsAt);
        if constexpr (T::kOneBuffer) {
            __syncthreads();
            if (t + 1 < tiles) loadKeys(t + 1);
            closeCopies();
        }
    }
    if constexpr (T::kSharesScores) joinColumns<T>(w, shared);
    store<T>(w, args, place);
}

// --- launching ---------------------------------------------------------------------------------------------------

template <class T> bool fits(const Stream& stream) { return T::kSharedBytes <= stream.device().sharedPerBlock; }

template <class T> void launchWide(Stream& stream, const PrefillArgs& args) {
    if (T::kSharedBytes > 48 * 1024) allowShared(attendWide<T>, T::kSharedBytes);
    const dim3 grid(static_cast<unsigned>(args.shape.heads), static_cast<unsigned>(args.tiles.count),
                    kQueryTile / T::kRows);
    launch(stream, attendWide<T>, grid, dim3(T::kThreads), T::kSharedBytes, args);
}

// The smallest tile fits in 64 KiB, which every device has; the next one in the 99 KiB of most.
template <KvType kType, bool kSplit> void chooseWide(Stream& stream, const PrefillArgs& args) {
    constexpr bool kOneBuffer = kSplit && kType != KvType::BF16;
    using Large = WideTile<kType, kSplit, kSplit ? 32 : 64, kSplit ? 32 : 64>;
    using Middle = WideTile<kType, kSplit, 32, kSplit ? 16 : 32, kOneBuffer>;
    using Small = WideTile<kType, kSplit, 16, 16, kOneBuffer>;
    static_assert(Middle::kSharedBytes <= 99 * 1024 && Small::kSharedBytes <= 64 * 1024);
    if (fits<Large>(stream)) return launchWide<Large>(stream, args);
    if (fits<Middle>(stream)) return launchWide<Middle>(stream, args);
    launchWide<Small>(stream, args);
}

}  // namespace

void prefillWide(Stream& stream, const PrefillArgs& args) {
    withPrefillForm(
        args, [&](auto tag, auto split) { chooseWide<decltype(tag)::kType, decltype(split)::value>(stream, args); });
}

}  // namespace sharpi::cuda
