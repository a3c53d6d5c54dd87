// How a warp multiplies rows of weights by a few rows of activations. All kernels of matvec.h share this code.
//
// A warp owns whole rows and works on two at once. A lane owns the accumulator with its number (core/contract.h): it
// has blocks lane, lane + 32, ... of a quantized row, or those elements of a float row. So the sum needs no order but
// each lane's own, and a load of activations serves two rows. Few warps have to keep the memory busy. They do it as
// follows:
//
// - The rows of a warp are one stream of steps. In a step, each lane has a block or eight float elements. Loads always
//   run a few steps ahead, past the end of one pair of rows into the next.
// - No kernel writes weights. So the first loads are issued before the predecessor has ended, and overlap with its
//   end; a part of the following float weights is prefetched into the L2 cache. Activations are copied to shared memory
//   afterwards, once for each block: that waits for the L2 cache once instead of in every step.
// - Integers become floats by an addition: the bits of 1.5 * 2^23 plus n are the float 12582912 + n for |n| < 2^22. So
//   dp4a sums that start there are floats already, and one fma takes the constant off and multiplies by the
//   activations' scale, which has few enough bits for that to round once.
#pragma once

#include "core/contract.h"
#include "device/copies.cuh"
#include "device/launch.cuh"
#include "kernels/formats/formats.cuh"
#include "kernels/matvec/matvec.h"

namespace sharpi::cuda {

constexpr int kMatvecWarps = 8;
constexpr int kMatvecThreads = kMatvecWarps * 32;
// Shared memory that every device grants without allowShared(). Activations that need more are read through the L1
// cache.
constexpr size_t kMatvecSharedBytes = 48 * 1024;

// Makes the compiler keep a value instead of computing it again in every step.
__device__ __forceinline__ void keep(const uint8_t*& address) { asm volatile("" : "+l"(address)); }
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// --- the L2 cache ---------------------------------------------------------------------------------------------------

// Bytes that a launch may prefetch into the cache beyond the loads in flight.
constexpr int64_t kAheadBytes = 12 * 1024 * 1024;

// --- activations in shared memory ----------------------------------------------------------------------------------

// Loads by address, because the compiler would compute each address from the block's window again.
template <int kOffset> __device__ __forceinline__ uint4 loadShared4(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at), "n"(kOffset));
    return v;
}
__device__ __forceinline__ uint2 loadShared2(uint32_t at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
}

__device__ __forceinline__ void finishCopies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

// --- quantized rows --------------------------------------------------------------------------------------------------

constexpr float kIntegerBias = 12582912.0f;
constexpr int kIntegerBiasBits = 0x4b400000;

// The value of a sum that started at kIntegerBiasBits.
__device__ __forceinline__ float unbiased(int biased) { return __fsub_rn(__int_as_float(biased), kIntegerBias); }
__device__ __forceinline__ float exactFloat(int n) { return unbiased(n + kIntegerBiasBits); }

// factor0 * (low half of pair) + factor1 * (high half of pair) + c. pair holds two int16; the factors fit in int8.
__device__ __forceinline__ int addPair(int pair, int factor0, int factor1, int c) {
    return __dp2a_lo(pair, (factor0 & 255) | (factor1 & 255) << 8, c);
}

// Like __dp4a, but the bytes of a are unsigned.
__device__ __forceinline__ int addUnsigned(uint32_t a, uint32_t b, int c) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
    return out;
}

// bits & mask | into, as one instruction. The compiler would split it up to combine constants.
__device__ __forceinline__ uint32_t insert(uint32_t bits, uint32_t mask, uint32_t into) {
    uint32_t out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(bits), "r"(mask), "r"(into));
    return out;
}

// A block of activations.
struct QuantizedBlock {
    uint32_t q[8];
    float scale;
    int sums;
};

// The product of a block's scale and an integer, rounded once. biased: the integer plus kIntegerBias.
__device__ __forceinline__ float scaled(float scale, float biased) {
    return fmaf(scale, biased, __fmul_rn(scale, -kIntegerBias));
}

