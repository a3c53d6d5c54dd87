// What a warp of the decode kernel computes on one page, and how results are joined. See attention_decode.cu.
#pragma once

#include "kernels/attention/decode_work.cuh"

namespace sharpi::cuda::decode {

// The dimensions of a head that a lane owns: kWidth neighbours. With 16 they are two runs of eight, half of the widest
// head apart, so that neighbouring lanes read neighbouring units of shared memory. A lane past the end of the head
// reads the head's last run, and writes none.
template <int kWidth> struct Columns {
    static constexpr int kRun = kWidth < 8 ? kWidth : 8, kApart = 32 * kRun;
    int lane, dim;

    __device__ __forceinline__ int first() const { return min(lane * kRun, dim - kRun); }
    // How far the second run is from the first.
    __device__ __forceinline__ int apart() const {
        return kWidth == kRun ? 0 : min(kApart + lane * kRun, dim - kRun) - first();
    }
    // to: the head's first element.
    __device__ __forceinline__ void write(float* to, const float (&values)[kWidth]) const {
        if constexpr (kWidth == kRun) {
            if (lane * kRun < dim) writeFloats<kWidth>(to + lane * kRun, values);
        } else {
            float run[2][kRun];
#pragma unroll
            for (int i = 0; i < kWidth; i++) run[i / kRun][i % kRun] = values[i];
            if (lane * kRun < dim) writeFloats<kRun>(to + lane * kRun, run[0]);
            if (kApart + lane * kRun < dim) writeFloats<kRun>(to + kApart + lane * kRun, run[1]);
        }
    }
};

// Calls read(offset, run) for each run of a lane, where offset is in elements.
template <int kWidth, typename Read>
__device__ __forceinline__ void forRuns(int apart, float (&out)[kWidth], const Read& read) {
    if constexpr (kWidth <= 8) {
        read(0, out);
    } else {
        float run[2][8];
        read(0, run[0]);
        read(apart, run[1]);
#pragma unroll
        for (int i = 0; i < kWidth; i++) out[i] = run[i / 8][i % 8];
    }
}

// Reads a lane's elements; at, apart: the lane's first element, and how far the second run is from it.
template <KvType kType, int kWidth>
__device__ __forceinline__ void readColumns(const uint8_t* at, int apart, float (&out)[kWidth]) {
    forRuns<kWidth>(apart, out, [&](int offset, auto& run) {
        readElements<kType, (kWidth < 8 ? kWidth : 8)>(at + offset * kKvBytes<kType>, run);
    });
}

// What has been joined so far. m and l are the same in every lane, o is the lane's own.
template <int kWidth> struct Joined {
    float m, l, o[kWidth];

    __device__ __forceinline__ void clear() {
        m = __int_as_float(0xff800000), l = 0.0f;
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = 0.0f;
    }
    // Joins this to nothing, as add() would: only -0 changes, to +0.
    __device__ __forceinline__ void joinToNothing() {
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = __fadd_rn(o[i], 0.0f);
    }
    __device__ __forceinline__ void add(float sum, const float (&outputs)[kWidth], float kept, float added) {
        l = fmaf(sum, added, __fmul_rn(l, kept));
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = fmaf(outputs[i], added, __fmul_rn(o[i], kept));
    }
    // Joins a score that has no value.
    __device__ __forceinline__ void addSink(float sink) {
        const float top = fmaxf(m, sink), kept = portableExp(__fsub_rn(m, top));
        l = __fadd_rn(__fmul_rn(l, kept), portableExp(__fsub_rn(sink, top)));
#pragma unroll
        for (int i = 0; i < kWidth; i++) o[i] = __fmul_rn(o[i], kept);
    }
};

// Dot products of two keys with a query.
template <KvType kType>
__device__ __forceinline__ float2 dotProducts(const uint8_t* first, const uint8_t* second, const float* query,
                                              int headDim) {
    constexpr int kStep = 16 / kKvBytes<kType>;
    float2 dots = {0.0f, 0.0f};
#pragma unroll 4
    for (int d = 0; d < headDim; d += kStep) {
        float keys[2][kStep], q[kStep];
        readElements<kType, kStep>(first, keys[0]);
        readElements<kType, kStep>(second, keys[1]);
        readFloats<kStep>(query + d, q);
        first += 16, second += 16;
#pragma unroll
        for (int i = 0; i < kStep; i++) {
            dots.x = fmaf(q[i], keys[0][i], dots.x);
            dots.y = fmaf(q[i], keys[1][i], dots.y);
        }
    }
    return dots;
}

// Compares the bits of the floats as integers, which have the same order once the bits of negatives are inverted.
__device__ __forceinline__ float largestOfWarp(float x) {
    const auto turned = [](uint32_t bits, bool negative) { return negative ? ~bits : bits | 0x80000000u; };
    const uint32_t bits = __float_as_uint(x), largest = warpMax(turned(bits, bits >> 31));
    return __uint_as_float(largest >> 31 ? largest & 0x7fffffffu : ~largest);
}

// Writes the weights of the keys [begin, n) of a page for one head to `weights`, and zeros for its other keys. Returns
// their maximum and sum.
template <bool kPlain>
__device__ __forceinline__ float2 weighScores(float2 dots, int begin, int n, const AttentionRule& rule, float* weights,
                                              int lane) {
    const float low = __int_as_float(0xff800000);
    float first = __fmul_rn(dots.x, rule.scale), second = __fmul_rn(dots.y, rule.scale);
    if (!kPlain && rule.softcap > 0.0f)
        first = portableSoftcap(first, rule.softcap), second = portableSoftcap(second, rule.softcap);
    first = lane < n && (kPlain || lane >= begin) ? first : low;
    second = lane + 32 < n && (kPlain || lane + 32 >= begin) ? second : low;
    const float top = largestOfWarp(fmaxf(first, second));
    const float p = portableExp(__fsub_rn(first, top)), r = portableExp(__fsub_rn(second, top));
    weights[lane] = p;
    weights[lane + 32] = r;
    return {top, contractTree(__fadd_rn(p, r))};
}

// acc[i] = sum over the keys [begin, n) of weight * value, in ascending order of keys. values: those of key 0.
template <KvType kType, int kWidth, bool kPlain>
__device__ __forceinline__ void weighValues(const uint8_t* values, int apart, int rowBytes, const float* weights,
                                            int begin, int n, float (&acc)[kWidth]) {
    const auto add = [&](float weight, const uint8_t* at) {
        float value[kWidth];
        readColumns<kType, kWidth>(at, apart, value);
#pragma unroll
        for (int i = 0; i < kWidth; i++) acc[i] = fmaf(weight, value[i], acc[i]);
    };
#pragma unroll
    for (int i = 0; i < kWidth; i++) acc[i] = 0.0f;
    int j = 0;
    if constexpr (!kPlain) {
        j = begin, values += begin * rowBytes;
#pragma unroll 1
        for (; j < n && j % 4 != 0; j++, values += rowBytes) add(weights[j], values);
    }
#pragma unroll 4
    for (; j + 4 <= n; j += 4) {
        float weight[4];
        readFloats<4>(weights + j, weight);
#pragma unroll
        for (int k = 0; k < 4; k++) add(weight[k], values + k * rowBytes);
        values += 4 * rowBytes;
    }
#pragma unroll 1
    for (; j < n; j++, values += rowBytes) add(weights[j], values);
}

// The factors of 32 neighbouring pieces. Lane i of the warp holds those of the i-th piece.
struct Factors {
    float sum, kept, added;           // for the piece within its segment
    float segmentKept, segmentAdded;  // for its whole segment

