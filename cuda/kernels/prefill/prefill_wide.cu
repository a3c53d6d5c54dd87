// Causal attention of many rows on tensor cores, for heads of 257 to 512 elements.
//
// A warp has no registers for 16 rows of 512 outputs, so two warps share 16 rows: see prefill_columns.cuh.
//
// Keys and values have one buffer each. Values arrive while queries are multiplied by keys, and the next keys while
// weights are multiplied by values. A smaller device has one buffer for both in turn.
#include "kernels/prefill/prefill_columns.cuh"

namespace sharpi::cuda {

namespace {

template <KvType kType, bool kSplit, int kRows, int kKeys, bool kOneBuffer_ = false>
struct WideTile : ColumnTile<kType, kSplit, 512, 512, kRows, kKeys, kOneBuffer_ ? 1 : 2> {
    static constexpr bool kOneBuffer = kOneBuffer_;
    static constexpr int kValuesAt = kOneBuffer ? 0 : WideTile::kBufferBytes;
};

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
    launchPrefill<T>(stream, attendWide<T>, args);
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
    withPrefillForm(args.pages.type, args.q.lo != nullptr, [&](auto tag, auto split) {
        chooseWide<decltype(tag)::kType, decltype(split)::value>(stream, args);
    });
}

}  // namespace sharpi::cuda