// The numbers of Scales, as floats.
struct FloatScales {
    float d, m, sub0, sub1, min0, min1;
};

// What a block's sums are multiplied by: those of its quants (or of the halves of them), and those of its activations.
struct BlockFactors {
    float dot0, dot1, min0, min1;
};
template <DType D> __device__ __forceinline__ BlockFactors blockFactors(const FloatScales& s) {
    using F = Format<D>;
    BlockFactors f = {__fmul_rn(s.d, s.sub0), 0.0f, 0.0f, 0.0f};
    if (F::kTwoScales) f.dot1 = __fmul_rn(s.d, s.sub1);
    if (F::kTwoFloats) f.dot1 = s.m;
    if (F::kHasMin) f.min0 = __fmul_rn(s.m, s.min0);
    if (F::kHasMin && F::kTwoScales) f.min1 = __fmul_rn(s.m, s.min1);
    return f;
}

template <DType D> __device__ __forceinline__ FloatScales floatScales(const typename Format<D>::Raw& raw, int j) {
    if constexpr (D == DType::Q4_K || D == DType::Q5_K) {
        // The bits of (kIntegerBias + sub) and of (kIntegerBias + 16 min) are assembled in place: after a rotation, the
        // upper two bits of both stand above a nibble.
        const uint4& words = raw.scale;
        const uint32_t low = permute(words.z, words.w, j), high = __funnelshift_r(words.y, words.y, 4 * j - 4);
        const uint32_t sub = insert(low, 0x0f, insert(high, 0x30, kIntegerBiasBits));
        const uint32_t min = insert(low, 0xf0, insert(high << 2, 0x300, kIntegerBiasBits));
        const float subValue = unbiased(static_cast<int>(sub)),
                    minValue = fmaf(__uint_as_float(min), 0.0625f, kIntegerBias * -0.0625f);
        return {floatOfLowHalf(words.x), -floatOfHighHalf(words.x), subValue, subValue, minValue, minValue};
    } else if constexpr (D == DType::Q6_K) {
        // The bytes of both subs, plus 128, in the last places of kIntegerBias.
        const uint32_t subs = raw.scale ^ 0x8080u;
        const auto sub = [&](uint32_t selector) {
            return __fsub_rn(__uint_as_float(permute(subs, kIntegerBiasBits, selector)), kIntegerBias + 128.0f);
        };
        return {floatOfLowHalf(raw.d), 0.0f, sub(0x7650), sub(0x7651), 0.0f, 0.0f};
    } else {
        const Scales s = Format<D>::scales(raw, j);
        return {s.d, s.m, exactFloat(s.sub0), exactFloat(s.sub1), exactFloat(s.min0), exactFloat(s.min1)};
    }
}

template <DType D, bool isFloat = isFloatType(D)> struct Steps;

