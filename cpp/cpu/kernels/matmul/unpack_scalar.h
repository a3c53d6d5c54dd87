// Unpacks quantized blocks to plain numbers, one element at a time: for dequantizing, and for the scalar table.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "cpu/kernels/formats.h"

namespace sharpi::cpu::SHARPI_ISA {

// Up to 256 elements: element i is d[i / 32] * scale[i / 16] * quant[i] (+ m[i / 32] * min[i / 16]). If the type has
// two floats for each block of 32, m has those of second halves.
struct Group {
    int8_t quant[256];
    int16_t scale[16], min[16];
    float d[8], m[8];
};

static inline void setBlockScales(Group& g, int b, float d, float m) {
    g.d[b] = d;
    g.m[b] = m;
    g.scale[2 * b] = g.scale[2 * b + 1] = g.min[2 * b] = g.min[2 * b + 1] = 1;
}

static inline void setGroupScales(Group& g, float d, float m) {
    for (int b = 0; b < 8; ++b) {
        g.d[b] = d;
        g.m[b] = m;
    }
}

// For types with no integer scales.
static inline void setGroupFloat(Group& g, float d) {
    for (int b = 0; b < 8; ++b) setBlockScales(g, b, d, 0);
}

static inline int nibble(const uint8_t* quants, int i) { return i < 16 ? quants[i] & 15 : quants[i - 16] >> 4; }
static inline int bit(const uint8_t* bits, int i) { return (bits[i / 8] >> (i % 8)) & 1; }

// `n` blocks of 32 each, at most 8.
static inline void unpack(const BlockQ4_0* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, floatFromF16(blocks[b].d), 0);
        for (int i = 0; i < 32; ++i) g.quant[b * 32 + i] = static_cast<int8_t>(nibble(blocks[b].quants, i) - 8);
    }
}

static inline void unpack(const BlockQ4_1* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, floatFromF16(blocks[b].d), floatFromF16(blocks[b].m));
        for (int i = 0; i < 32; ++i) g.quant[b * 32 + i] = static_cast<int8_t>(nibble(blocks[b].quants, i));
    }
}

static inline void unpack(const BlockQ5_0* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, floatFromF16(blocks[b].d), 0);
        for (int i = 0; i < 32; ++i)
            g.quant[b * 32 + i] = static_cast<int8_t>((nibble(blocks[b].quants, i) | bit(blocks[b].high, i) << 4) - 16);
    }
}

static inline void unpack(const BlockQ5_1* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, floatFromF16(blocks[b].d), floatFromF16(blocks[b].m));
        for (int i = 0; i < 32; ++i)
            g.quant[b * 32 + i] = static_cast<int8_t>(nibble(blocks[b].quants, i) | bit(blocks[b].high, i) << 4);
    }
}

static inline void unpack(const BlockQ8_0* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, floatFromF16(blocks[b].d), 0);
        for (int i = 0; i < 32; ++i) g.quant[b * 32 + i] = blocks[b].quants[i];
    }
}

static inline void unpack(const BlockIQ4_NL* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, floatFromF16(blocks[b].d), 0);
        for (int i = 0; i < 32; ++i) g.quant[b * 32 + i] = kIQ4Values[nibble(blocks[b].quants, i)];
    }
}

static inline void unpack(const BlockMXFP4* blocks, int n, Group& g) {
    for (int b = 0; b < n; ++b) {
        setBlockScales(g, b, halfFromE8m0(blocks[b].e), 0);
        for (int i = 0; i < 32; ++i) g.quant[b * 32 + i] = kMXFP4Values[nibble(blocks[b].quants, i)];
    }
}

static inline void unpack(const BlockQ2_K* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), -floatFromF16(block->dmin));
    for (int j = 0; j < 16; ++j) {
        g.scale[j] = block->scales[j] & 15;
        g.min[j] = block->scales[j] >> 4;
    }
    for (int i = 0; i < 256; ++i)
        g.quant[i] = static_cast<int8_t>((block->quants[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3);
}

static inline void unpack(const BlockQ3_K* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), 0);
    for (int j = 0; j < 16; ++j) {
        const int low = (block->scales[j % 8] >> (j / 8 * 4)) & 15;
        const int high = (block->scales[8 + j % 4] >> (j / 4 * 2)) & 3;
        g.scale[j] = static_cast<int16_t>((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; ++i) {
        const int low = (block->quants[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3;
        const int high = (block->high[i % 32] >> (i / 32)) & 1;
        g.quant[i] = static_cast<int8_t>((low | high << 2) - 4);
    }
}

static inline void unpackScales6(const uint8_t* scales, Group& g) {
    for (int j = 0; j < 8; ++j) {
        const int scale = j < 4 ? scales[j] & 63 : (scales[4 + j] & 15) | (scales[j - 4] >> 6) << 4;
        const int min = j < 4 ? scales[4 + j] & 63 : (scales[4 + j] >> 4) | (scales[j] >> 6) << 4;
        g.scale[2 * j] = g.scale[2 * j + 1] = static_cast<int16_t>(scale);
        g.min[2 * j] = g.min[2 * j + 1] = static_cast<int16_t>(min);
    }
}

static inline void unpack(const BlockQ4_K* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), -floatFromF16(block->dmin));
    unpackScales6(block->scales, g);
    for (int i = 0; i < 256; ++i)
        g.quant[i] = static_cast<int8_t>((block->quants[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15);
}

static inline void unpack(const BlockQ5_K* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), -floatFromF16(block->dmin));
    unpackScales6(block->scales, g);
    for (int i = 0; i < 256; ++i) {
        const int low = (block->quants[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15;
        const int high = (block->high[i % 32] >> (i / 32)) & 1;
        g.quant[i] = static_cast<int8_t>(low | high << 4);
    }
}

static inline void unpack(const BlockQ6_K* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), 0);
    for (int j = 0; j < 16; ++j) g.scale[j] = block->scales[j];
    for (int i = 0; i < 256; ++i) {
        const int n = i / 128, s = i / 32 % 4, l = i % 32;
        const int low = (block->low[n * 64 + s % 2 * 32 + l] >> (s / 2 * 4)) & 15;
        const int high = (block->high[n * 32 + l] >> (2 * s)) & 3;
        g.quant[i] = static_cast<int8_t>((low | high << 4) - 32);
    }
}

static inline void unpack(const BlockIQ4_XS* block, int, Group& g) {
    setGroupScales(g, floatFromF16(block->d), 0);
    for (int j = 0; j < 8; ++j) {
        const int low = (block->scalesLow[j / 2] >> (j % 2 * 4)) & 15;
        const int high = (block->scalesHigh >> (2 * j)) & 3;
        g.scale[2 * j] = g.scale[2 * j + 1] = static_cast<int16_t>((low | high << 4) - 32);
        for (int i = 0; i < 32; ++i) g.quant[j * 32 + i] = kIQ4Values[nibble(block->quants + j * 16, i)];
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
