// Loads, stores and atomics.
#include <algorithm>
#include <cstdint>

#include "execution/addresses.h"

namespace sharpi::emulator {

namespace {

// From an address that is known: all lanes get the same.
template <typename T, typename R> void loadParameter(Warp& warp, const Instruction& in) {
    const std::vector<uint8_t>& parameters = warp.block->launch().parameters;
    const size_t at = *warp.at<const uint64_t>(in.o[0]) + static_cast<uint64_t>(in.immediate);
    if (at + in.count * sizeof(T) > parameters.size() || at % sizeof(T))
        fault(warp, in, warp.exec, "a parameter that is not there");
    for (int i = 0; i < in.count; ++i) {
        T value;
        std::memcpy(&value, parameters.data() + at + i * sizeof(T), sizeof(T));
        auto* const out = warp.at<R>(in.list[i]);
        for (int l = 0; l < kLanes; ++l) out[l] = (warp.exec >> l & 1) ? static_cast<R>(value) : out[l];
    }
}

template <Space kSpace, typename T, typename R> void load(Warp& warp, const Instruction& in) {
    if (kSpace == Space::Parameter && (in.o[0] & 1)) return loadParameter<T, R>(warp, in);
    Addresses from;
    findAddresses<kSpace>(warp, in, sizeof(T) * in.count, false, from);
    for (int i = 0; i < in.count; ++i) {
        auto* const out = warp.at<R>(in.list[i]);
        if (warp.exec == kAllLanes) {
            for (int l = 0; l < kLanes; ++l) out[l] = static_cast<R>(reinterpret_cast<const T*>(from.of[l])[i]);
        } else {
            forLanes(warp.exec, [&](int l) { out[l] = static_cast<R>(reinterpret_cast<const T*>(from.of[l])[i]); });
        }
    }
}

template <Space kSpace, typename T, typename R> void store(Warp& warp, const Instruction& in) {
    Addresses to;
    findAddresses<kSpace>(warp, in, sizeof(T) * in.count, true, to);
    for (int i = 0; i < in.count; ++i) {
        const auto* const values = warp.at<const R>(in.list[i]);
        forLanes(warp.exec, [&](int l) { reinterpret_cast<T*>(to.of[l])[i] = static_cast<T>(values[l]); });
    }
}

template <Space kSpace> Handler loadIn(int bytes, bool isSigned, int registerBytes) {
    if (registerBytes == 8) {
        if (bytes == 8) return load<kSpace, uint64_t, uint64_t>;
        if (bytes == 4) return isSigned ? load<kSpace, int32_t, uint64_t> : load<kSpace, uint32_t, uint64_t>;
        if (bytes == 2) return isSigned ? load<kSpace, int16_t, uint64_t> : load<kSpace, uint16_t, uint64_t>;
        return isSigned ? load<kSpace, int8_t, uint64_t> : load<kSpace, uint8_t, uint64_t>;
    }
    if (bytes == 8) return nullptr;
    if (bytes == 4) return load<kSpace, uint32_t, uint32_t>;
    if (bytes == 2) return isSigned ? load<kSpace, int16_t, uint32_t> : load<kSpace, uint16_t, uint32_t>;
    return isSigned ? load<kSpace, int8_t, uint32_t> : load<kSpace, uint8_t, uint32_t>;
}

template <Space kSpace> Handler storeIn(int bytes, int registerBytes) {
    if (registerBytes == 8) {
        return bytes == 8   ? store<kSpace, uint64_t, uint64_t>
               : bytes == 4 ? store<kSpace, uint32_t, uint64_t>
               : bytes == 2 ? store<kSpace, uint16_t, uint64_t>
                            : store<kSpace, uint8_t, uint64_t>;
    }
    if (bytes == 8) return nullptr;
    return bytes == 4   ? store<kSpace, uint32_t, uint32_t>
           : bytes == 2 ? store<kSpace, uint16_t, uint32_t>
                        : store<kSpace, uint8_t, uint32_t>;
}

// --- atomics --------------------------------------------------------------------------------------------------------

template <typename T> struct AddTo {
    static T of(T old, T a, T) { return old + a; }
};
template <typename T> struct LeastOf {
    static T of(T old, T a, T) { return std::min(old, a); }
};
template <typename T> struct MostOf {
    static T of(T old, T a, T) { return std::max(old, a); }
};
template <typename T> struct AndWith {
    static T of(T old, T a, T) { return old & a; }
};
template <typename T> struct OrWith {
    static T of(T old, T a, T) { return old | a; }
};
template <typename T> struct XorWith {
    static T of(T old, T a, T) { return old ^ a; }
};
template <typename T> struct Exchange {
    static T of(T, T a, T) { return a; }
};
template <typename T> struct CompareAndSwap {
    static T of(T old, T expected, T a) { return old == expected ? a : old; }
};
template <typename T> struct CountUp {
    static T of(T old, T a, T) { return old >= a ? 0 : old + 1; }
};

// o: address, result (or none), operands.
template <Space kSpace, typename T, typename F> void atomic(Warp& warp, const Instruction& in) {
    using Word = LaneWord<T>;
    Addresses at;
    findAddresses<kSpace>(warp, in, sizeof(T), true, at);
    const auto* a = warp.at<const Word>(in.o[2]);
    const auto* b = in.o[3] == kNone ? a : warp.at<const Word>(in.o[3]);
    forLanes(warp.exec, [&](int l) {
        auto* word = reinterpret_cast<Word*>(at.of[l]);
        Word old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
        Word made;
        do {
            made = toWord<T>(F::of(fromWord<T>(old), fromWord<T>(a[l]), fromWord<T>(b[l])));
        } while (!__atomic_compare_exchange_n(word, &old, made, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
        if (in.o[1] != kNone) warp.at<Word>(in.o[1])[l] = old;
    });
}

template <Space kSpace, typename T> Handler atomicOf(std::string_view operation) {
    if (operation == "add") return atomic<kSpace, T, AddTo<T>>;
    if (operation == "exch") return atomic<kSpace, T, Exchange<T>>;
    if constexpr (!std::is_floating_point_v<T>) {
        if (operation == "min") return atomic<kSpace, T, LeastOf<T>>;
        if (operation == "max") return atomic<kSpace, T, MostOf<T>>;
        if (operation == "and") return atomic<kSpace, T, AndWith<T>>;
        if (operation == "or") return atomic<kSpace, T, OrWith<T>>;
        if (operation == "xor") return atomic<kSpace, T, XorWith<T>>;
        if (operation == "cas") return atomic<kSpace, T, CompareAndSwap<T>>;
        if (operation == "inc") return atomic<kSpace, T, CountUp<T>>;
    }
    return nullptr;
}
template <Space kSpace> Handler atomicIn(std::string_view operation, std::string_view type) {
    if (type == "u32" || type == "b32") return atomicOf<kSpace, uint32_t>(operation);
    if (type == "s32") return atomicOf<kSpace, int32_t>(operation);
    if (type == "u64" || type == "b64") return atomicOf<kSpace, uint64_t>(operation);
    if (type == "s64") return atomicOf<kSpace, int64_t>(operation);
    if (type == "f32") return atomicOf<kSpace, float>(operation);
    return nullptr;
}

// --- addresses ------------------------------------------------------------------------------------------------------

// o[0] = the generic address of o[1], or back.
template <Space kSpace, bool kToGeneric> void convertAddress(Warp& warp, const Instruction& in) {
    auto* out = warp.at<uint64_t>(in.o[0]);
    const auto* from = warp.at<const uint64_t>(in.o[1]);
    const auto start = reinterpret_cast<uint64_t>(kSpace == Space::Shared ? warp.block->shared() : warp.local);
    const size_t ofLane = kSpace == Space::Local ? warp.block->kernel().localBytes : 0;
    forLanes(warp.exec, [&](int l) {
        const uint64_t base = start + l * ofLane;
        out[l] = kToGeneric ? from[l] + base : from[l] - base;
    });
}

}  // namespace

Handler loadHandler(Space space, int bytes, bool isSigned, int registerBytes) {
    switch (space) {
    case Space::Generic: return loadIn<Space::Generic>(bytes, isSigned, registerBytes);
    case Space::Global: return loadIn<Space::Global>(bytes, isSigned, registerBytes);
    case Space::Shared: return loadIn<Space::Shared>(bytes, isSigned, registerBytes);
    case Space::Local: return loadIn<Space::Local>(bytes, isSigned, registerBytes);
    case Space::Parameter: return loadIn<Space::Parameter>(bytes, isSigned, registerBytes);
    }
    return nullptr;
}

Handler storeHandler(Space space, int bytes, int registerBytes) {
    switch (space) {
    case Space::Generic: return storeIn<Space::Generic>(bytes, registerBytes);
    case Space::Global: return storeIn<Space::Global>(bytes, registerBytes);
    case Space::Shared: return storeIn<Space::Shared>(bytes, registerBytes);
    case Space::Local: return storeIn<Space::Local>(bytes, registerBytes);
    case Space::Parameter: return nullptr;
    }
    return nullptr;
}

Handler atomicHandler(std::string_view operation, std::string_view type, Space space) {
    if (space == Space::Shared) return atomicIn<Space::Shared>(operation, type);
    if (space == Space::Global) return atomicIn<Space::Global>(operation, type);
    if (space == Space::Generic) return atomicIn<Space::Generic>(operation, type);
    return nullptr;
}

Handler addressHandler(Space space, bool toGeneric) {
    if (space == Space::Shared)
        return toGeneric ? convertAddress<Space::Shared, true> : convertAddress<Space::Shared, false>;
    if (space == Space::Local)
        return toGeneric ? convertAddress<Space::Local, true> : convertAddress<Space::Local, false>;
    return nullptr;
}

// --- matrices -------------------------------------------------------------------------------------------------------

void loadMatricesHandler(Warp& warp, const Instruction& in) {
    const int matrices = in.count;
    const bool transposed = in.o[1] != kNone;
    if (warp.exec != kAllLanes) fault(warp, in, warp.exec, "ldmatrix without all lanes");
    Addresses rows;
    warp.exec = matrices == 4 ? kAllLanes : (1u << (8 * matrices)) - 1;
    findAddresses<Space::Shared>(warp, in, 16, false, rows);
    warp.exec = kAllLanes;
    uint32_t results[4][kLanes];
    for (int m = 0; m < matrices; ++m) {
        for (int l = 0; l < kLanes; ++l) {
            const int g = l / 4, t = l % 4;
            const auto element = [&](int row, int column) {
                return static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(rows.of[8 * m + row])[column]);
            };
            results[m][l] = transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                       : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
        }
    }
    for (int m = 0; m < matrices; ++m) std::memcpy(warp.at<uint32_t>(in.list[m]), results[m], sizeof(results[m]));
}

}  // namespace sharpi::emulator