template <DType D> struct Steps<D, false> {
    using F = Format<D>;
    using Raw = typename F::Raw;
    static constexpr int kStep = 32;  // units (blocks) of a row in a step: one for each lane
    static constexpr int kUnitElements = 32;

    // --- weights

    using Base = Planes;  // those of a matrix
    // The number of a block in a matrix. Indices take fewer registers than addresses, and no more instructions.
    using Index = uint32_t;
    static __device__ __forceinline__ Base base(const uint8_t* data, const PackedShape& shape) {
        Base planes = PlanesOf<D>::begin(data, shape);
        keep(planes.plane[0]);
        keep(planes.plane[1]);
        if constexpr (PlanesOf<D>::template kBytes<2> != 0) keep(planes.plane[2]);
        if constexpr (PlanesOf<D>::template kBytes<3> != 0) keep(planes.plane[3]);
        return planes;
    }
    // Lanes past the row's end load its last block and do not add it.
    static __device__ __forceinline__ Raw load(const Base& base, Index first, int units, int step, int lane) {
        return F::loadAt(PlanesOf<D>::at(base, first + min(step * kStep + lane, units - 1)), lane % 8);
    }
    static __device__ __forceinline__ void fetchAhead(const Base& base, Index first, int64_t units) {
        PlanesOf<D>::fetchAhead(base, first, units);
    }

    // --- activations

    // A row in shared memory has, for each step, the lanes' first 16 elements, then their last 16, then scales and
    // sums.
    static constexpr int kStepBytes = 32 * (16 + 16 + 8);
    struct SharedInput {
        uint32_t wide, narrow;  // the lane's places in the first step
        int steps;
        __device__ __forceinline__ QuantizedBlock read(int row, int step, int, int) const {
            const uint32_t offset = static_cast<uint32_t>((row * steps + step) * kStepBytes);
            const uint4 first = loadShared4<0>(wide + offset), second = loadShared4<512>(wide + offset);
            const uint2 ends = loadShared2(narrow + offset);
            return {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w},
                    __uint_as_float(ends.x),
                    static_cast<int>(ends.y)};
        }
    };
    struct GlobalInput {
        const uint4* q;
        const float* scale;
        const int32_t* sums;
        __device__ __forceinline__ QuantizedBlock read(int row, int step, int lane, int units) const {
            const int b = min(step * 32 + lane, units - 1);
            const uint4 first = q[row * 2 * units + b], second = q[(row * 2 + 1) * units + b];
            return {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w},
                    scale[row * units + b],
                    sums[row * units + b]};
        }
    };
    static size_t sharedBytes(int64_t rows, int64_t cols) {
        return static_cast<size_t>(rows * ((cols + 1023) / 1024) * kStepBytes);
    }
    static __device__ __forceinline__ GlobalInput inGlobal(const MatvecInput& x, int64_t firstRow, int cols) {
        const int64_t blocks = firstRow * (cols / 32);
        return {reinterpret_cast<const uint4*>(x.quantized.q) + blocks * 2, x.quantized.scale + blocks,
                x.quantized.sums + blocks};
    }
    static __device__ __forceinline__ SharedInput toShared(const GlobalInput& from, uint8_t* shared, int rows,
                                                           int cols) {
        const int blocks = cols / 32, steps = (blocks + 31) / 32;
        for (int row = 0; row < rows; ++row) {
            for (int i = threadIdx.x; i < 2 * blocks; i += blockDim.x) {
                const int second = i >= blocks, b = second ? i - blocks : i;
                uint8_t* step = shared + (row * steps + b / 32) * kStepBytes;
                copyToShared<16>(step + second * 512 + b % 32 * 16, from.q + row * 2 * blocks + i);
                copyToShared<4>(
                    step + 1024 + b % 32 * 8 + second * 4,
                    second ? static_cast<const void*>(from.sums + row * blocks + b) : from.scale + row * blocks + b);
            }
        }
        uint32_t wide = sharedAddress(shared) + threadIdx.x % 32 * 16,
                 narrow = sharedAddress(shared) + threadIdx.x % 32 * 8 + 1024;
        keep(wide);
        keep(narrow);
        return {wide, narrow, steps};
    }

    // --- sums

    static constexpr bool kPlainNibbles = D == DType::Q4_0 || D == DType::Q4_1 || D == DType::Q4_K;
    static constexpr int kOffset = F::kOffset;

    // s * I of the block, for types with one scale for each block.
    static __device__ __forceinline__ float dot(const uint32_t (&codes)[8], const QuantizedBlock& x) {
        int sum = kOffset ? addPair(x.sums, -kOffset, -kOffset, kIntegerBiasBits) : kIntegerBiasBits;
#pragma unroll
        for (int k = 0; k < 8; ++k) sum = __dp4a(static_cast<int>(codes[k]), static_cast<int>(x.q[k]), sum);
        return scaled(x.scale, __int_as_float(sum));
    }
    // The same, with nibbles in place. The high ones count 16 times too much, so their sum is divided by 16 as a float,
    // and its bias too: the low sum starts with the rest of the bias. Adding both floats is exact.
    static __device__ __forceinline__ float nibbleDot(const uint4& words, const QuantizedBlock& x) {
        const uint32_t w[4] = {words.x, words.y, words.z, words.w};
        constexpr int kRest = kIntegerBiasBits - static_cast<int>(kIntegerBias) / 16;
        int low = kOffset ? addPair(x.sums, -kOffset, -kOffset, kRest) : kRest, high = kIntegerBiasBits;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            low = addUnsigned(w[k] & 0x0f0f0f0fu, x.q[k], low);
            high = addUnsigned(w[k] & 0xf0f0f0f0u, x.q[4 + k], high);
        }
        return scaled(x.scale, fmaf(__int_as_float(high), 0.0625f, __int_as_float(low)));
    }

    // The accumulator after the minima of a block.
    static __device__ __forceinline__ float addMinima(const BlockFactors& w, const QuantizedBlock& x, float acc) {
        if (!F::kHasMin) return acc;
        const auto sum = [&](int first, int second) {
            return scaled(x.scale, __int_as_float(addPair(x.sums, first, second, kIntegerBiasBits)));
        };
        if (!F::kTwoScales) return fmaf(w.min0, sum(1, 1), acc);
        return fmaf(w.min1, sum(0, 1), fmaf(w.min0, sum(1, 0), acc));
    }
    // The accumulator after a block.
    static __device__ __forceinline__ float addBlock(const uint32_t (&codes)[8], const BlockFactors& w,
                                                     const QuantizedBlock& x, float acc) {
        if (!F::kTwoScales && !F::kTwoFloats) return addMinima(w, x, fmaf(w.dot0, dot(codes, x), acc));
        int dot0 = kOffset ? addPair(x.sums, -kOffset, 0, kIntegerBiasBits) : kIntegerBiasBits;
        int dot1 = kOffset ? addPair(x.sums, 0, -kOffset, kIntegerBiasBits) : kIntegerBiasBits;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            dot0 = __dp4a(static_cast<int>(codes[k]), static_cast<int>(x.q[k]), dot0);
            dot1 = __dp4a(static_cast<int>(codes[4 + k]), static_cast<int>(x.q[4 + k]), dot1);
        }
        acc = fmaf(w.dot0, scaled(x.scale, __int_as_float(dot0)), acc);
        acc = fmaf(w.dot1, scaled(x.scale, __int_as_float(dot1)), acc);
        return addMinima(w, x, acc);
    }

    // rowOf(t): the number of the row of x. acc[t][r] belongs to weight row r.
    template <int T, typename Input, typename RowOf>
    static __device__ __forceinline__ void add(const Raw (&raw)[2], const Input& x, const RowOf& rowOf, int units,
                                               int step, int lane, float (&acc)[T][2]) {
        const bool inside = step < (units - lane + 31) / 32;
        const BlockFactors factors[2] = {blockFactors<D>(floatScales<D>(raw[0], lane % 8)),
                                         blockFactors<D>(floatScales<D>(raw[1], lane % 8))};
        if constexpr (kPlainNibbles && T <= 2) {
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const QuantizedBlock block = x.read(rowOf(t), step, lane, units);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float sum =
                        addMinima(factors[r], block, fmaf(factors[r].dot0, nibbleDot(raw[r].codes, block), acc[t][r]));
                    acc[t][r] = inside ? sum : acc[t][r];
                }
            }
        } else {
            uint32_t codes[2][8];
            F::codes(raw[0], codes[0]);
            F::codes(raw[1], codes[1]);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const QuantizedBlock block = x.read(rowOf(t), step, lane, units);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float sum = addBlock(codes[r], factors[r], block, acc[t][r]);
                    acc[t][r] = inside ? sum : acc[t][r];
                }
            }
        }
    }
};

