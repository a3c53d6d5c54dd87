// How the paged cache of keys and values is laid out in memory: attention kernels and the cache agree on it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/portable.h"

namespace sharpi {

enum class KvType : uint32_t { F32 = 0, BF16 = 1, F16 = 2 };

// Bytes of an element of the cache. Static, because the CPU's kernels are compiled once for each instruction set, and
// they must not share the linker's copy of an inline function (cpu/kernels/internal.h).
static inline constexpr size_t kvElementBytes(KvType type) { return type == KvType::F32 ? 4 : 2; }

// The pages of a segment: their results are joined to each other first (cpu/kernels/attention.cpp).
constexpr int kSegmentPages = 4;

// Elements of a value of a layer whose keys have `headDim`.
static inline constexpr int32_t kvValueDim(int32_t headDim, int32_t valuePrefix) {
    return valuePrefix > 0 ? valuePrefix : headDim;
}

// One layer's keys and values of the paged cache. Page p of kv head h starts at
// base + ((p * kvHeads + h) * pageTokens) * headDim elements: [pageTokens, headDim], contiguous.
struct KvPages {
    KvType type = KvType::F32;
    int32_t kvHeads = 0, headDim = 0, pageTokens = 0;
    uint8_t* k = nullptr;
    uint8_t* v = nullptr;
    int32_t list = 0;  // which of a sequence's lists of pages says where its tokens are
    // Above 0: a value is the first so many elements of its key, and v is null.
    int32_t valuePrefix = 0;
    // Above 1: a row is a block of so many tokens, and lies in the page of the block's last token.
    int32_t rowTokens = 1;
    SHARPI_PORTABLE int32_t rowsOfPage() const { return rowTokens < pageTokens ? pageTokens / rowTokens : 1; }
    // Where a row of kv head 0 of a layer with one such head begins, in elements; table: the sequence's pages.
    SHARPI_PORTABLE int64_t rowAt(const int32_t* table, int64_t row) const {
        const int64_t last = (row + 1) * rowTokens - 1, slot = last % pageTokens / rowTokens;
        return (int64_t{table[last / pageTokens]} * rowsOfPage() + slot) * headDim;
    }
};

}  // namespace sharpi
