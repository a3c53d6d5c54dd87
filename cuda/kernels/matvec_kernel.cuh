// How a warp multiplies rows of weights with a few rows of activations: what all kernels of matvec.h have in common.
//
// A warp owns whole rows and works on two at once; a lane owns the accumulator of its number (core/contract.h): of a
// quantized row the blocks lane, lane + 32, ..., of a float row the elements. So the sum needs no order but each lane's
// own, and what is loaded from the activations serves two rows. Memory has to be kept busy by few warps, therefore:
//
// - The rows of a warp are one stream of steps (a step is a block, or eight float elements, a lane), through which a
//   few steps of loads always run ahead, over the end of one pair of rows into the next.
// - Weights are written by no kernel: the first loads are issued before the predecessor has ended, and wait for memory
//   while it does. Activations are copied to shared memory afterwards, once a block: one wait for the second-level
//   cache instead of one in every step.
// - Integers become floats by an addition: the bits of 1.5 * 2^23 plus n are the float 12582912 + n for |n| < 2^22,
//   so dp4a sums that start there cost one subtraction to convert, exactly. Larger products (a sub-block's scale times
//   its sum, below 2^24) are multiplied as floats, exactly too.
#pragma once

#include <type_traits>

#include "core/contract.h"
#include "device/launch.cuh"
#include "kernels/formats.cuh"
#include "kernels/matvec.h"

