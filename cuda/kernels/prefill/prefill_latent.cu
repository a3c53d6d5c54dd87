// Causal attention of many rows over latents, on tensor cores: see KeyValueTile. A block takes one head of a tile of
// query rows, as for other heads. The heads of a tile run at the same time and find the keys in the L2 cache.
#include "kernels/attention/latent_shape.h"
#include "kernels/prefill/prefill_columns.cuh"

namespace sharpi::cuda {

namespace {

template <class T> struct PagesOfLatents {
    const PrefillArgs& args;
    const PrefillPlace& place;
    int first, end, firstPosition;

    __device__ __forceinline__ PagesOfLatents(const PrefillArgs& a, const PrefillPlace& p)
        : args(a),
          place(p),
          first(p.firstKey / T::kKeys),
          end(p.lastPosition / T::kKeys + 1),
          firstPosition(a.batch.positions[p.firstRow]) {}
    __device__ __forceinline__ void find(int) const {}
    __device__ __forceinline__ void load(int t, uint32_t stage) const {
        loadTile<T, KeysAlone>(args, place, t * T::kKeys, stage);
    }
    __device__ __forceinline__ void mask(PrefillWarp<T>& w, int t) const {
        if (needsMask<T>(place, firstPosition, t * T::kKeys)) maskScores<T>(w, args.reach, t * T::kKeys);
    }
};

template <class T> __global__ void __launch_bounds__(T::kThreads) attendLatents(PrefillArgs args) {
    allowNext();
    waitForPrevious();
    extern __shared__ __align__(128) uint8_t shared[];
    const PrefillPlace place = findPlace<T>(args);
    if (place.rows <= 0) return;
    const uint32_t queries = sharedAddress(shared);
    loadQueries<T>(args, place, queries, queries + T::kQueryPartBytes);
    PrefillWarp<T> w;
    beginWarp<T>(w, args, place, queries);
    attendKeyValues<T>(w, args, shared, PagesOfLatents<T>(args, place));
    store<T>(w, args, place);
}

// --- launching ---------------------------------------------------------------------------------------------------

template <KvType kType, bool kSplit, typename F> void withTile(const Stream& stream, int32_t headDim, const F& f) {
    constexpr int kUsual = kMaxLatentRank + 64, kMost = kMaxLatentRank + kMaxLatentRotated;
    if (headDim <= kUsual) return withKeyValueTile<kType, kSplit, kUsual, kMaxLatentRank>(stream, 0, f);
    return withKeyValueTile<kType, kSplit, kMost, kMaxLatentRank>(stream, 0, f);
}

}  // namespace

void prefillLatent(Stream& stream, const PrefillArgs& args) {
    withPrefillForm(args.pages.type, args.q.lo != nullptr, [&](auto tag, auto split) {
        withTile<decltype(tag)::kType, decltype(split)::value>(stream, args.shape.headDim, [&](auto tile) {
            launchPrefill<decltype(tile)>(stream, attendLatents<decltype(tile)>, args);
        });
    });
}

}  // namespace sharpi::cuda
