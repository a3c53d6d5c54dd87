// Copies from global to shared memory that run beside the program, and the mbarriers at which threads wait for them and
// for each other.
#include <algorithm>
#include <cstdint>

#include "execution/addresses.h"

namespace sharpi::emulator {

// --- cp.async ------------------------------------------------------------------------------------------------------

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

// --- mbarriers ------------------------------------------------------------------------------------------------------

namespace {

// An mbarrier's 8 bytes: how many arrivals end a phase, how many this one still needs, its parity, how many bytes it
// still expects, and a mark that it was initialized. Bytes that come before they are expected make that negative.
struct Mbarrier {
    uint64_t expected : 13, pending : 13, parity : 1;
    int64_t bytes : 21;
    uint64_t mark : 16;
};
static_assert(sizeof(Mbarrier) == 8);
constexpr uint64_t kMark = 0x6d62;
constexpr uint64_t kMostArrivals = (1 << 13) - 1;  // a GPU's has room for 2^20 - 1
constexpr int64_t kMostBytes = (1 << 20) - 1;
constexpr size_t kBulkUnit = 16;  // of addresses and sizes of bulk copies

size_t placeInShared(const Warp& warp, uintptr_t address) {
    return address - reinterpret_cast<uintptr_t>(warp.block->shared());
}

Mbarrier readMbarrier(const Warp& warp, const Instruction& in, int lane, uintptr_t address) {
    Mbarrier found;
    std::memcpy(&found, reinterpret_cast<const void*>(address), sizeof(found));
    if (found.mark != kMark || (!found.pending && !found.bytes) || found.pending > found.expected)
        fault(warp, in, 1u << lane,
              "an mbarrier that was not initialized or was overwritten, at " +
                  std::to_string(placeInShared(warp, address)) + " of shared memory");
    return found;
}

void writeMbarrier(Mbarrier value, uintptr_t address) {
    if (!value.pending && !value.bytes) {  // the phase ends
        value.pending = value.expected;
        value.parity ^= 1;
    }
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(value));
}

void expect(const Warp& warp, const Instruction& in, int lane, Mbarrier& barrier, int64_t bytes) {
    const int64_t sum = barrier.bytes + bytes;
    if (sum < -kMostBytes || sum > kMostBytes)
        fault(warp, in, 1u << lane, "an mbarrier that expects " + std::to_string(sum) + " bytes");
    barrier.bytes = sum;
}

void arrive(const Warp& warp, const Instruction& in, int lane, Mbarrier& barrier) {
    if (!barrier.pending) fault(warp, in, 1u << lane, "an arrival at an mbarrier that waits for bytes alone");
    --barrier.pending;
}

// All that complete on this mbarrier. Whether there were any.
bool finishBulkCopies(Block& block, uintptr_t mbarrier) {
    std::vector<BulkCopy>& copies = block.bulkCopies;
    const auto first = std::stable_partition(copies.begin(), copies.end(),
                                             [&](const BulkCopy& copy) { return copy.mbarrier != mbarrier; });
    const bool found = first != copies.end();
    for (auto copy = first; copy != copies.end(); ++copy) {
        std::memcpy(copy->to, copy->from, copy->bytes);
        Mbarrier barrier = readMbarrier(*copy->warp, *copy->instruction, copy->lane, mbarrier);
        expect(*copy->warp, *copy->instruction, copy->lane, barrier, -static_cast<int64_t>(copy->bytes));
        writeMbarrier(barrier, mbarrier);
    }
    copies.erase(first, copies.end());
    return found;
}

}  // namespace

void initMbarrierHandler(Warp& warp, const Instruction& in) {
    Addresses at;
    findAddresses<Space::Shared>(warp, in, sizeof(Mbarrier), true, at);
    const auto* counts = warp.at<const uint32_t>(in.o[2]);
    forLanes(warp.exec, [&](int l) {
        if (counts[l] == 0 || counts[l] > kMostArrivals)
            fault(warp, in, 1u << l,
                  "an mbarrier of " + std::to_string(counts[l]) + " arrivals, not of 1 to " +
                      std::to_string(kMostArrivals));
        writeMbarrier({counts[l], counts[l], 0, 0, kMark}, at.of[l]);
    });
}

