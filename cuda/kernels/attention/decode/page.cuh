// What a warp of the decode kernel computes on one page, for a tile of queries at once. See attention_decode.cu.
#pragma once

#include "kernels/attention/decode/work.cuh"

namespace sharpi::cuda::decode {

// A query is one head of one row. The queries of a tile lie in shared memory as [headDim / 4][kTile][4], so that one
// address serves all of them.

// Adds the dot products of two keys with kCount queries over a chunk of the dimensions. keys: the lane's line; the
// second key is 32 lines of kLine bytes after the first. query: that of the chunk's first dimension.
template <KvType kType, int kTile, int kCount, int kLine = kLineBytes>
__device__ __forceinline__ void addDotProducts(const uint8_t* keys, int units, const float* query, int lane,
                                               float2 (&dots)[kCount]) {
    constexpr int kStep = 16 / kKvBytes<kType>;
    // How a line's 16-byte units were exchanged.
    const int turned = (kLine == kLineBytes ? lane & 7 : lane >> 1 & 3) << 4;
#pragma unroll(kCount <= 2 ? 4 : 2)
    for (int unit = 0; unit < units; unit++) {
        float first[kStep], second[kStep];
        const uint8_t* at = keys + ((unit << 4) ^ turned);
        readElements<kType, kStep>(at, first);
        readElements<kType, kStep>(at + 32 * kLine, second);
#pragma unroll
        for (int i = 0; i < kCount; i++) {
#pragma unroll
            for (int quad = 0; quad < kStep / 4; quad++) {
                float q[4];
                readFloats<4>(query + (quad * kTile + i) * 4, q);
#pragma unroll
                for (int d = 0; d < 4; d++) {
                    dots[i].x = fmaf(q[d], first[quad * 4 + d], dots[i].x);
                    dots[i].y = fmaf(q[d], second[quad * 4 + d], dots[i].y);
                }
            }
        }
        query += kStep * kTile;
    }
}

// Compares the bits of the floats as integers, which have the same order once the bits of negatives are inverted.
__device__ __forceinline__ float largestOfWarp(float x) {
    const auto turned = [](uint32_t bits, bool negative) { return negative ? ~bits : bits | 0x80000000u; };
    const uint32_t bits = __float_as_uint(x), largest = warpMax(turned(bits, bits >> 31));
    return __uint_as_float(largest >> 31 ? largest & 0x7fffffffu : ~largest);
}

// Writes the weights of the keys [begin, end) of a page that each query sees, and zeros for its other keys: 64 for each
// query. top[i]: their maximum and sum. A query that sees none gets NaN, which nobody uses. The queries take each step
// together, because the steps of one would wait for each other.
template <int kCount>
__device__ __forceinline__ void weighScores(const float2 (&dots)[kCount], const int (&begin)[kCount],
                                            const int (&end)[kCount], const AttentionRule& rule, int lane,
                                            float* weights, float2 (&top)[kCount]) {
    const float low = __int_as_float(0xff800000);
    float first[kCount], second[kCount], sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i++)
        first[i] = __fmul_rn(dots[i].x, rule.scale), second[i] = __fmul_rn(dots[i].y, rule.scale);
    if (rule.softcap > 0.0f) {
#pragma unroll
        for (int i = 0; i < kCount; i++)
            first[i] = portableSoftcap(first[i], rule.softcap), second[i] = portableSoftcap(second[i], rule.softcap);
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        first[i] = lane < end[i] && lane >= begin[i] ? first[i] : low;
        second[i] = lane + 32 < end[i] && lane + 32 >= begin[i] ? second[i] : low;
        top[i].x = largestOfWarp(fmaxf(first[i], second[i]));
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        const float p = portableExp(__fsub_rn(first[i], top[i].x)), r = portableExp(__fsub_rn(second[i], top[i].x));
        weights[i * kPageTokens + lane] = p;
        weights[i * kPageTokens + lane + 32] = r;
        sum[i] = __fadd_rn(p, r);
    }
    // contractTree of each.
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
#pragma unroll
        for (int i = 0; i < kCount; i++) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kWholeWarp, sum[i], width));
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) top[i].y = sum[i];
}

// Neighbouring elements of the cache as they lie in memory.
template <KvType kType, int kWidth> struct RawRun {
    static constexpr int kWords = kWidth * kKvBytes<kType> / 4;
    uint32_t words[kWords];

    __device__ __forceinline__ void read(const uint8_t* at) {
        if constexpr (kWords == 1) {
            words[0] = *reinterpret_cast<const uint32_t*>(at);
        } else if constexpr (kWords == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(at);
            words[0] = v.x, words[1] = v.y;
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i += 4) {
                const uint4 v = reinterpret_cast<const uint4*>(at)[i / 4];
                words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
            }
        }
    }
    __device__ __forceinline__ void floats(float (&out)[kWidth]) const {
        if constexpr (kType == KvType::F32) {
#pragma unroll
            for (int i = 0; i < kWidth; i++) out[i] = __uint_as_float(words[i]);
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i++) {
                const float2 pair = halvesToFloats(words[i], kType);
                out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
            }
        }
    }
};