namespace sharpi::cuda {

constexpr int kMatvecWarps = 8;
constexpr int kMatvecThreads = kMatvecWarps * 32;
// Shared memory that every device gives without asking. Activations that need more are read through the first-level cache.
constexpr size_t kMatvecSharedBytes = 48 * 1024;

constexpr bool isFloatType(DType type) { return type == DType::F32 || type == DType::F16 || type == DType::BF16; }

// --- activations in shared memory ----------------------------------------------------------------------------------

// Copies `count` words of kBytes by all threads of the block, not waiting for them where the device can do so.
template <int kBytes> __device__ __forceinline__ void copyToShared(void* shared, const void* global, int count) {
    for (int i = threadIdx.x; i < count; i += kMatvecThreads) {
        void* to = static_cast<uint8_t*>(shared) + i * kBytes;
        const void* from = static_cast<const uint8_t*>(global) + static_cast<int64_t>(i) * kBytes;
#if __CUDA_ARCH__ >= 800
        const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(kBytes) : "memory");
#else
        if (kBytes == 16)
            *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
        else
            *static_cast<uint32_t*>(to) = *static_cast<const uint32_t*>(from);
#endif
    }
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

// The float of a sum that started at kIntegerBiasBits.
__device__ __forceinline__ float unbiased(int biased) { return __fsub_rn(__int_as_float(biased), kIntegerBias); }
__device__ __forceinline__ float exactFloat(int n) { return unbiased(n + kIntegerBiasBits); }

// a0 * (low half of pair) + a1 * (its high half) + c; pair holds two int16, factors two int8.
__device__ __forceinline__ int addPair(int pair, int factor0, int factor1, int c) {
    return __dp2a_lo(pair, (factor0 & 255) | (factor1 & 255) << 8, c);
}

// A block of activations.
struct QuantizedBlock {
    uint32_t q[8];
    float scale;
    int sums;
};

template <DType D, bool isFloat = isFloatType(D)> struct Steps;

template <DType D> struct Steps<D, false> {
    using F = Format<D>;
    using Raw = typename F::Raw;
    static constexpr int kStepUnits = 32;     // of those that a row is counted in (blocks)
    static constexpr int kUnitElements = 32;

    // Rows of activations, wherever they are.
    struct Input {
        const uint4* q;
        const float* scale;
        const int32_t* sums;
    };
    static size_t inputBytes(int64_t rows, int64_t cols) { return static_cast<size_t>(rows * (cols + cols / 32 * 8)); }
    static __device__ __forceinline__ Input inGlobal(const MatvecInput& x, int64_t firstRow, int cols) {
        const int64_t blocks = firstRow * (cols / 32);
        return {reinterpret_cast<const uint4*>(x.quantized.q) + blocks * 2, x.quantized.scale + blocks, x.quantized.sums + blocks};
    }
    static __device__ __forceinline__ Input toShared(const Input& from, uint8_t* shared, int rows, int cols) {
        const int blocks = rows * (cols / 32);
        float* scale = reinterpret_cast<float*>(shared + blocks * 32);
        int32_t* sums = reinterpret_cast<int32_t*>(shared + blocks * 36);
        copyToShared<16>(shared, from.q, blocks * 2);
        copyToShared<4>(scale, from.scale, blocks);
        copyToShared<4>(sums, from.sums, blocks);
        return {reinterpret_cast<const uint4*>(shared), scale, sums};
    }

    // Lanes past the row's end load its last block, and do not add it.
    static __device__ __forceinline__ Raw load(const uint8_t* data, const PackedShape& shape, int64_t first, int units, int step, int lane) {
        const int b = lane + 32 * step;
        return F::load(data, shape, first + (b < units ? b : units - 1));
    }

    static __device__ __forceinline__ QuantizedBlock read(const Input& x, int row, int units, int b) {
        const uint4 first = x.q[row * 2 * units + b], second = x.q[(row * 2 + 1) * units + b];
        return {{first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w}, x.scale[row * units + b], x.sums[row * units + b]};
    }

    // J and M of the contract, as floats, into the accumulator.
    static __device__ __forceinline__ float addBlock(const uint32_t (&codes)[8], const Scales& w, const QuantizedBlock& x, float acc) {
        float j;
        if (F::kTwoScales) {
            int dot0 = addPair(x.sums, -F::kOffset, 0, kIntegerBiasBits), dot1 = addPair(x.sums, 0, -F::kOffset, kIntegerBiasBits);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                dot0 = __dp4a(static_cast<int>(codes[k]), static_cast<int>(x.q[k]), dot0);
                dot1 = __dp4a(static_cast<int>(codes[4 + k]), static_cast<int>(x.q[4 + k]), dot1);
            }
            j = fmaf(exactFloat(w.sub1), unbiased(dot1), __fmul_rn(exactFloat(w.sub0), unbiased(dot0)));
        } else {
            int dot = F::kOffset ? addPair(x.sums, -F::kOffset, -F::kOffset, kIntegerBiasBits) : kIntegerBiasBits;
#pragma unroll
            for (int k = 0; k < 8; ++k) dot = __dp4a(static_cast<int>(codes[k]), static_cast<int>(x.q[k]), dot);
            j = __fmul_rn(exactFloat(w.sub0), unbiased(dot));
        }
        acc = fmaf(__fmul_rn(w.d, x.scale), j, acc);
        if (!F::kHasMin) return acc;
        float m;
        if (F::kTwoScales)
            m = unbiased(addPair(x.sums, w.min0, w.min1, kIntegerBiasBits));
        else
            m = __fmul_rn(exactFloat(w.min0), unbiased(addPair(x.sums, 1, 1, kIntegerBiasBits)));
        return fmaf(__fmul_rn(w.m, x.scale), m, acc);
    }

    // rowOf(t): which row of x. acc[t][r] belongs to weight row r.
    template <int T, typename RowOf>
    static __device__ __forceinline__ void add(const Raw (&raw)[2], const Input& x, RowOf&& rowOf, int units, int step, int lane, float (&acc)[T][2]) {
        const int b = lane + 32 * step;
        if (b >= units) return;
        uint32_t codes[2][8];
        Scales scales[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            F::codes(raw[r], codes[r]);
            scales[r] = F::scales(raw[r], lane % 8);
        }
#pragma unroll
        for (int t = 0; t < T; ++t) {
            const QuantizedBlock block = read(x, rowOf(t), units, b);
#pragma unroll
            for (int r = 0; r < 2; ++r) acc[t][r] = addBlock(codes[r], scales[r], block, acc[t][r]);
        }
    }
};

// --- float rows ------------------------------------------------------------------------------------------------------

