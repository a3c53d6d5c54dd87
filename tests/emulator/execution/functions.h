// What instructions compute of a lane's operands.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "execution/lanes.h"

namespace sharpi::emulator::functions {

using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using f32 = float;
using f64 = double;

template <typename T> constexpr bool isFloat = std::is_floating_point_v<T>;
// In which integers wrap around.
template <typename T> using Wide = std::conditional_t<sizeof(T) == 8, u64, u32>;

// --- integers and floats --------------------------------------------------------------------------------------------

struct Move {
    template <typename T> static T of(T a) { return a; }
};
struct Add {
    template <typename T> static T of(T a, T b) {
        if constexpr (isFloat<T>) return a + b;
        else return static_cast<T>(static_cast<Wide<T>>(a) + static_cast<Wide<T>>(b));
    }
};
struct Subtract {
    template <typename T> static T of(T a, T b) {
        if constexpr (isFloat<T>) return a - b;
        else return static_cast<T>(static_cast<Wide<T>>(a) - static_cast<Wide<T>>(b));
    }
};
struct Multiply {
    template <typename T> static T of(T a, T b) {
        if constexpr (isFloat<T>) return a * b;
        else return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b));
    }
};
struct MultiplyWide {
    static s64 of(s32 a, s32 b) { return static_cast<s64>(a) * b; }
    static u64 of(u32 a, u32 b) { return static_cast<u64>(a) * b; }
    static s32 of(s16 a, s16 b) { return static_cast<s32>(a) * b; }
    static u32 of(u16 a, u16 b) { return static_cast<u32>(a) * b; }
};
struct MultiplyHigh {
    static s32 of(s32 a, s32 b) { return static_cast<s32>(static_cast<s64>(a) * b >> 32); }
    static u32 of(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
    static s64 of(s64 a, s64 b) { return static_cast<s64>(static_cast<__int128>(a) * b >> 64); }
    static u64 of(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }
};
struct MultiplyAdd {
    template <typename T> static T of(T a, T b, T c) { return Add::of<T>(Multiply::of<T>(a, b), c); }
};
struct MultiplyWideAdd {
    template <typename T, typename D> static D of(T a, T b, D c) { return Add::of<D>(MultiplyWide::of(a, b), c); }
};
struct Fused {
    static f32 of(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
    static f64 of(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
};
struct Divide {
    template <typename T> static T of(T a, T b) {
        if constexpr (isFloat<T>) {
            return a / b;
        } else {
            if (b == 0) return static_cast<T>(-1);
            if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(0 - static_cast<Wide<T>>(a));
            return a / b;
        }
    }
};
struct Remainder {
    template <typename T> static T of(T a, T b) {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
        return a % b;
    }
};
struct Negate {
    template <typename T> static T of(T a) {
        if constexpr (isFloat<T>) return -a;
        else return static_cast<T>(0 - static_cast<Wide<T>>(a));
    }
};
struct Absolute {
    template <typename T> static T of(T a) {
        if constexpr (isFloat<T>) return std::fabs(a);
        else return a < 0 ? Negate::of<T>(a) : a;
    }
};
// Of a number and a NaN the number; +0 is more than -0.
struct Minimum {
    template <typename T> static T of(T a, T b) {
        if constexpr (isFloat<T>) {
            const T least = a < b || (a == b && std::signbit(a)) ? a : b;
            return a != a ? b : b != b ? a : least;
        } else {
            return a < b ? a : b;
        }
    }
};
struct Maximum {
    template <typename T> static T of(T a, T b) {
        if constexpr (isFloat<T>) {
            const T most = a > b || (a == b && !std::signbit(a)) ? a : b;
            return a != a ? b : b != b ? a : most;
        } else {
            return a > b ? a : b;
        }
    }
};
struct Reciprocal {
    template <typename T> static T of(T a) { return 1 / a; }
};
struct Root {
    static f32 of(f32 a) { return __builtin_sqrtf(a); }
    static f64 of(f64 a) { return __builtin_sqrt(a); }
};
struct CopySign {
    template <typename T> static T of(T sign, T a) { return std::copysign(a, sign); }
};

// --- approximations: as exact as floats allow. Denormal operands and results of .ftz are zeros ----------------------

inline f32 flushed(f32 a) { return std::fabs(a) < std::numeric_limits<f32>::min() ? std::copysign(0.0f, a) : a; }
struct Exp2 {
    static f32 of(f32 a) { return static_cast<f32>(std::exp2(static_cast<f64>(a))); }
};
struct Exp2Flushed {
    static f32 of(f32 a) { return flushed(Exp2::of(flushed(a))); }
};
struct Log2 {
    static f32 of(f32 a) { return static_cast<f32>(std::log2(static_cast<f64>(a))); }
};
struct ReciprocalFlushed {
    static f32 of(f32 a) { return flushed(1 / flushed(a)); }
};
struct ReciprocalRoot {
    static f32 of(f32 a) { return static_cast<f32>(1 / std::sqrt(static_cast<f64>(a))); }
};

// --- bits -----------------------------------------------------------------------------------------------------------

struct And {
    template <typename T> static T of(T a, T b) { return a & b; }
};
struct Or {
    template <typename T> static T of(T a, T b) { return a | b; }
};
struct Xor {
    template <typename T> static T of(T a, T b) { return a ^ b; }
};
struct Not {
    template <typename T> static T of(T a) { return static_cast<T>(~a); }
};
struct ShiftLeft {
    template <typename T> static T of(T a, u32 by) {
        return by >= sizeof(T) * 8 ? T{0} : static_cast<T>(static_cast<Wide<T>>(a) << (by & (sizeof(T) * 8 - 1)));
    }
};
struct ShiftRight {
    template <typename T> static T of(T a, u32 by) {
        constexpr u32 kMost = sizeof(T) * 8 - 1;
        if constexpr (std::is_signed_v<T>) return static_cast<T>(a >> (by > kMost ? kMost : by));
        else return by > kMost ? T{0} : static_cast<T>(a >> (by & kMost));
    }
};
struct FunnelLeftWrap {
    static u32 of(u32 low, u32 high, u32 by) {
        return static_cast<u32>(((static_cast<u64>(high) << 32 | low) << (by & 31)) >> 32);
    }
};
struct FunnelRightWrap {
    static u32 of(u32 low, u32 high, u32 by) {
        return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (by & 31));
    }
};
struct FunnelLeftClamp {
    static u32 of(u32 low, u32 high, u32 by) {
        return by >= 32 ? low : static_cast<u32>(((static_cast<u64>(high) << 32 | low) << by) >> 32);
    }
};
struct FunnelRightClamp {
    static u32 of(u32 low, u32 high, u32 by) {
        return by >= 32 ? high : static_cast<u32>((static_cast<u64>(high) << 32 | low) >> by);
    }
};
struct InsertBits {
    static u32 of(u32 from, u32 into, u32 at, u32 count) {
        at &= 255;
        count &= 255;
        if (at > 31 || count == 0) return into;
        const u32 mask = (count > 31 ? ~0u : (1u << count) - 1) << at;
        return (into & ~mask) | (from << at & mask);
    }
};
struct ExtractBits {
    static u32 of(u32 a, u32 at, u32 count) {
        at &= 255;
        count &= 255;
        const u32 shifted = at > 31 ? 0 : a >> at;
        return count > 31 ? shifted : shifted & ((1u << count) - 1);
    }
    static s32 of(s32 a, u32 at, u32 count) {
        at &= 255;
        count &= 255;
        if (count == 0) return 0;
        const u32 last = std::min(at + count - 1, 31u);
        const s32 sign = a >> last & 1 ? -1 : 0;
        if (at > 31) return sign;
        const u32 kept = last - at + 1;
        const u32 low = static_cast<u32>(a) >> at;
        return static_cast<s32>(kept > 31 ? low : (low & ((1u << kept) - 1)) | (static_cast<u32>(sign) << kept));
    }
};
struct MaskOfBits {
    static u32 of(u32 at, u32 count) { return at > 31 ? 0 : (count > 31 ? ~0u : (1u << count) - 1) << at; }
};
struct CountBits {
    static u32 of(u32 a) { return __builtin_popcount(a); }
    static u32 of(u64 a) { return __builtin_popcountll(a); }
};
struct LeadingZeros {
    static u32 of(u32 a) { return a ? __builtin_clz(a) : 32; }
    static u32 of(u64 a) { return a ? __builtin_clzll(a) : 64; }
};
struct HighestBit {
    static u32 of(u32 a) { return a ? 31 - __builtin_clz(a) : ~0u; }
};
struct HighestBitShift {
    static u32 of(u32 a) { return a ? __builtin_clz(a) : ~0u; }
};
struct Reverse {
    static u32 of(u32 a) {
        a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
        a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
        a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
        return __builtin_bswap32(a);
    }
};
struct Permute {
    static u32 of(u32 a, u32 b, u32 choice) {
        u32 out = 0;
        for (int i = 0; i < 4; ++i) {
            const u32 which = choice >> (4 * i) & 15;
            const u32 byte = (which & 4 ? b : a) >> (8 * (which & 3)) & 255;
            const u32 sign = (0 - (byte >> 7)) & 255;
            out |= (which & 8 ? sign : byte) << (8 * i);
        }
        return out;
    }
};
struct Logic3 {
    static u32 of(u32 a, u32 b, u32 c, u32 table) {
        u32 out = 0;
        for (u32 i = 0; i < 8; ++i) {
            const u32 here = (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
            out |= table >> i & 1 ? here : 0;
        }
        return out;
    }
};
struct Select {
    template <typename T> static T of(T a, T b, u32 chosen) { return chosen ? a : b; }
};

template <typename A, typename B> struct DotBytes {
    static u32 of(u32 a, u32 b, u32 c) {
        for (int i = 0; i < 32; i += 8)
            c += static_cast<u32>(static_cast<s32>(static_cast<A>(a >> i)) * static_cast<s32>(static_cast<B>(b >> i)));
        return c;
    }
};
// Two 16-bit values times the bytes of b from kFirst on.
template <typename A, typename B, int kFirst> struct DotPairs {
    static u32 of(u32 a, u32 b, u32 c) {
        for (int i = 0; i < 2; ++i)
            c += static_cast<u32>(static_cast<s32>(static_cast<A>(a >> (16 * i))) *
                                  static_cast<s32>(static_cast<B>(b >> (8 * (kFirst + i)))));
        return c;
    }
};

// --- comparisons ----------------------------------------------------------------------------------------------------

template <typename Compare> struct Test {
    template <typename T> static u32 of(T a, T b) { return Compare::of(a, b) ? ~0u : 0; }
};
// True for a NaN, too.
template <typename Compare> struct TestOrNan {
    template <typename T> static u32 of(T a, T b) { return Compare::of(a, b) || a != a || b != b ? ~0u : 0; }
};
struct Equal {
    template <typename T> static bool of(T a, T b) { return a == b; }
};
struct NotEqual {
    template <typename T> static bool of(T a, T b) {
        if constexpr (isFloat<T>) return a < b || a > b;
        return a != b;
    }
};
struct Less {
    template <typename T> static bool of(T a, T b) { return a < b; }
};
struct LessOrEqual {
    template <typename T> static bool of(T a, T b) { return a <= b; }
};
struct Greater {
    template <typename T> static bool of(T a, T b) { return a > b; }
};
struct GreaterOrEqual {
    template <typename T> static bool of(T a, T b) { return a >= b; }
};
struct IsNumber {
    template <typename T> static bool of(T a, T b) { return a == a && b == b; }
};
struct IsNan {
    template <typename T> static bool of(T a, T b) { return a != a || b != b; }
};

// --- conversions ----------------------------------------------------------------------------------------------------

template <typename D> struct Convert {
    template <typename S> static D of(S a) { return static_cast<D>(a); }
};
// Out of range: the nearest there is. NaN: 0.
template <typename D> struct Truncate {
    template <typename S> static D of(S a) {
        if (a != a) return 0;
        const S whole = std::trunc(a);
        if (whole >= static_cast<S>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
        if (whole <= static_cast<S>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
        return static_cast<D>(whole);
    }
};
template <typename D> struct Nearest {
    template <typename S> static D of(S a) { return Truncate<D>::of(std::nearbyint(a)); }
};
template <typename D> struct Down {
    template <typename S> static D of(S a) { return Truncate<D>::of(std::floor(a)); }
};
template <typename D> struct Up {
    template <typename S> static D of(S a) { return Truncate<D>::of(std::ceil(a)); }
};
struct RoundToWhole {
    template <typename T> static T of(T a) { return std::nearbyint(a); }
};
struct FromHalf {
    static f32 of(u16 a) { return _cvtsh_ss(a); }
};
struct ToHalf {
    static u16 of(f32 a) {
        return a != a ? 0x7fff : static_cast<u16>(_cvtss_sh(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};
inline u32 brainBits(f32 a) {
    const u32 bits = toWord(a);
    return a != a ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
struct ToBrain {
    static u16 of(f32 a) { return static_cast<u16>(brainBits(a)); }
};
struct FromBrain {
    static f32 of(u16 a) { return fromWord<f32>(static_cast<u32>(a) << 16); }
};
struct ToBrainPair {
    static u32 of(f32 high, f32 low) { return brainBits(high) << 16 | brainBits(low); }
};
struct ToHalfPair {
    static u32 of(f32 high, f32 low) { return static_cast<u32>(ToHalf::of(high)) << 16 | ToHalf::of(low); }
};

}  // namespace sharpi::emulator::functions
