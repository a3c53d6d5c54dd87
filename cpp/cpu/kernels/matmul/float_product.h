// Small matrix products in float, blocked in registers: those of attention, whose right-hand matrices are pages of the
// KV cache in one of three forms.
#pragma once

#include "cpu/kernels/vec.h"

namespace sharpi::cpu::SHARPI_ISA {

// The most rows that any table multiplies at once: all tables lay out their scratch alike.
constexpr int kMaxProductRows = 8;
#if defined(__AVX512F__)
constexpr int kProductRows = kMaxProductRows;
#else
constexpr int kProductRows = 2;
#endif

// Asks for a line of the caches. Pages lie apart in memory, so the processor does not fetch the next one by itself, and
// with one query row most of the time would go into waiting for it. Only a few lines can be on their way at once, so
// the requests are spread out: reading a line of this page prefetches the line at the same place in the next one.
SHARPI_INLINE void prefetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// The right-hand matrix of a product; its lines are `stride` elements apart. ahead: the distance in bytes from what is
// read to what is prefetched with it, 0 for nothing; only Stored prefetches. The types below say how the elements are
// stored: load() reads kVecs vectors of 16 columns, from `column` on, of kDepth lines, from line k on.
struct Right {
    const void* first = nullptr;
    int64_t stride = 0;
    int64_t ahead = 0;
};

// Floats of the scratch.
struct Floats {
    using Element = float;
    static constexpr int kDepth = 1;
    template <int kVecs> SHARPI_INLINE void load(const Right& b, int64_t k, int64_t column, Vec (*to)[kVecs]) {
        const float* const line = static_cast<const float*>(b.first) + k * b.stride + column;
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; j++) to[0][j] = vload(line + j * kLanes);
    }
};

// Elements as the KV cache has them.
template <class Read> struct Stored {
    using Element = typename Read::Element;
    static constexpr int kDepth = 1;
    template <int kVecs> SHARPI_INLINE void load(const Right& b, int64_t k, int64_t column, Vec (*to)[kVecs]) {
        const Element* const line = static_cast<const Element*>(b.first) + k * b.stride + column;
        const auto* const ahead = reinterpret_cast<const uint8_t*>(line) + b.ahead;
        constexpr int64_t kBytes = kVecs * kLanes * static_cast<int64_t>(sizeof(Element));
        if (b.ahead) {
#pragma GCC unroll 8
            for (int64_t at = 0; at < kBytes; at += 64) prefetch(ahead + at);
        }
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; j++) to[0][j] = Read::load(line + j * kLanes);
    }
};

// A line interleaves two lines of 16-bit elements: line k in the lower halves of its lanes, line k + 1 in the upper
// ones; k is even.
template <class Read> struct Pairs {
    static constexpr int kDepth = 2;
    template <int kVecs> SHARPI_INLINE void load(const Right& b, int64_t k, int64_t column, Vec (*to)[kVecs]) {
        const float* const line = static_cast<const float*>(b.first) + k / 2 * b.stride + column;
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; j++) {
            const Vec pairs = vloadBits(line + j * kLanes);
            to[0][j] = Read::low(pairs);
            to[1][j] = Read::high(pairs);
        }
    }
};

// What a product begins from and how it ends: c[r] = start[r] (or 0) + sum; with factors it joins a page instead:
// c[r] = fma(start[r] + sum, added[r], c[r] * kept[r]). start has c's stride.
struct Ends {
    const float* start = nullptr;
    const float *kept = nullptr, *added = nullptr;
};

// c[r][0 .. 16 kVecs) from the sum over k of a[r][k] * b[k][..], by fma, k ascending. depth is a multiple of kDepth.
template <class Form, int kRows, int kVecs>
SHARPI_INLINE void productBlock(const float* const* a, int64_t depth, const Right& b, const Ends& ends, int64_t column,
                                float* c, int64_t cStride) {
    Vec acc[kRows][kVecs];
    const float* row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
        row[r] = a[r];
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; j++)
            acc[r][j] = ends.start ? vload(ends.start + r * cStride + column + j * kLanes) : vzero();
    }
    for (int64_t k = 0; k < depth; k += Form::kDepth) {
        Vec lines[Form::kDepth][kVecs];
        Form::load(b, k, column, lines);
#pragma GCC unroll 2
        for (int i = 0; i < Form::kDepth; i++) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; r++) {
                const Vec x = vset(row[r][k + i]);
#pragma GCC unroll 8
                for (int j = 0; j < kVecs; j++) acc[r][j] = vfma(x, lines[i][j], acc[r][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
#pragma GCC unroll 8
        for (int j = 0; j < kVecs; j++) {
            float* to = c + r * cStride + column + j * kLanes;
            if (ends.kept) acc[r][j] = vfma(acc[r][j], vset(ends.added[r]), vmul(vload(to), vset(ends.kept[r])));
            vstore(to, acc[r][j]);
        }
    }
}

// The same over any width that is a multiple of 16.
template <class Form, int kRows>
static __attribute__((noinline)) void product(const float* const* a, int64_t depth, const Right& b, const Ends& ends,
                                              float* c, int64_t cStride, int64_t width) {
    int64_t at = 0;
    if constexpr (4 * kRows <= 2 * kProductRows) {  // few rows: more columns hide the latency of the fma chain
        for (; at + 4 * kLanes <= width; at += 4 * kLanes)
            productBlock<Form, kRows, 4>(a, depth, b, ends, at, c, cStride);
    }
    for (; at + 2 * kLanes <= width; at += 2 * kLanes) productBlock<Form, kRows, 2>(a, depth, b, ends, at, c, cStride);
    for (; at < width; at += kLanes) productBlock<Form, kRows, 1>(a, depth, b, ends, at, c, cStride);
}

using Product = void (*)(const float* const*, int64_t, const Right&, const Ends&, float*, int64_t, int64_t);

// The rows that the widest product for up to `rows` rows computes, and that product.
static int productRows(int64_t rows) {
    return rows >= kProductRows ? kProductRows : rows >= 4 && kProductRows > 4 ? 4 : rows >= 2 ? 2 : 1;
}

template <class Form> static Product productOf(int rows) {
    switch (rows) {
    case 8: return product < Form, kProductRows == 8 ? 8 : 1 > ;  // only instantiated where it is used
    case 4: return product < Form, kProductRows == 8 ? 4 : 1 > ;
    case 2: return product<Form, 2>;
    default: return product<Form, 1>;
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
