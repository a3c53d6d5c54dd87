// The sums of a warp of a wide tile: accumulators in registers, and what waits for others of its level of the
// contract's tree, mostly in shared memory.
#pragma once

#include "kernels/matvec/mma/wide_layout.cuh"

namespace sharpi::cuda {

template <typename Layout> class WideSums {
    static constexpr int kOwn = Layout::kOwn, kTiles = Layout::kTiles, kSumCount = Layout::kSumCount,
                         kHeldLevels = Layout::kHeldLevels;

public:
    using Values = float[kOwn][kTiles][4];
    Values acc;

    // at: the warp's Layout::kWarpSumBytes of shared memory. Those of the warps of a team are neighbours.
    __device__ __forceinline__ explicit WideSums(uint32_t at) : _at(at) { begin(); }

    // Begins an item.
    __device__ __forceinline__ void begin() {
        _turn = 0;
        fill(acc, 0.0f);
        fill(_held, -0.0f);
    }
    // Joins the finished accumulators with what waits for them. If nothing waits, that is -0, which adds nothing to any
    // float: the sums that are held change in place, and the compiler need not copy them.
    __device__ __forceinline__ void endTurn() {
#pragma unroll
        for (int i = 0; i < kSumCount; ++i) part(_held, i) = __fadd_rn(part(_held, i), part(acc, i));
        fill(acc, 0.0f);
        if (_turn & 1) {
            endLevel<1>(_held);
            fill(_held, -0.0f);
        }
        ++_turn;
    }
    // After the last turn of all warps: one of a lane's values, as each warp of the team has it. at: as above.
    template <int kSlices>
    static __device__ __forceinline__ void read(uint32_t at, int own, int tile, int c, float (&v)[kSlices]) {
        const uint32_t team = at - Layout::slice() * Layout::kWarpSumBytes;
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
            float one[1];
            readShared(team + s * Layout::kWarpSumBytes + (own * kTiles + tile) * 512 + Layout::lane() * 16 + c * 4,
                       one);
            v[s] = one[0];
        }
    }

private:
    static __device__ __forceinline__ float& part(Values& values, int i) {
        return values[i / (4 * kTiles)][i / 4 % kTiles][i % 4];
    }
    static __device__ __forceinline__ void fill(Values& values, float value) {
#pragma unroll
        for (int i = 0; i < kSumCount; ++i) part(values, i) = value;
    }
    // What endTurn() does with finished sums of a level.
    template <int kLevel> __device__ __forceinline__ void endLevel(Values& sum) {
        if constexpr (kLevel == Layout::kLevels) {
            store(0, sum);  // the slice's sums, where other slices look for them
        } else {
            if (!(_turn >> kLevel & 1)) return store(kLevel - kHeldLevels, sum);
            Values joined;
#pragma unroll
            for (int i = 0; i < kSumCount; i += 4) {
                float waiting[4];
                readShared(_at + (kLevel - kHeldLevels) * Layout::kLevelBytes + i * 128 + Layout::lane() * 16, waiting);
#pragma unroll
                for (int c = 0; c < 4; ++c) part(joined, i + c) = __fadd_rn(waiting[c], part(sum, i + c));
            }
            endLevel<kLevel + 1>(joined);
        }
    }
    // A lane's four values of a fragment lie side by side.
    __device__ __forceinline__ void store(int level, Values& sum) const {
#pragma unroll
        for (int i = 0; i < kSumCount; i += 4)
            writeShared(_at + level * Layout::kLevelBytes + i * 128 + Layout::lane() * 16,
                        sum[i / (4 * kTiles)][i / 4 % kTiles]);
    }

    Values _held;  // the lowest level
    uint32_t _at;
    int _turn;
};

}  // namespace sharpi::cuda