template <DType D> struct FloatElement {
    using Type = uint16_t;
    static __device__ __forceinline__ float value(uint16_t bits) {
        return D == DType::BF16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
    }
};
template <> struct FloatElement<DType::F32> {
    using Type = float;
    static __device__ __forceinline__ float value(float v) { return v; }
};

template <DType D> struct Steps<D, true> {
    using Element = typename FloatElement<D>::Type;
    static constexpr int kAhead = 8;
    static constexpr int kStepUnits = 32 * kAhead;  // elements
    static constexpr int kUnitElements = 1;
    struct Raw {
        Element v[kAhead];
    };

    struct Input {
        const float* x;
    };
    static size_t inputBytes(int64_t rows, int64_t cols) { return static_cast<size_t>(rows * cols) * sizeof(float); }
    static __device__ __forceinline__ Input inGlobal(const MatvecInput& x, int64_t firstRow, int cols) { return {x.floats + firstRow * cols}; }
    static __device__ __forceinline__ Input toShared(const Input& from, uint8_t* shared, int rows, int cols) {
        copyToShared<4>(shared, from.x, rows * cols);
        return {reinterpret_cast<const float*>(shared)};
    }

    static __device__ __forceinline__ Raw load(const uint8_t* data, const PackedShape&, int64_t first, int units, int step, int lane) {
        const Element* row = reinterpret_cast<const Element*>(data) + first;
        Raw raw;
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int i = step * kStepUnits + u * 32 + lane;
            raw.v[u] = __ldg(row + (i < units ? i : units - 1));
        }
        return raw;
    }

    template <int T, typename RowOf>
    static __device__ __forceinline__ void add(const Raw (&raw)[2], const Input& x, RowOf&& rowOf, int units, int step, int lane, float (&acc)[T][2]) {
#pragma unroll
        for (int u = 0; u < kAhead; ++u) {
            const int i = step * kStepUnits + u * 32 + lane;
            if (i >= units) continue;
            const float w0 = FloatElement<D>::value(raw[0].v[u]), w1 = FloatElement<D>::value(raw[1].v[u]);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                const float value = x.x[static_cast<int64_t>(rowOf(t)) * units + i];
                acc[t][0] = fmaf(w0, value, acc[t][0]);
                acc[t][1] = fmaf(w1, value, acc[t][1]);
            }
        }
    }
};

// --- the stream of steps ---------------------------------------------------------------------------------------------

// Two rows of weights: each in a matrix at data, its first unit (block or element) counted from there.
struct RowPair {
    const uint8_t* data[2];
    int64_t first[2];
};

// The items (pairs of rows) of a warp. place(item) gives a RowPair.
template <DType D, int T> class Pipeline {
public:
    using S = Steps<D>;
    using Input = typename S::Input;

    __device__ __forceinline__ Pipeline(const PackedShape& shape, int cols, int items)
        : _shape(shape), _units(cols / S::kUnitElements), _steps((_units + S::kStepUnits - 1) / S::kStepUnits), _items(items),
          _lane(threadIdx.x % 32) {}

    // The first loads of all.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        if (_items <= 0) return;
        _rows = place(0);
#pragma unroll
        for (int slot = 0; slot < kDepth; ++slot) fetch(slot, place);
    }

    // rowOf(item, t): which row of x; done(item, acc) gets every finished pair, with its accumulators still apart.
    template <typename Place, typename RowOf, typename Done>
    __device__ __forceinline__ void run(const Input& x, const Place& place, const RowOf& rowOf, const Done& done) {
        if (_items <= 0) return;
        float acc[T][2] = {};
        int item = 0, step = 0;
        // One step from one slot, which is then loaded anew; false after the last.
        const auto turn = [&](auto slot) {
            S::template add<T>(_raw[decltype(slot)::value], x, [&](int t) { return rowOf(item, t); }, _units, step, _lane, acc);
            fetch(decltype(slot)::value, place);
            if (++step < _steps) return true;
            done(item, acc);
            step = 0;
#pragma unroll
            for (int t = 0; t < T; ++t) acc[t][0] = acc[t][1] = 0.0f;
            return ++item < _items;
        };
        // Written out, so that every slot stays in registers.
        if constexpr (kDepth == 3) {
            while (turn(Index<0>{}) && turn(Index<1>{}) && turn(Index<2>{})) {}
        } else {
            while (turn(Index<0>{}) && turn(Index<1>{})) {}
        }
    }