    // largest: the maximum of the segments before; becomes that of all. segment: pieces of a segment, 1 or
    // kSegmentPages.
    __device__ __forceinline__ void make(float maximum, float& largest, int segment, int lane) {
        float top = maximum;
        for (int width = 1; width < segment; width <<= 1) {
            const float other = __shfl_up_sync(kWholeWarp, top, width);
            if (lane % segment >= width) top = fmaxf(top, other);
        }
        const float before = __shfl_up_sync(kWholeWarp, top, 1);
        kept = lane % segment == 0 ? 0.0f : portableExp(__fsub_rn(before, top));
        added = portableExp(__fsub_rn(maximum, top));
        // Lanes past the last piece hold -inf, so the segment's last lane has its maximum.
        const float own = __shfl_sync(kWholeWarp, top, lane | (segment - 1));
        float all = own;
        for (int width = segment; width < 32; width <<= 1) {
            const float other = __shfl_up_sync(kWholeWarp, all, width);
            if (lane >= width) all = fmaxf(all, other);
        }
        all = fmaxf(all, largest);
        float earlier = __shfl_up_sync(kWholeWarp, all, segment);
        if (lane < segment) earlier = largest;
        segmentKept = portableExp(__fsub_rn(earlier, all));
        segmentAdded = portableExp(__fsub_rn(own, all));
        largest = __shfl_sync(kWholeWarp, all, 31);
    }
};

}  // namespace sharpi::cuda::decode
