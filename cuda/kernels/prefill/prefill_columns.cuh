// What prefill's attention does if two warps share 16 rows, each with half of the output's elements. If tiles of keys
// are large enough, each also takes half of a tile's keys: the two exchange their maxima through shared memory, turn
// scores into weights, and read the weights of all keys from there. With 16 keys, on devices with little shared memory,
// each warp computes all weights for itself.
//
// A tile T is a ColumnTile, and says besides, in bytes, how far values are behind keys: kValuesAt.
#pragma once

#include "kernels/prefill/prefill.cuh"

namespace sharpi::cuda {

// kDim_: elements of a key, padded with zeros. kOutputs: elements of a value, likewise. kBuffers: of kKeys_ keys or
// values.
template <KvType kType_, bool kSplit_, int kDim_, int kOutputs, int kRows_, int kKeys_, int kBuffers>
struct ColumnTile {
    static constexpr KvType kType = kType_;
    static constexpr bool kRuled = true, kSplit = kSplit_, kSplitKv = kSplit && kType != KvType::BF16;
    static constexpr int kDim = kDim_, kHeads = 1, kRows = kRows_, kKeys = kKeys_;
    static constexpr int kColumns = 2, kWarpDim = kOutputs / kColumns, kThreads = 32 * kColumns * (kRows / 16);
    static constexpr bool kSharesScores = kKeys / kColumns % 16 == 0, kKeepsQueries = false;
    static constexpr int kWarpKeys = kSharesScores ? kKeys / kColumns : kKeys;
    static constexpr int kRowBytes = 2 * kDim, kChunks = kDim / 8;
    static constexpr int kQueryPartBytes = kRows * kRowBytes;  // hi or lo
    static constexpr int kPartBytes = kKeys * kRowBytes;       // keys or values, hi or lo
    static constexpr int kWeightPartBytes = kSharesScores ? kRows * kKeys * 2 : 0;
    // Shared memory: queries, buffers, weights, and a float for each row and column.
    static constexpr int kKeysAt = kQueryPartBytes * (kSplit ? 2 : 1);
    static constexpr int kBufferBytes = kPartBytes * (kSplitKv ? 2 : 1);
    static constexpr int kWeightsAt = kKeysAt + kBuffers * kBufferBytes;
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

// --- keys that are values ----------------------------------------------------------------------------------------

// A tile for heads that share one key, whose first elements are the value: it is brought to shared memory once and read
// twice, as it lies there for the scores, and turned for the outputs. Its buffers are stages of keys.
template <KvType kType, bool kSplit, int kDim, int kValueDim, int kRows, int kKeys, int kStages_>
struct KeyValueTile : ColumnTile<kType, kSplit, kDim, kValueDim, kRows, kKeys, kStages_> {
    static constexpr int kStages = kStages_;
    static constexpr int kValuesAt = 0;  // they are keys
};

// Runs over the keys. The copies of the queries are under way, and so is all that beginWarp() does. Keys says
//   first, end: the tiles [first, end)
//   find(t): looks up where the keys of tile t are; called before load(t), with a barrier between them
//   load(t, stage): starts the copies of tile t
//   mask(w, t): takes away the scores of keys that a row does not see
template <class T, class Keys>
__device__ __forceinline__ void attendKeyValues(PrefillWarp<T>& w, const PrefillArgs& args, uint8_t* shared,
                                                const Keys& keys) {
    const uint32_t queries = sharedAddress(shared), stages = queries + T::kKeysAt;
    const auto stageOf = [&](int t) { return stages + (t - keys.first) % T::kStages * T::kBufferBytes; };
    const auto load = [&](int t) {
        if (t < keys.end) keys.load(t, stageOf(t));
        closeCopies();
    };
    load(keys.first);
    keys.find(keys.first + 1);
    for (int t = keys.first; t < keys.end; t++) {
        waitForCopies<0>();
        __syncthreads();  // the keys are there, and the ones before them and their weights are used
        if constexpr (T::kStages == 2) load(t + 1);
        multiplyKeys<T>(w, queries, stageOf(t));
        if constexpr (T::kStages == 2) keys.find(t + 2);
        if (args.intoTanh != 0.0f) capScores<T>(w, args.intoTanh);
        keys.mask(w, t);
        weighTile<T>(w, shared, args.scale);
        if constexpr (T::kSharesScores) __syncthreads();  // the weights are there
        multiplyValues<T>(w, stageOf(t), queries + T::kWeightsAt);
        if constexpr (T::kStages == 1) {
            __syncthreads();  // the keys are used
            load(t + 1);
            keys.find(t + 2);
        }
    }
    if constexpr (T::kSharesScores) joinColumns<T>(w, shared);
}

// Calls f with the largest tile that fits in the device's shared memory, less `more` bytes. The second fits in the 99
// KiB that most devices have. The last fits in the 64 KiB that every device has: these earliest ones keep the high
// halves alone, which for an fp16 cache is all of it there.
template <KvType kType, bool kSplit, int kDim, int kValueDim, typename F>
void withKeyValueTile(const Stream& stream, size_t more, const F& f) {
    constexpr int kLargeStages = kSplit && kType != KvType::BF16 ? 1 : 2;
    using Large = KeyValueTile<kType, kSplit, kDim, kValueDim, kSplit ? 32 : 64, kSplit ? 32 : 64, kLargeStages>;
    using Middle = KeyValueTile<kType, kSplit, kDim, kValueDim, kSplit ? 16 : 32, kSplit ? 16 : 32, 1>;
    using Small = KeyValueTile<kType, false, kDim, kValueDim, 16, 16, 1>;
    static_assert(Middle::kSharedBytes <= 98 * 1024 && Small::kSharedBytes <= 63 * 1024);
    const auto fits = [&](size_t bytes) { return bytes + more <= stream.device().sharedPerBlock; };
    if (fits(Large::kSharedBytes)) return f(Large{});
    if (fits(Middle::kSharedBytes)) return f(Middle{});
    f(Small{});
}

}  // namespace sharpi::cuda