private:
    template <int i> using Index = std::integral_constant<int, i>;
    // Steps in flight: as many as registers allow at three blocks of 256 threads a multiprocessor.
    static constexpr int kDepth = T == 1 && sizeof(typename S::Raw) <= 32 ? 3 : 2;

    template <typename Place> __device__ __forceinline__ void fetch(int slot, const Place& place) {
        if (_item >= _items) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) _raw[slot][r] = S::load(_rows.data[r], _shape, _rows.first[r], _units, _step, _lane);
        if (++_step < _steps) return;
        _step = 0;
        if (++_item < _items) _rows = place(_item);
    }

    const PackedShape& _shape;
    const int _units, _steps, _items, _lane;
    typename S::Raw _raw[kDepth][2];
    RowPair _rows;
    int _item = 0, _step = 0;  // what is loaded next
};

// The sums of N rows' accumulators (a power of two up to 32), in the contract's order: lane l gets the sum of row
// l / (32 / N). Lanes that would compute a sum twice take over half of the rows instead.
template <int N> __device__ __forceinline__ float sumAccumulators(float (&v)[N], int lane) {
    int width = 16;
#pragma unroll
    for (int count = N; count > 1; count /= 2, width /= 2) {
        const bool upper = lane & width;
#pragma unroll
        for (int i = 0; i < count / 2; ++i) {
            const float kept = upper ? v[i + count / 2] : v[i], given = upper ? v[i] : v[i + count / 2];
            v[i] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, width));
        }
    }
#pragma unroll
    for (; width >= 1; width /= 2) v[0] = __fadd_rn(v[0], __shfl_xor_sync(0xffffffffu, v[0], width));
    return v[0];
}

// The same for acc[t][r]: lane l gets that of t, r with 2 t + r = l / (32 / (2 T)).
template <int T> __device__ __forceinline__ float sumAccumulators(float (&acc)[T][2], int lane) {
    float v[2 * T];
#pragma unroll
    for (int t = 0; t < T; ++t) v[2 * t] = acc[t][0], v[2 * t + 1] = acc[t][1];
    return sumAccumulators<2 * T>(v, lane);
}

constexpr int minBlocks(int T) { return T <= 2 ? 3 : 2; }

// --- choosing a kernel -----------------------------------------------------------------------------------------------

template <int T, bool shared> struct Variant {
    static constexpr int kRows = T;
    static constexpr bool kShared = shared;
};

// f(Variant): for `rows` rows of activations, which take `bytes` in shared memory.
template <typename F> void withVariant(int rows, size_t bytes, F&& f) {
    if (rows < 1 || rows > kMaxMatvecRows) throw Error(ErrorKind::Internal, "a matrix-vector product of " + std::to_string(rows) + " rows");
    if (rows == 1 && bytes <= kMatvecSharedBytes) return f(Variant<1, true>{});
    if (rows == 2 && bytes <= kMatvecSharedBytes) return f(Variant<2, true>{});
    if (rows <= 4) return f(Variant<4, false>{});
    return f(Variant<8, false>{});
}

// f(Tag<type>{}) for every type.
template <typename F> void withType(DType type, F&& f) {
    switch (type) {
        case DType::F32: return f(Tag<DType::F32>{});
        case DType::F16: return f(Tag<DType::F16>{});
        case DType::BF16: return f(Tag<DType::BF16>{});
        default: return withFormat(type, f);
    }
}

// The index of a matrix's elements and of activations is 32 bits wide along a row.
inline int checkedCols(int64_t cols) {
    if (cols < 1 || cols > (int64_t{1} << 26)) throw Error(ErrorKind::Internal, "a matrix of " + std::to_string(cols) + " columns");
    return static_cast<int>(cols);
}

}  // namespace sharpi::cuda
