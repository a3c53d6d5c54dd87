// Loads, stores, atomics and copies. Every address is checked before it is used: generic and global ones against what
// the device may reach, shared and local ones against the block's and the thread's own memory.
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "execution/block.h"
#include "execution/lanes.h"
#include "execution/operations.h"

namespace sharpi::emulator {

namespace {

struct Addresses {
    alignas(64) uintptr_t of[kLanes];
};

std::string hexadecimal(uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

// The range that `address` is in as a generic address.
Range rangeOf(const Warp& warp, int lane, uintptr_t address) {
    const Block& block = *warp.block;
    const auto shared = reinterpret_cast<uintptr_t>(block.shared());
    if (address - shared < block.sharedBytes()) return {shared, block.sharedBytes(), false};
    const size_t localBytes = block.kernel().localBytes;
    const auto local = reinterpret_cast<uintptr_t>(warp.local) + lane * localBytes;
    if (localBytes && address - local < localBytes) return {local, localBytes, false};
    return DeviceMemory::instance().find(address);
}

void checkLane(Warp& warp, const Instruction& in, int lane, uintptr_t address, size_t bytes, bool writes) {
    const Range range = rangeOf(warp, lane, address);
    const size_t offset = address - range.begin;
    if (!range.bytes)
        fault(warp, in, 1u << lane,
              std::string(writes ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes at " +
                  hexadecimal(address) + ", where nothing is");
    if (offset + bytes > range.bytes)
        fault(warp, in, 1u << lane,
              std::string(writes ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes, " +
                  std::to_string(range.bytes - offset) + " before the end of an allocation of " +
                  std::to_string(range.bytes));
    if (writes && range.readOnly) fault(warp, in, 1u << lane, "a write to memory that may only be read");
    // Each lane's local memory is its own, so such a range serves no other.
    const auto local = reinterpret_cast<uintptr_t>(warp.local);
    if (address - local >= warp.block->kernel().localBytes * kLanes && !range.readOnly)
        warp.block->launch().lastRanges[in.index] = range;
}

void checkAlignment(Warp& warp, const Instruction& in, const Addresses& addresses, size_t bytes) {
    forLanes(warp.exec, [&](int l) {
        if (addresses.of[l] & (bytes - 1))
            fault(warp, in, 1u << l,
                  "an access of " + std::to_string(bytes) + " bytes at " + hexadecimal(addresses.of[l]) +
                      ", which is not aligned");
    });
}

// What o[0] and the immediate are as addresses in a space, as the host's.
template <Space kSpace>
void findAddresses(Warp& warp, const Instruction& in, size_t bytes, bool writes, Addresses& out) {
    const uint32_t exec = warp.exec;
    if constexpr (kSpace == Space::Generic || kSpace == Space::Global) {
        const auto* base = warp.at<const uint64_t>(in.o[0]);
        const uint64_t added = static_cast<uint64_t>(in.immediate);
        for (int l = 0; l < kLanes; ++l) out.of[l] = base[l] + added;
        const Range range = warp.block->launch().lastRanges[in.index];
        const int64_t limit = static_cast<int64_t>(range.bytes) - static_cast<int64_t>(bytes);
        uint32_t outside = 0, crooked = 0;
        if (limit >= 0) {
            // Differences are far from 2^63, as addresses are.
            int64_t wrong = 0;
            uint64_t low = 0;
            for (int l = 0; l < kLanes; ++l) {
                const int64_t offset = static_cast<int64_t>(out.of[l] - range.begin);
                const int64_t counts = exec >> l & 1 ? -1 : 0;
                wrong |= (offset | (limit - offset)) & counts;
                low |= out.of[l] & static_cast<uint64_t>(counts);
            }
            outside = wrong < 0;
            crooked = (low & (bytes - 1)) != 0;
        } else {
            outside = crooked = 1;
        }
        if (crooked) checkAlignment(warp, in, out, bytes);
        if (outside) forLanes(exec, [&](int l) { checkLane(warp, in, l, out.of[l], bytes, writes); });
    } else {
        int64_t offsets[kLanes];
        if (in.wide) {
            const auto* base = warp.at<const uint64_t>(in.o[0]);
            for (int l = 0; l < kLanes; ++l)
                offsets[l] = static_cast<int64_t>(base[l] + static_cast<uint64_t>(in.immediate));
        } else {
            const auto* base = warp.at<const uint32_t>(in.o[0]);
            for (int l = 0; l < kLanes; ++l)
                offsets[l] = static_cast<int64_t>(base[l] + static_cast<uint32_t>(in.immediate));
        }
        const Block& block = *warp.block;
        const int64_t size = static_cast<int64_t>(kSpace == Space::Shared  ? block.sharedBytes()
                                                  : kSpace == Space::Local ? block.kernel().localBytes
                                                                           : block.launch().parameters.size());
        const int64_t limit = size - static_cast<int64_t>(bytes);
        int64_t wrong = 0, low = 0;
        for (int l = 0; l < kLanes; ++l) {
            const int64_t counts = exec >> l & 1 ? -1 : 0;
            wrong |= (offsets[l] | (limit - offsets[l])) & counts;
            low |= offsets[l] & counts;
        }
        if (wrong < 0)
            forLanes(exec, [&](int l) {
                if (offsets[l] < 0 || offsets[l] > limit)
                    fault(warp, in, 1u << l,
                          std::string(writes ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes at " +
                              std::to_string(offsets[l]) + " of " + std::to_string(size) + " bytes of " +
                              (kSpace == Space::Shared  ? "shared memory"
                               : kSpace == Space::Local ? "local memory"
                                                        : "parameters"));
            });
        if (low & static_cast<int64_t>(bytes - 1))
            forLanes(exec, [&](int l) {
                if (offsets[l] & static_cast<int64_t>(bytes - 1))
                    fault(warp, in, 1u << l,
                          "an access of " + std::to_string(bytes) + " bytes at " + std::to_string(offsets[l]) +
                              " of shared or local memory, which is not aligned");
            });
        const auto start = reinterpret_cast<uintptr_t>(kSpace == Space::Shared  ? block.shared()
                                                       : kSpace == Space::Local ? warp.local
                                                                                : block.launch().parameters.data());
        const size_t ofLane = kSpace == Space::Local ? block.kernel().localBytes : 0;
        for (int l = 0; l < kLanes; ++l) out.of[l] = start + l * ofLane + static_cast<uint64_t>(offsets[l]);
    }
}

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

// --- copies to shared memory ----------------------------------------------------------------------------------------

// A copy may write at any time between its start and the wait for it. So its destination is filled with nonsense at the
// start, and with the copied bytes only at the wait: code that reads them too early, or that still needs what was there
// before, reads nonsense.
void copyAsyncHandler(Warp& warp, const Instruction& in) {
    const int bytes = in.count;
    Copies copy;
    copy.lanes = warp.exec;
    copy.bytes = bytes;
    copy.group = warp.copyGroups;
    Instruction to = in, from = in;
    to.immediate = in.extra;
    Addresses toAt, fromAt;
    findAddresses<Space::Shared>(warp, to, bytes, true, toAt);
    from.o[0] = in.o[1];
    const auto* used = in.o[2] == kNone ? nullptr : warp.at<const uint32_t>(in.o[2]);
    // Lanes that copy nothing may have any address.
    const uint32_t exec = warp.exec;
    if (used)
        for (int l = 0; l < kLanes; ++l)
            if (used[l] == 0) warp.exec &= ~(1u << l);
    findAddresses<Space::Global>(warp, from, bytes, false, fromAt);
    warp.exec = exec;
    forLanes(exec, [&](int l) {
        copy.to[l] = reinterpret_cast<uint8_t*>(toAt.of[l]);
        copy.from[l] = reinterpret_cast<const uint8_t*>(fromAt.of[l]);
        copy.used[l] = used ? used[l] : bytes;
        if (copy.used[l] > static_cast<uint32_t>(bytes)) fault(warp, in, 1u << l, "a copy of more bytes than it has");
        std::memset(copy.to[l], 0xff, bytes);
    });
    warp.copies.push_back(copy);
}

void closeCopiesHandler(Warp& warp, const Instruction& in) {
    if (warp.exec != (warp.lanes & ~warp.exited))
        fault(warp, in, warp.exec, "a group of copies that only some lanes close");
    ++warp.copyGroups;
}

void waitForCopiesHandler(Warp& warp, const Instruction& in) {
    if (warp.exec != (warp.lanes & ~warp.exited)) fault(warp, in, warp.exec, "copies that only some lanes wait for");
    if (in.immediate < 0) ++warp.copyGroups;  // those that no group was made of, too
    warp.finishCopies(static_cast<int>(std::max<int64_t>(in.immediate, 0)));
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