// --- float rows ------------------------------------------------------------------------------------------------------

template <DType D> struct FloatElement {
    using Type = uint16_t;
    static __device__ __forceinline__ float value(uint16_t bits) {
        return D == DType::BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16)
                                : __half2float(__ushort_as_half(bits));
    }
};
template <> struct FloatElement<DType::F32> {
    using Type = float;
    static __device__ __forceinline__ float value(float v) { return v; }
};

template <DType D> struct Steps<D, true> {
    using Element = typename FloatElement<D>::Type;
    static constexpr int kAhead = 8;
    static constexpr int kStep = 32 * kAhead;  // units (elements) of a row in a step
    static constexpr int kUnitElements = 1;
    struct Raw {
        Element v[kAhead];
    };

    using Base = const Element*;
    using Index = int64_t;
    static __device__ __forceinline__ Base base(const uint8_t* data, const PackedShape&) {
        return reinterpret_cast<const Element*>(data);
    }
    static __device__ __forceinline__ Raw load(Base base, Index first, int units, int step, int lane) {
        const int at = step * kStep + lane;
        const Element* from = base + first + at;
        Raw raw;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) raw.v[u] = at + 32 * u < units ? __ldg(from + 32 * u) : Element{};
        return raw;
    }
    static __device__ __forceinline__ void fetchAhead(Base base, Index first, int64_t units) {
        fetchToCache(base + first, base + first + units);
    }

    struct SharedInput {
        const float* x;
        __device__ __forceinline__ float read(int row, int i, int units) const { return x[row * units + i]; }
    };
    struct GlobalInput {
        const float* x;
        __device__ __forceinline__ float read(int row, int i, int units) const {
            return x[static_cast<int64_t>(row) * units + i];
        }
    };
    static size_t sharedBytes(int64_t rows, int64_t cols) { return static_cast<size_t>(rows * cols) * sizeof(float); }
    static __device__ __forceinline__ GlobalInput inGlobal(const MatvecInput& x, int64_t firstRow, int cols) {
        return {x.floats + firstRow * cols};
    }
    static __device__ __forceinline__ SharedInput toShared(const GlobalInput& from, uint8_t* shared, int rows,
                                                           int cols) {
        float* to = reinterpret_cast<float*>(shared);
        const int count = rows * cols, quads = reinterpret_cast<uintptr_t>(from.x) % 16 == 0 ? count / 4 : 0;
        for (int i = threadIdx.x; i < quads; i += blockDim.x) copyToShared<16>(to + 4 * i, from.x + 4 * i);
        for (int i = 4 * quads + threadIdx.x; i < count; i += blockDim.x) copyToShared<4>(to + i, from.x + i);
        return {to};
    }

    template <int T, typename Input, typename RowOf>
    static __device__ __forceinline__ void add(const Raw (&raw)[2], const Input& x, const RowOf& rowOf, int units,
                                               int step, int lane, float (&acc)[T][2]) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int i = step * kStep + u * 32 + lane;
            if (i >= units) continue;
            const float w0 = FloatElement<D>::value(raw[0].v[u]), w1 = FloatElement<D>::value(raw[1].v[u]);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const float value = x.read(rowOf(t), i, units);
                acc[t][0] = fmaf(w0, value, acc[t][0]);
                acc[t][1] = fmaf(w1, value, acc[t][1]);
            }
        }
    }
};