void arriveHandler(Warp& warp, const Instruction& in) {
    Addresses at;
    findAddresses<Space::Shared>(warp, in, sizeof(Mbarrier), true, at);
    const auto* bytes = in.o[2] == kNone ? nullptr : warp.at<const uint32_t>(in.o[2]);
    forLanes(warp.exec, [&](int l) {
        Mbarrier barrier = readMbarrier(warp, in, l, at.of[l]);
        if (in.o[1] != kNone) std::memcpy(&warp.at<uint64_t>(in.o[1])[l], &barrier, sizeof(barrier));
        if (bytes) expect(warp, in, l, barrier, bytes[l]);
        arrive(warp, in, l, barrier);
        writeMbarrier(barrier, at.of[l]);
    });
    warp.arrived = true;
}

// The arrival may come at any time after the copies, so also at once.
void arriveAfterCopiesHandler(Warp& warp, const Instruction& in) {
    warp.finishCopiesOf(warp.exec);
    arriveHandler(warp, in);
}

// If it fails, others have their turn: the warp will most likely test again. Copies that complete on the mbarrier are
// carried out only then, as late as a program that waits can notice.
void testMbarrierHandler(Warp& warp, const Instruction& in) {
    Addresses at;
    findAddresses<Space::Shared>(warp, in, sizeof(Mbarrier), false, at);
    auto* results = warp.at<uint32_t>(in.o[1]);
    const auto* parities = warp.at<const uint32_t>(in.o[2]);
    forLanes(warp.exec, [&](int l) {
        if (parities[l] > 1) fault(warp, in, 1u << l, "a parity of an mbarrier that is " + std::to_string(parities[l]));
        const bool isOver = readMbarrier(warp, in, l, at.of[l]).parity != parities[l];
        if (!isOver && !warp.failedTest.instruction) warp.failedTest = {&in, l, placeInShared(warp, at.of[l])};
        results[l] = isOver ? ~0u : 0;
    });
    forLanes(warp.exec, [&](int l) {
        if (!results[l] && finishBulkCopies(*warp.block, at.of[l])) warp.arrived = true;
    });
}

// --- cp.async.bulk --------------------------------------------------------------------------------------------------

void copyBulkHandler(Warp& warp, const Instruction& in) {
    const auto* sizes = warp.at<const uint32_t>(in.o[2]);
    forLanes(warp.exec, [&](int l) {
        if (sizes[l] == 0 || sizes[l] % kBulkUnit)
            fault(warp, in, 1u << l, "a bulk copy of " + std::to_string(sizes[l]) + " bytes, not of 16, 32 and so on");
    });
    Instruction to = in, from = in, barrier = in;
    to.immediate = in.extra;
    from.o[0] = in.o[1];
    barrier.o[0] = in.o[3];
    barrier.immediate = *warp.at<const int64_t>(in.o[4]);
    Addresses toAt, fromAt, barrierAt;
    findAddresses<Space::Shared>(warp, to, kBulkUnit, true, toAt);
    findAddresses<Space::Global>(warp, from, kBulkUnit, false, fromAt);
    findAddresses<Space::Shared>(warp, barrier, sizeof(Mbarrier), true, barrierAt);
    forLanes(warp.exec, [&](int l) {
        const size_t offset = placeInShared(warp, toAt.of[l]), size = warp.block->sharedBytes();
        if (sizes[l] > size - offset) faultOutside(warp, in, l, sizes[l], true, offset, size, Space::Shared);
        checkLane(warp, in, l, fromAt.of[l], sizes[l], false);
        readMbarrier(warp, in, l, barrierAt.of[l]);
    });
    forLanes(warp.exec, [&](int l) {
        auto* const target = reinterpret_cast<uint8_t*>(toAt.of[l]);
        std::memset(target, 0xff, sizes[l]);
        warp.block->bulkCopies.push_back(
            {target, reinterpret_cast<const uint8_t*>(fromAt.of[l]), sizes[l], barrierAt.of[l], &warp, &in, l});
    });
}

}  // namespace sharpi::emulator
