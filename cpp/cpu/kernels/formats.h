// What the kernels must know about each quantized format at compile time, and how a DType is mapped to it.
#pragma once

#include "core/blocks.h"
#include "core/dtype.h"

namespace sharpi::cpu::SHARPI_ISA {

enum class Sub { None, PerBlock, PerHalf };  // one integer per 32 elements, or per 16

template <int elements, Sub scales, bool min, Sub mins, int offset, int largest, bool twoFloats = false>
struct FormatBase {
    static constexpr int kElements = elements;  // of a block in the file
    static constexpr Sub kScales = scales;
    static constexpr bool kHasMin = min;
    // Each half of a block of 32 has its own d. The second one is where other types have m.
    static constexpr bool kTwoFloats = twoFloats;
    // The halves of a block of 32 differ in d * sub.
    static constexpr bool kHalves = twoFloats || scales == Sub::PerHalf;
    static constexpr Sub kMins = mins;
    // Quants are kept as unsigned numbers of up to kLargest, which are kOffset too large. Quants that fill a byte
    // (kLargest 255) are kept signed if the instruction set needs it.
    static constexpr int kOffset = offset;
    static constexpr int kLargest = largest;
    static constexpr bool kWide = largest > 127;
};

template <class Block> struct Format;
template <> struct Format<BlockQ4_0> : FormatBase<32, Sub::None, false, Sub::None, 8, 15> {};
template <> struct Format<BlockQ4_1> : FormatBase<32, Sub::None, true, Sub::None, 0, 15> {};
template <> struct Format<BlockQ5_0> : FormatBase<32, Sub::None, false, Sub::None, 16, 31> {};
template <> struct Format<BlockQ5_1> : FormatBase<32, Sub::None, true, Sub::None, 0, 31> {};
template <> struct Format<BlockQ8_0> : FormatBase<32, Sub::None, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ4_NL> : FormatBase<32, Sub::None, false, Sub::None, 128, 255> {};
template <> struct Format<BlockMXFP4> : FormatBase<32, Sub::None, false, Sub::None, 12, 24> {};
template <> struct Format<BlockQ2_K> : FormatBase<256, Sub::PerHalf, true, Sub::PerHalf, 0, 3> {};
template <> struct Format<BlockQ3_K> : FormatBase<256, Sub::PerHalf, false, Sub::None, 4, 7> {};
template <> struct Format<BlockQ4_K> : FormatBase<256, Sub::PerBlock, true, Sub::PerBlock, 0, 15> {};
template <> struct Format<BlockQ5_K> : FormatBase<256, Sub::PerBlock, true, Sub::PerBlock, 0, 31> {};
template <> struct Format<BlockQ6_K> : FormatBase<256, Sub::PerHalf, false, Sub::None, 32, 63> {};
template <> struct Format<BlockIQ4_XS> : FormatBase<256, Sub::PerBlock, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ2_XXS> : FormatBase<256, Sub::PerBlock, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ2_XS> : FormatBase<256, Sub::PerHalf, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ2_S> : FormatBase<256, Sub::PerHalf, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ3_XXS> : FormatBase<256, Sub::PerBlock, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ3_S> : FormatBase<256, Sub::PerBlock, false, Sub::None, 128, 255> {};
template <> struct Format<BlockIQ1_S> : FormatBase<256, Sub::PerBlock, false, Sub::None, 9, 18> {};
template <> struct Format<BlockIQ1_M> : FormatBase<256, Sub::PerHalf, false, Sub::None, 9, 18> {};
template <> struct Format<BlockTQ1_0> : FormatBase<256, Sub::None, false, Sub::None, 1, 2> {};
template <> struct Format<BlockTQ2_0> : FormatBase<256, Sub::None, false, Sub::None, 1, 3> {};
template <> struct Format<BlockNVFP4> : FormatBase<64, Sub::None, false, Sub::None, 12, 24, true> {};
template <> struct Format<BlockQ1_0> : FormatBase<128, Sub::None, false, Sub::None, 1, 2> {};

template <class Block> struct Tag {
    using Type = Block;
};

// Calls action(Tag<Block>) for a quantized type; false for any other.
template <class Action> static inline bool withBlockOf(DType type, Action&& action) {
    switch (type) {
#define SHARPI_CASE(T) \
    case DType::T: action(Tag<Block##T>{}); return true;
        SHARPI_QUANTIZED_TYPES(SHARPI_CASE)
#undef SHARPI_CASE
    default: return false;
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