// The rows from `firstRow` on. With kShared, copies them to shared memory, and finishCopies() must follow; else they
// are read in place.
template <typename S, bool kShared>
__device__ __forceinline__ auto activations(const MatvecInput& x, int64_t firstRow, int rows, int cols,
                                            uint8_t* shared) {
    const auto global = S::inGlobal(x, firstRow, cols);
    if constexpr (kShared) {
        return S::toShared(global, shared, rows, cols);
    } else {
        return global;
    }
}

// --- the stream of steps ---------------------------------------------------------------------------------------------

// Two rows of weights. Each has the base of its matrix, and the number of its first unit (block or element) there.
template <DType D> struct RowPair {
    typename Steps<D>::Base base[2];
    typename Steps<D>::Index first[2];
};

// Steps in flight, and the blocks of 256 threads that must fit on a multiprocessor together. A step of floats is a
// small part of a row, and small float matrices have few warps.
constexpr int stepsAhead(DType type, int rows) { return isFloatType(type) && rows == 1 ? 4 : 2; }
constexpr int minBlocks(DType type, int rows) { return isFloatType(type) || rows > 1 ? 2 : 3; }

// Goes through the items (pairs of rows) of a warp with the loads of kStages steps in flight. place(item) returns a
// RowPair.
template <DType D, int T, int kStages = stepsAhead(D, T)> class Pipeline {
    static_assert(kStages == 2 || kStages == 4);

public:
    using S = Steps<D>;

    __device__ __forceinline__ Pipeline(int cols, int items)
        : _units(cols / S::kUnitElements),
          _steps((_units + S::kStep - 1) / S::kStep),
          _items(items),
          _lane(threadIdx.x % 32) {}

    // Prefetches `count` of the rows' units from `first` on into the L2 cache, unless the first loads already cover
    // all.
    __device__ __forceinline__ void fetchAhead(const typename S::Base& base, typename S::Index first,
                                               int64_t count) const {
        if (_lane == 0 && _items * _steps > kStages && count > 0) S::fetchAhead(base, first, count);
    }

    // Issues the first loads.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        if (_items <= 0) return;
        _rows = place(0);
#pragma unroll
        for (int i = 0; i < kStages; ++i) fetch(_stages[i], place);
    }

    // rowOf(item, t): the number of the row of x. done(item, acc) receives every finished pair, with its accumulators
    // not yet summed up.
    template <typename Input, typename Place, typename RowOf, typename Done>
    __device__ __forceinline__ void run(const Input& x, const Place& place, const RowOf& rowOf, const Done& done) {
        if (_items <= 0) return;
        float acc[T][2] = {};
        int item = 0, step = 0, turns = _items * _steps;
        // Computes the step that a stage holds, then reloads the stage.
        const auto turn = [&](typename S::Raw(&stage)[2]) {
            S::template add<T>(stage, x, [&](int t) { return rowOf(item, t); }, _units, step, _lane, acc);
            fetch(stage, place);
            if (++step < _steps) return;
            done(item, acc);
            ++item;
            step = 0;
#pragma unroll
            for (int t = 0; t < T; ++t) acc[t][0] = acc[t][1] = 0.0f;
        };
        // Written out, so that the stages stay in registers.
        while (true) {
            turn(_stages[0]);
            if (--turns == 0) return;
            turn(_stages[1]);
            if (--turns == 0) return;
            if constexpr (kStages == 4) {
                turn(_stages[2]);
                if (--turns == 0) return;
                turn(_stages[3]);
                if (--turns == 0) return;
            }
        }
    }

