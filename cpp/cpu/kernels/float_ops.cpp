// The float operations around matmuls and attention: norm, residual sums, activations, rotary embedding, softmax, and
// rounding to the KV cache's element type. Each is memory-bound or tiny; what matters is that all instruction sets
// agree to the bit, so the order of every sum is vec.h's and the exponential is exp.h's.
#include "core/rules/log_softmax.h"
#include "cpu/kernels/exp.h"
#include "cpu/kernels/internal.h"

namespace sharpi::cpu::SHARPI_ISA {

// Calls body(i, lanes) for each group of 16 elements; the last one may have fewer.
template <class Body> SHARPI_INLINE void forEachVec(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
    if (i < n) body(i, static_cast<int>(n - i));
}

SHARPI_INLINE Vec take(const float* p, int lanes) { return lanes == kLanes ? vload(p) : vloadPart(p, lanes); }
SHARPI_INLINE void put(float* p, Vec a, int lanes) { lanes == kLanes ? vstore(p, a) : vstorePart(p, a, lanes); }

static float sumOfSquares(const float* x, int64_t n) {
    Acc32 acc = {vzero(), vzero()};
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const Vec lo = vload(x + i), hi = vload(x + i + kLanes);
        acc = {vfma(lo, lo, acc.lo), vfma(hi, hi, acc.hi)};
    }
    if (i < n) {
        const int64_t rest = n - i;
        const Vec lo = loadFirst<ReadF32>(x + i, rest);
        const Vec hi = rest > kLanes ? loadFirst<ReadF32>(x + i + kLanes, rest - kLanes) : vzero();
        acc = {vfma(lo, lo, acc.lo), vfma(hi, hi, acc.hi)};
    }
    return sum32(acc);
}

// inverse = 1 / sqrt(sum / n + eps), each operation rounded; y = (x * inverse) * weight.
void rmsNorm(const float* x, const float* weight, float eps, int64_t n, float* y) {
    const float mean = sumOfSquares(x, n) / static_cast<float>(n);
    const Vec inverse = vset(1.0f / __builtin_sqrtf(mean + eps));
    if (!weight) {
        forEachVec(n, [&](int64_t i, int lanes)
                          __attribute__((always_inline)) { put(y + i, vmul(take(x + i, lanes), inverse), lanes); });
        return;
    }
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        put(y + i, vmul(vmul(take(x + i, lanes), inverse), take(weight + i, lanes)), lanes);
    });
}

static float sumOf(const float* x, int64_t n) {
    Acc32 acc = {vzero(), vzero()};
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        if (i & kLanes) acc.hi = vadd(acc.hi, take(x + i, lanes));
        else acc.lo = vadd(acc.lo, take(x + i, lanes));
    });
    return sum32(acc);
}

// core/rules/norm.h says in which order.
void layerNorm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y) {
    const Vec mean = vset(sumOf(x, n) / static_cast<float>(n));
    forEachVec(n, [&](int64_t i, int lanes)
                      __attribute__((always_inline)) { put(y + i, vsub(take(x + i, lanes), mean), lanes); });
    const Vec inverse = vset(1.0f / __builtin_sqrtf(sumOfSquares(y, n) / static_cast<float>(n) + eps));
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec normed = vmul(vmul(take(y + i, lanes), inverse), take(weight + i, lanes));
        put(y + i, bias ? vadd(normed, take(bias + i, lanes)) : normed, lanes);
    });
}

// inverse = scale / sqrt(sum + eps), each operation rounded; x = x * inverse.
void l2Norm(float* x, float eps, float scale, int64_t n) {
    const Vec inverse = vset(scale / __builtin_sqrtf(sumOfSquares(x, n) + eps));
    forEachVec(n, [&](int64_t i, int lanes)
                      __attribute__((always_inline)) { put(x + i, vmul(take(x + i, lanes), inverse), lanes); });
}

void add(float* x, const float* y, int64_t n) {
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        put(x + i, vadd(take(x + i, lanes), take(y + i, lanes)), lanes);
    });
}

// One fma for each element.
void addScaled(float* x, const float* y, float scale, int64_t n) {
    const Vec factor = vset(scale);
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        put(x + i, vfma(factor, take(y + i, lanes), take(x + i, lanes)), lanes);
    });
}

// x / (1 + exp(exponent))
SHARPI_INLINE Vec divideByOnePlusExp(Vec x, Vec exponent) { return vdiv(x, vadd(vset(1.0f), vexp(exponent))); }

// core/rules/activation.h says in which order; vmin and vmax give their second operand if either is NaN.
struct PlainUp {
    SHARPI_INLINE Vec factor(Vec up, float) { return up; }
};
struct Silu : PlainUp {
    SHARPI_INLINE Vec of(Vec gate, float) { return divideByOnePlusExp(gate, vsub(vzero(), gate)); }
};
struct Gelu : PlainUp {
    SHARPI_INLINE Vec of(Vec gate, float) {
        const Vec p = vfma(vmul(gate, gate), vset(kGeluCubic), vset(1.0f));
        return divideByOnePlusExp(gate, vmul(vmul(gate, p), vset(kGeluExponent)));
    }
};
struct ClampedSwiglu {
    SHARPI_INLINE Vec of(Vec gate, float limit) {
        const Vec g = vmin(vset(limit), gate);
        return divideByOnePlusExp(g, vmul(g, vset(kSwigluExponent)));
    }
    SHARPI_INLINE Vec factor(Vec up, float limit) {
        return vadd(vmax(vset(0.0f - limit), vmin(vset(limit), up)), vset(1.0f));
    }
};
struct ClampedSilu {
    SHARPI_INLINE Vec of(Vec gate, float limit) {
        const Vec g = vmin(vset(limit), gate);
        return divideByOnePlusExp(g, vsub(vzero(), g));
    }
    SHARPI_INLINE Vec factor(Vec up, float limit) { return vmax(vset(0.0f - limit), vmin(vset(limit), up)); }
};
struct ReluSquared : PlainUp {
    SHARPI_INLINE Vec of(Vec gate, float) {
        const Vec r = vmax(vzero(), gate);
        return vmul(r, r);
    }
};