// Adds the values of kKeys neighbouring keys that all queries see, in their order. weights: of the first key, 64 apart
// for each query.
template <int kKeys, int kWidth, int kCount>
__device__ __forceinline__ void addValuesOfAll(const float (&value)[kKeys][kWidth], const float* weights,
                                               float (&acc)[kCount][kWidth]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        float weight[kKeys];
        readFloats<kKeys>(weights + i * kPageTokens, weight);
#pragma unroll
        for (int j = 0; j < kKeys; j++) {
#pragma unroll
            for (int x = 0; x < kWidth; x++) acc[i][x] = fmaf(weight[j], value[j][x], acc[i][x]);
        }
    }
}

// Adds the value of a key of the page to the queries that see it. weights: of the page's keys.
template <int kWidth, int kCount>
__device__ __forceinline__ void addValueOfSome(const float (&value)[kWidth], const float* weights, int key,
                                               const int (&begin)[kCount], const int (&end)[kCount],
                                               float (&acc)[kCount][kWidth]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
        if (key < begin[i] || key >= end[i]) continue;
        const float weight = weights[i * kPageTokens + key];
#pragma unroll
        for (int x = 0; x < kWidth; x++) acc[i][x] = fmaf(weight, value[x], acc[i][x]);
    }
}

// acc[i][..] = sum over the keys that query i sees of weight * value, in ascending order of keys. values: the lane's
// elements of key 0. weights: 64 for each query.
template <KvType kType, int kWidth, int kCount> struct ValueSums {
    using Run = RawRun<kType, kWidth>;
    // Keys that are read at once: as many as leave room for the sums.
    static constexpr int kBatch = kCount * kWidth > 48 || Run::kWords > 4 ? 2 : Run::kWords == 4 ? 4 : 8;
    static constexpr int kQuad = kBatch < 4 ? kBatch : 4;

    float acc[kCount][kWidth];

    __device__ __forceinline__ void compute(const uint8_t* values, int rowBytes, const float* weights,
                                            const int (&begin)[kCount], const int (&end)[kCount]) {
        int anyBegin = begin[0], anyEnd = end[0], allBegin = begin[0], allEnd = end[0];
#pragma unroll
        for (int i = 0; i < kCount; i++) {
            anyBegin = min(anyBegin, begin[i]), anyEnd = max(anyEnd, end[i]);
            allBegin = max(allBegin, begin[i]), allEnd = min(allEnd, end[i]);
#pragma unroll
            for (int x = 0; x < kWidth; x++) acc[i][x] = 0.0f;
        }
        // Keys that not all queries see, and those that are no whole batch, are done one by one.
        const int from = min(anyEnd, (allBegin + kBatch - 1) / kBatch * kBatch);
        const int to = from + max(0, allEnd - from) / kBatch * kBatch;
        addSingly(values, rowBytes, weights, begin, end, anyBegin, from);
        addBatches(values + from * rowBytes, rowBytes, weights + from, (to - from) / kBatch);
        addSingly(values, rowBytes, weights, begin, end, to, anyEnd);
    }

private:
    __device__ __forceinline__ void addSingly(const uint8_t* values, int rowBytes, const float* weights,
                                              const int (&begin)[kCount], const int (&end)[kCount], int from, int to) {
#pragma unroll 1
        for (int key = from; key < to; key++) {
            Run run;
            float value[kWidth];
            run.read(values + key * rowBytes);
            run.floats(value);
            addValueOfSome(value, weights, key, begin, end, acc);
        }
    }
    // The next batch is read while one is added.
    __device__ __forceinline__ void addBatches(const uint8_t* values, int rowBytes, const float* weights, int batches) {
        if (batches <= 0) return;
        Run even[kBatch], odd[kBatch];
        readBatch(values, rowBytes, even);
#pragma unroll 1
        for (; batches > 0; batches -= 2) {
            if (batches > 1) readBatch(values + kBatch * rowBytes, rowBytes, odd);
            addBatch(even, weights);
            if (batches == 1) return;
            if (batches > 2) readBatch(values + 2 * kBatch * rowBytes, rowBytes, even);
            addBatch(odd, weights + kBatch);
            values += 2 * kBatch * rowBytes;
            weights += 2 * kBatch;
        }
    }
    __device__ __forceinline__ static void readBatch(const uint8_t* values, int rowBytes, Run (&runs)[kBatch]) {
#pragma unroll
        for (int k = 0; k < kBatch; k++) runs[k].read(values + k * rowBytes);
    }
    __device__ __forceinline__ void addBatch(const Run (&runs)[kBatch], const float* weights) {
#pragma unroll
        for (int k = 0; k < kBatch; k += kQuad) {
            float value[kQuad][kWidth];
#pragma unroll
            for (int j = 0; j < kQuad; j++) runs[k + j].floats(value[j]);
            addValuesOfAll(value, weights + k, acc);
        }
    }
};

// Where a warp leaves what it computed on a page: weights [count][64], outputs [count][headDim], and the maximum and
// sum of each query.
struct Results {
    float *weights, *outputs;
    float2* tops;

    // A multiple of 16.
    __device__ static int bytes(int count, int headDim) { return (count * (kPageTokens + headDim + 2) * 4 + 15) & ~15; }
    __device__ Results(uint8_t* memory, int count, int headDim)
        : weights(reinterpret_cast<float*>(memory)),
          outputs(weights + count * kPageTokens),
          tops(reinterpret_cast<float2*>(outputs + count * headDim)) {}
};

}  // namespace sharpi::cuda::decode