private:
    template <typename Place> __device__ __forceinline__ void fetch(typename S::Raw (&stage)[2], const Place& place) {
        if (_item >= _items) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) stage[r] = S::load(_rows.base[r], _rows.first[r], _units, _step, _lane);
        if (++_step < _steps) return;
        _step = 0;
        if (++_item < _items) _rows = place(_item);
    }

    const int _units, _steps, _items, _lane;
    typename S::Raw _stages[kStages][2];
    RowPair<D> _rows;
    int _item = 0, _step = 0;  // the item and step to load next
};

// The sums of the accumulators of N rows (a power of two up to 32), in the contract's order. Lane l gets the sum of row
// l / (32 / N). In each round two groups of lanes would compute the same sums, so each takes half of the rows instead.
template <int N, int kWidth = 16> __device__ __forceinline__ float sumAccumulators(const float (&v)[N], int lane) {
    if constexpr (N > 1) {
        const bool upper = lane & kWidth;
        float rest[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float kept = upper ? v[i + N / 2] : v[i], given = upper ? v[i] : v[i + N / 2];
            rest[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, kWidth));
        }
        return sumAccumulators<N / 2, kWidth / 2>(rest, lane);
    } else {
        float sum = v[0];
#pragma unroll
        for (int width = kWidth; width >= 1; width /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, width));
        return sum;
    }
}

