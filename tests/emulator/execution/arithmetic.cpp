// The table of instructions that compute a lane's result from the same lane's operands.
#include <string>
#include <unordered_map>

#include "execution/functions.h"
#include "execution/lanes.h"
#include "execution/operations.h"

namespace sharpi::emulator {

namespace {

using namespace functions;

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
