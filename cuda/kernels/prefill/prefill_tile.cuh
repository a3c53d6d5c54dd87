// Causal attention of many rows on tensor cores, for heads of up to 256 elements: flash attention over the paged cache.
//
// A block takes one tile of query rows of one head, or of two heads of a group, and runs over the keys from the first
// that its first row sees to the last that its last row sees. A warp owns 16 of the rows, with their outputs, maxima
// and sums in registers (m16n8k16 products, whose accumulators are laid out like the next product's left operand). With
// one head, a warp spends as long on reading keys and values from shared memory as on multiplying them; with two heads
// it reads them once for both. The next tile of a bf16 cache arrives while this one is used. The last tiles of rows run
// first, since they have the most keys.
#pragma once

#include "kernels/prefill/prefill.cuh"

namespace sharpi::cuda {

// What a kernel is compiled for. kDim_: headDim padded with zeros to 32, 64, 128 or 256.
template <KvType kType_, int kDim_, bool kSplit_, int kHeads_, int kWarps_, int kKeys_, int kStages_, bool kRuled_>
struct PrefillTile {
    static constexpr KvType kType = kType_;
    static constexpr int kDim = kDim_, kHeads = kHeads_, kWarps = kWarps_, kKeys = kKeys_, kStages = kStages_;
    static constexpr bool kRuled = kRuled_, kSplit = kSplit_, kSplitKv = kSplit && kType != KvType::BF16;
    static constexpr int kRows = 16 * kWarps, kThreads = 32 * kWarps;
    static constexpr int kColumns = 1, kWarpDim = kDim, kWarpKeys = kKeys;
    static constexpr bool kSharesScores = false;
    static constexpr int kRowBytes = 2 * kDim, kChunks = kDim / 8;
    // Queries stay in registers if there is room. They pass through the last stage on their way there.
    static constexpr bool kKeepsQueries = !kSplit && kHeads == 1 && kDim <= 128 && kStages == 2 && kKeys >= kRows;
    static constexpr int kQueryPartBytes =
        kHeads * kRows * kRowBytes;  // hi or lo: the rows of one head, then those of the next
    static constexpr int kQueryBytes = kKeepsQueries ? 0 : kQueryPartBytes * (kSplit ? 2 : 1);
    static constexpr int kPartBytes = kKeys * kRowBytes;  // keys or values, hi or lo
    static constexpr int kValuesAt = kPartBytes * (kSplitKv ? 2 : 1), kStageBytes = 2 * kValuesAt;
    static constexpr int kSharedBytes = kQueryBytes + kStages * kStageBytes;
};

template <class T> __global__ void __launch_bounds__(T::kThreads) attendTile(PrefillArgs args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const PrefillPlace place = findPlace<T>(args);
    if (place.rows <= 0) return;
    const uint32_t base = sharedAddress(shared), stages = base + T::kQueryBytes;
    const uint32_t queries = T::kKeepsQueries ? stages + T::kStageBytes : base;
    const int firstTile = T::kRuled ? place.firstKey / T::kKeys : 0;
    loadQueries<T>(args, place, queries, queries + T::kQueryPartBytes);
    loadTile<T, BothHalves>(args, place, firstTile * T::kKeys, stages);
    closeCopies();
    PrefillWarp<T> w;
    beginWarp<T>(w, args, place, queries);
    const int firstPosition = args.batch.positions[place.firstRow], tiles = place.lastPosition / T::kKeys + 1;
    for (int t = firstTile; t < tiles; t++) {
        const uint32_t stage = stages + (T::kStages == 2 ? (t - firstTile) % 2 : 0) * T::kStageBytes;
        if constexpr (T::kStages == 2) {
            if (t + 1 < tiles)
                loadTile<T, BothHalves>(args, place, (t + 1) * T::kKeys,
                                        stages + (t + 1 - firstTile) % 2 * T::kStageBytes);
            closeCopies();
            waitForCopies<1>();
        } else {
            waitForCopies<0>();
        }
        __syncthreads();
        multiplyKeys<T>(w, queries, stage);
        if constexpr (T::kRuled) {
            if (args.intoTanh != 0.0f) capScores<T>(w, args.intoTanh);
        }
        if (needsMask<T>(place, firstPosition, t * T::kKeys)) maskScores<T>(w, args.reach, t * T::kKeys);
#pragma unroll
        for (int h = 0; h < T::kHeads; h++) {
            float kept[2];
#pragma unroll
            for (int r = 0; r < 2; r++) kept[r] = weighRow<T>(w, h, r, largestScore<T>(w, h, r), args.scale);
            rescale<T>(w, h, kept);
        }
        multiplyValues<T>(w, stage + T::kValuesAt);
        __syncthreads();
        if constexpr (T::kStages == 1) {
            if (t + 1 < tiles) loadTile<T, BothHalves>(args, place, (t + 1) * T::kKeys, stages);
            closeCopies();
        }
    }
    store<T>(w, args, place);
}

// --- launching ---------------------------------------------------------------------------------------------------

template <class T> void launchTiles(Stream& stream, const PrefillArgs& args) {
    launchPrefill<T>(stream, attendTile<T>, args);
}

template <KvType kType, bool kSplit, int kDim, bool kRuled> void chooseTile(Stream& stream, const PrefillArgs& args) {
    using Large = PrefillTile<kType, kDim, kSplit, 1, 4, 64, kType == KvType::BF16 ? 2 : 1, kRuled>;
    if constexpr (!kSplit && kDim <= 128) {  // where a warp has the registers for two heads
        using Twofold = PrefillTile<kType, kDim, kSplit, 2, 4, 64, 2, kRuled>;
        const bool isPaired = args.shape.heads / args.shape.kvHeads % 2 == 0;
        if (isPaired && Twofold::kSharedBytes <= stream.device().sharedPerBlock)
            return launchTiles<Twofold>(stream, args);
    }
    if constexpr (Large::kSharedBytes > 64 * 1024) {  // what every device has
        if (Large::kSharedBytes > stream.device().sharedPerBlock)
            return launchTiles<PrefillTile<kType, kDim, kSplit, 1, 2, 16, 1, kRuled>>(stream, args);
    }
    launchTiles<Large>(stream, args);
}

template <KvType kType, bool kSplit, bool kRuled> void chooseDim(Stream& stream, const PrefillArgs& args) {
    if (args.shape.headDim <= 32) return chooseTile<kType, kSplit, 32, kRuled>(stream, args);
    if (args.shape.headDim <= 64) return chooseTile<kType, kSplit, 64, kRuled>(stream, args);
    if (args.shape.headDim <= 128) return chooseTile<kType, kSplit, 128, kRuled>(stream, args);
    chooseTile<kType, kSplit, 256, kRuled>(stream, args);
}

template <bool kRuled> void attendTiles(Stream& stream, const PrefillArgs& args) {
    withPrefillForm(args.pages.type, args.q.lo != nullptr, [&](auto tag, auto split) {
        chooseDim<decltype(tag)::kType, decltype(split)::value, kRuled>(stream, args);
    });
}

}  // namespace sharpi::cuda
