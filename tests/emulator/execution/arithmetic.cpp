// Instructions that compute a lane's result from the same lane's operands.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <unordered_map>

#include "execution/lanes.h"
#include "execution/operations.h"

namespace sharpi::emulator {

namespace {

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

// --- the table ------------------------------------------------------------------------------------------------------

template <typename F, typename D, typename... S> Operation operation() {
    Operation made;
    made.run = inLanes<F, D, S...>;
    made.count = 1 + sizeof...(S);
    made.bytes = {sizeof(LaneWord<D>), sizeof(LaneWord<S>)...};
    return made;
}

using Table = std::unordered_map<std::string, Operation>;

template <typename T> void addWhole(Table& table, const std::string& type) {
    table["add." + type] = operation<Add, T, T, T>();
    table["sub." + type] = operation<Subtract, T, T, T>();
    table["mul.lo." + type] = operation<Multiply, T, T, T>();
    table["mad.lo." + type] = operation<MultiplyAdd, T, T, T, T>();
    table["div." + type] = operation<Divide, T, T, T>();
    table["rem." + type] = operation<Remainder, T, T, T>();
    table["min." + type] = operation<Minimum, T, T, T>();
    table["max." + type] = operation<Maximum, T, T, T>();
    table["shr." + type] = operation<ShiftRight, T, T, u32>();
    if constexpr (std::is_signed_v<T>) {
        table["neg." + type] = operation<Negate, T, T>();
        table["abs." + type] = operation<Absolute, T, T>();
    }
}

template <typename T> void addFloat(Table& table, const std::string& type) {
    for (const std::string rounding : {"", ".rn"}) {
        table["add" + rounding + "." + type] = operation<Add, T, T, T>();
        table["sub" + rounding + "." + type] = operation<Subtract, T, T, T>();
        table["mul" + rounding + "." + type] = operation<Multiply, T, T, T>();
    }
    table["fma.rn." + type] = operation<Fused, T, T, T, T>();
    table["div.rn." + type] = operation<Divide, T, T, T>();
    table["rcp.rn." + type] = operation<Reciprocal, T, T>();
    table["sqrt.rn." + type] = operation<Root, T, T>();
    table["neg." + type] = operation<Negate, T, T>();
    table["abs." + type] = operation<Absolute, T, T>();
    table["min." + type] = operation<Minimum, T, T, T>();
    table["max." + type] = operation<Maximum, T, T, T>();
    table["copysign." + type] = operation<CopySign, T, T, T>();
    table["cvt.rni." + type + "." + type] = operation<RoundToWhole, T, T>();
}

template <typename T> void addBits(Table& table, const std::string& type) {
    table["and." + type] = operation<And, T, T, T>();
    table["or." + type] = operation<Or, T, T, T>();
    table["xor." + type] = operation<Xor, T, T, T>();
    table["not." + type] = operation<Not, T, T>();
    if (type == "pred") return;
    table["shl." + type] = operation<ShiftLeft, T, T, u32>();
    table["shr." + type] = operation<ShiftRight, T, T, u32>();
}

template <typename T> void addMoves(Table& table, const std::string& type) {
    table["mov." + type] = operation<Move, T, T>();
    table["selp." + type] = operation<Select, T, T, T, u32>();
}

template <typename T> void addTests(Table& table, const std::string& type) {
    table["setp.eq." + type] = operation<Test<Equal>, u32, T, T>();
    table["setp.ne." + type] = operation<Test<NotEqual>, u32, T, T>();
    table["setp.lt." + type] = operation<Test<Less>, u32, T, T>();
    table["setp.le." + type] = operation<Test<LessOrEqual>, u32, T, T>();
    table["setp.gt." + type] = operation<Test<Greater>, u32, T, T>();
    table["setp.ge." + type] = operation<Test<GreaterOrEqual>, u32, T, T>();
    if constexpr (isFloat<T>) {
        table["setp.equ." + type] = operation<TestOrNan<Equal>, u32, T, T>();
        table["setp.neu." + type] = operation<TestOrNan<NotEqual>, u32, T, T>();
        table["setp.ltu." + type] = operation<TestOrNan<Less>, u32, T, T>();
        table["setp.leu." + type] = operation<TestOrNan<LessOrEqual>, u32, T, T>();
        table["setp.gtu." + type] = operation<TestOrNan<Greater>, u32, T, T>();
        table["setp.geu." + type] = operation<TestOrNan<GreaterOrEqual>, u32, T, T>();
        table["setp.num." + type] = operation<Test<IsNumber>, u32, T, T>();
        table["setp.nan." + type] = operation<Test<IsNan>, u32, T, T>();
    }
}

template <typename D, typename S> void addConversion(Table& table, const std::string& to, const std::string& from) {
    if constexpr (isFloat<D> && isFloat<S>) {
        if (sizeof(D) == sizeof(S)) return;
        table["cvt." + std::string(sizeof(D) < sizeof(S) ? "rn." : "") + to + "." + from] =
            operation<Convert<D>, D, S>();
    } else if constexpr (isFloat<D>) {
        table["cvt.rn." + to + "." + from] = operation<Convert<D>, D, S>();
    } else if constexpr (isFloat<S>) {
        table["cvt.rzi." + to + "." + from] = operation<Truncate<D>, D, S>();
        table["cvt.rni." + to + "." + from] = operation<Nearest<D>, D, S>();
        table["cvt.rmi." + to + "." + from] = operation<Down<D>, D, S>();
        table["cvt.rpi." + to + "." + from] = operation<Up<D>, D, S>();
    } else {
        table["cvt." + to + "." + from] = operation<Convert<D>, D, S>();
    }
}
template <typename D> void addConversionsTo(Table& table, const std::string& to) {
    addConversion<D, s16>(table, to, "s16");
    addConversion<D, u16>(table, to, "u16");
    addConversion<D, s32>(table, to, "s32");
    addConversion<D, u32>(table, to, "u32");
    addConversion<D, s64>(table, to, "s64");
    addConversion<D, u64>(table, to, "u64");
    addConversion<D, f32>(table, to, "f32");
    addConversion<D, f64>(table, to, "f64");
    addConversion<D, s8>(table, to, "s8");
    addConversion<D, u8>(table, to, "u8");
}

void addMixed(Table& table) {
    table["mul.wide.s32"] = operation<MultiplyWide, s64, s32, s32>();
    table["mul.wide.u32"] = operation<MultiplyWide, u64, u32, u32>();
    table["mul.wide.s16"] = operation<MultiplyWide, s32, s16, s16>();
    table["mul.wide.u16"] = operation<MultiplyWide, u32, u16, u16>();
    table["mad.wide.s32"] = operation<MultiplyWideAdd, s64, s32, s32, s64>();
    table["mad.wide.u32"] = operation<MultiplyWideAdd, u64, u32, u32, u64>();
    table["mad.wide.s16"] = operation<MultiplyWideAdd, s32, s16, s16, s32>();
    table["mad.wide.u16"] = operation<MultiplyWideAdd, u32, u16, u16, u32>();
    table["mul.hi.s32"] = operation<MultiplyHigh, s32, s32, s32>();
    table["mul.hi.u32"] = operation<MultiplyHigh, u32, u32, u32>();
    table["mul.hi.s64"] = operation<MultiplyHigh, s64, s64, s64>();
    table["mul.hi.u64"] = operation<MultiplyHigh, u64, u64, u64>();
    table["ex2.approx.f32"] = operation<Exp2, f32, f32>();
    table["ex2.approx.ftz.f32"] = operation<Exp2Flushed, f32, f32>();
    table["lg2.approx.f32"] = operation<Log2, f32, f32>();
    table["rcp.approx.f32"] = operation<Reciprocal, f32, f32>();
    table["rcp.approx.ftz.f32"] = operation<ReciprocalFlushed, f32, f32>();
    table["rsqrt.approx.f32"] = operation<ReciprocalRoot, f32, f32>();
    table["sqrt.approx.f32"] = operation<Root, f32, f32>();
    table["div.full.f32"] = operation<Divide, f32, f32, f32>();
    table["div.approx.f32"] = operation<Divide, f32, f32, f32>();
    table["shf.l.wrap.b32"] = operation<FunnelLeftWrap, u32, u32, u32, u32>();
    table["shf.r.wrap.b32"] = operation<FunnelRightWrap, u32, u32, u32, u32>();
    table["shf.l.clamp.b32"] = operation<FunnelLeftClamp, u32, u32, u32, u32>();
    table["shf.r.clamp.b32"] = operation<FunnelRightClamp, u32, u32, u32, u32>();
    table["bfi.b32"] = operation<InsertBits, u32, u32, u32, u32, u32>();
    table["bfe.u32"] = operation<ExtractBits, u32, u32, u32, u32>();
    table["bfe.s32"] = operation<ExtractBits, s32, s32, u32, u32>();
    table["bmsk.clamp.b32"] = operation<MaskOfBits, u32, u32, u32>();
    table["popc.b32"] = operation<CountBits, u32, u32>();
    table["popc.b64"] = operation<CountBits, u32, u64>();
    table["clz.b32"] = operation<LeadingZeros, u32, u32>();
    table["clz.b64"] = operation<LeadingZeros, u32, u64>();
    table["bfind.u32"] = operation<HighestBit, u32, u32>();
    table["bfind.shiftamt.u32"] = operation<HighestBitShift, u32, u32>();
    table["brev.b32"] = operation<Reverse, u32, u32>();
    table["prmt.b32"] = operation<Permute, u32, u32, u32, u32>();
    table["lop3.b32"] = operation<Logic3, u32, u32, u32, u32, u32>();
    table["dp4a.s32.s32"] = operation<DotBytes<s8, s8>, u32, u32, u32, u32>();
    table["dp4a.u32.s32"] = operation<DotBytes<u8, s8>, u32, u32, u32, u32>();
    table["dp4a.s32.u32"] = operation<DotBytes<s8, u8>, u32, u32, u32, u32>();
    table["dp4a.u32.u32"] = operation<DotBytes<u8, u8>, u32, u32, u32, u32>();
    table["dp2a.lo.s32.s32"] = operation<DotPairs<s16, s8, 0>, u32, u32, u32, u32>();
    table["dp2a.hi.s32.s32"] = operation<DotPairs<s16, s8, 2>, u32, u32, u32, u32>();
    table["cvt.f32.f16"] = operation<FromHalf, f32, u16>();
    table["cvt.rn.f16.f32"] = operation<ToHalf, u16, f32>();
    table["cvt.f32.bf16"] = operation<FromBrain, f32, u16>();
    table["cvt.rn.bf16.f32"] = operation<ToBrain, u16, f32>();
    table["cvt.rn.bf16x2.f32"] = operation<ToBrainPair, u32, f32, f32>();
    table["cvt.rn.f16x2.f32"] = operation<ToHalfPair, u32, f32, f32>();
}

Table makeTable() {
    Table table;
    addWhole<s16>(table, "s16");
    addWhole<u16>(table, "u16");
    addWhole<s32>(table, "s32");
    addWhole<u32>(table, "u32");
    addWhole<s64>(table, "s64");
    addWhole<u64>(table, "u64");
    addFloat<f32>(table, "f32");
    addFloat<f64>(table, "f64");
    addBits<u16>(table, "b16");
    addBits<u32>(table, "b32");
    addBits<u64>(table, "b64");
    addBits<u32>(table, "pred");
    for (const std::string kind : {"b", "u", "s"}) {
        addMoves<u16>(table, kind + "16");
        addMoves<u32>(table, kind + "32");
        addMoves<u64>(table, kind + "64");
    }
    addMoves<f32>(table, "f32");
    addMoves<f64>(table, "f64");
    addMoves<u32>(table, "pred");
    addTests<s16>(table, "s16");
    addTests<u16>(table, "u16");
    addTests<u16>(table, "b16");
    addTests<s32>(table, "s32");
    addTests<u32>(table, "u32");
    addTests<u32>(table, "b32");
    addTests<s64>(table, "s64");
    addTests<u64>(table, "u64");
    addTests<u64>(table, "b64");
    addTests<f32>(table, "f32");
    addTests<f64>(table, "f64");
    addConversionsTo<s8>(table, "s8");
    addConversionsTo<u8>(table, "u8");
    addConversionsTo<s16>(table, "s16");
    addConversionsTo<u16>(table, "u16");
    addConversionsTo<s32>(table, "s32");
    addConversionsTo<u32>(table, "u32");
    addConversionsTo<s64>(table, "s64");
    addConversionsTo<u64>(table, "u64");
    addConversionsTo<f32>(table, "f32");
    addConversionsTo<f64>(table, "f64");
    addMixed(table);
    return table;
}

}  // namespace

void addWarpWide(std::unordered_map<std::string, Operation>& table);  // warp_wide.cpp

const Operation* findOperation(std::string_view name) {
    static const Table table = [] {
        Table made = makeTable();
        addWarpWide(made);
        return made;
    }();
    const auto found = table.find(std::string(name));
    return found == table.end() ? nullptr : &found->second;
}

}  // namespace sharpi::emulator