template <class Kind> static void activate(const GatedRow& row, float limit, int64_t n) {
    const Vec factor = vset(row.factor);
    const bool scaled = row.factor != 1.0f;
    const auto finished = [&](Vec x, const float* bias, int64_t i, int lanes) __attribute__((always_inline)) {
        if (scaled) x = vmul(x, factor);
        return bias ? vadd(x, take(bias + i, lanes)) : x;
    };
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        Vec y = Kind::of(finished(take(row.gate + i, lanes), row.gateBias, i, lanes), limit);
        if (row.up) {
            const Vec up = finished(take(row.up + i, lanes), row.upBias, i, lanes);
            y = vmul(y, Kind::factor(up, limit));
        }
        put(row.gate + i, y, lanes);
    });
}

void gatedActivation(Activation activation, const GatedRow& row, int64_t n) {
    switch (activation.kind) {
    case ActivationKind::Silu: return activate<Silu>(row, 0.0f, n);
    case ActivationKind::Gelu: return activate<Gelu>(row, 0.0f, n);
    case ActivationKind::ClampedSwiglu: return activate<ClampedSwiglu>(row, activation.limit, n);
    case ActivationKind::ClampedSilu: return activate<ClampedSilu>(row, activation.limit, n);
    case ActivationKind::ReluSquared: return activate<ReluSquared>(row, 0.0f, n);
    }
}

// x / (1 + exp(-gate)), where -gate is 0 - gate.
void sigmoidMul(float* x, const float* gate, int64_t n) {
    forEachVec(n, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec below = vadd(vset(1.0f), vexp(vsub(vzero(), take(gate + i, lanes))));
        put(x + i, vdiv(take(x + i, lanes), below), lanes);
    });
}

void softcap(float* x, float cap, int64_t n) {
    const Vec limit = vset(cap);
    forEachVec(n, [&](int64_t i, int lanes)
                      __attribute__((always_inline)) { put(x + i, vsoftcap(take(x + i, lanes), limit), lanes); });
}

// a' = fma(a, cos, -(b * sin)), b' = fma(a, sin, b * cos), where b's product is rounded first.
void rope(float* head, const float* cos, const float* sin, int32_t dims, bool adjacent) {
    const int32_t half = dims / 2;
    if (adjacent) {
        for (int32_t i = 0; i < half; i++) {
            const float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = fmaExact(a, cos[i], -(b * sin[i]));
            head[2 * i + 1] = fmaExact(a, sin[i], b * cos[i]);
        }
        return;
    }
    forEachVec(half, [&](int64_t i, int lanes) __attribute__((always_inline)) {
        const Vec a = take(head + i, lanes), b = take(head + half + i, lanes);
        const Vec c = take(cos + i, lanes), s = take(sin + i, lanes);
        put(head + i, vfma(a, c, vmul(vmul(b, s), vset(-1.0f))), lanes);
        put(head + half + i, vfma(a, s, vmul(b, c)), lanes);
    });
}

// exp(x - max) in place, then each divided by their sum (vec.h's order).
void softmax(float* x, int64_t n) {
    float largest = -__builtin_inff();
    Vec maxima = vset(largest);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) maxima = vmax(maxima, vload(x + i));
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    const float tree = vmaxLane(maxima);
    const Vec top = vset(tree > largest ? tree : largest);

    Acc32 acc = {vzero(), vzero()};
    forEachVec(n, [&](int64_t at, int lanes) __attribute__((always_inline)) {
        put(x + at, vexp(vsub(take(x + at, lanes), top)), lanes);
        const Vec e = take(x + at, lanes);
        if (at & kLanes) {
            acc.hi = vadd(acc.hi, e);
        } else {
            acc.lo = vadd(acc.lo, e);
        }
    });
    const Vec total = vset(sum32(acc));
    forEachVec(n, [&](int64_t at, int lanes)
                      __attribute__((always_inline)) { put(x + at, vdiv(take(x + at, lanes), total), lanes); });
}

void addExps(const float* x, float top, int64_t n, double* lanes) {
    static_assert(kScoreLanes % kLanes == 0, "a group of elements lies in consecutive lanes");
    const Vec highest = vset(top);
    forEachVec(n, [&](int64_t at, int count) __attribute__((always_inline)) {
        float power[kLanes];
        vstore(power, vexp(vsub(take(x + at, count), highest)));
        double* to = lanes + at % kScoreLanes;
        for (int i = 0; i < count; ++i) to[i] += power[i] == power[i] ? static_cast<double>(power[i]) : 0.0;
    });
}

void storeKv(const float* x, int64_t n, KvType type, void* out) {
    switch (type) {
    case KvType::F32: {
        float* to = static_cast<float*>(out);
        for (int64_t i = 0; i < n; i++) to[i] = x[i];
        return;
    }
    case KvType::BF16: {
        uint16_t* to = static_cast<uint16_t*>(out);
        for (int64_t i = 0; i < n; i++) to[i] = bf16FromFloat(x[i]);
        return;
    }
    case KvType::F16: {
        uint16_t* to = static_cast<uint16_t*>(out);
        for (int64_t i = 0; i < n; i++) to[i] = f16FromFloat(x[i]);
        return;
    }
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