// The same for acc[t][r]. Lane l gets the sum with 2 t + r = l / (32 / (2 T)).
template <int T> __device__ __forceinline__ float sumPairs(const float (&acc)[T][2], int lane) {
    float v[2 * T];
#pragma unroll
    for (int t = 0; t < T; ++t) v[2 * t] = acc[t][0], v[2 * t + 1] = acc[t][1];
    return sumAccumulators(v, lane);
}

// The units of its rows that each warp prefetches. All warps that run at once share kAheadBytes. Quantized rows are
// faster without: their loads reach far enough ahead, and prefetches would queue before them in the L1 cache.
inline int32_t aheadUnits(const Stream& stream, DType type, int64_t blocks) {
    if (!isFloatType(type)) return 0;
    const int64_t atOnce = static_cast<int64_t>(stream.device().multiprocessors) * minBlocks(type, 1);
    const int64_t bytes = kAheadBytes / (kMatvecWarps * (blocks < atOnce ? blocks : atOnce));
    return static_cast<int32_t>(bytes / static_cast<int64_t>(rowBytes(type, 1)));
}

// --- choosing a kernel -----------------------------------------------------------------------------------------------

template <int T, bool shared, bool experts> struct Variant {
    static constexpr int kRows = T;
    static constexpr bool kShared = shared, kExperts = experts;
};

// The most rows of these kernels. On devices with int8 tensor cores, more rows of quantized types are multiplied there
// from kMmaFromRows on.
constexpr int kPlainMatvecRows = 8;

// Whether int8 tensor cores can multiply weights of this type.
inline bool hasMma(const Stream& stream, DType type) { return !isFloatType(type) && stream.device().codeVersion >= 80; }
inline bool usesMma(const Stream& stream, DType type, int rows) { return rows >= kMmaFromRows && hasMma(stream, type); }

// Calls f(Variant{}) for `rows` rows of activations, which take `bytes` of shared memory. Rare types have no kernels
// for two and four rows: those for eight take them too.
template <DType D, typename F> void withVariant(int rows, size_t bytes, bool experts, F&& f) {
    if (rows < 1 || rows > kPlainMatvecRows)
        throw Error(ErrorKind::Internal, "a matrix-vector product of " + std::to_string(rows) + " rows");
    if (experts) return bytes <= kMatvecSharedBytes ? f(Variant<1, true, true>{}) : f(Variant<1, false, true>{});
    if (rows == 1 && bytes <= kMatvecSharedBytes) return f(Variant<1, true, false>{});
    if constexpr (!isRareType(D)) {
        if (rows == 2 && bytes <= kMatvecSharedBytes) return f(Variant<2, true, false>{});
        if (rows <= 4) return f(Variant<4, false, false>{});
    }
    f(Variant<8, false, false>{});
}

inline void checkRows(int rows) {
    if (rows < 0 || rows > kMaxMatvecRows)
        throw Error(ErrorKind::Internal, "a matrix-vector product of " + std::to_string(rows) + " rows");
}

// Throws Error(Internal) if the kernels' 32-bit indices do not reach the whole matrix.
inline void checkShape(const Matrix& w) {
    if (w.cols >= 1 && w.cols <= int64_t{1} << 26 && w.rows <= int64_t{1} << 30 &&
        w.rows * (w.cols / 32) < int64_t{1} << 32)
        return;
    throw Error(ErrorKind::Internal,
                "no kernel multiplies a matrix of " + std::to_string(w.rows) + " x " + std::to_string(w.cols));
}

}  // namespace sharpi::cuda
