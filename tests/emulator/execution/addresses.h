// Addresses of a warp's lanes, checked before they are used: generic and global ones against what the device may reach,
// shared and local ones against the block's and the thread's own memory.
#pragma once

#include <cstdint>

#include "execution/block.h"
#include "execution/lanes.h"
#include "execution/operations.h"

namespace sharpi::emulator {

struct Addresses {
    alignas(64) uintptr_t of[kLanes];
};

// That `bytes` bytes at a generic address are there.
void checkLane(Warp& warp, const Instruction& in, int lane, uintptr_t address, size_t bytes, bool writes);
void checkAlignment(Warp& warp, const Instruction& in, const Addresses& addresses, size_t bytes);
// The access is at `offset` of a space of `size` bytes, and not in it.
[[noreturn]] void faultOutside(const Warp& warp, const Instruction& in, int lane, size_t bytes, bool writes,
                               int64_t offset, int64_t size, Space space);

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
                    faultOutside(warp, in, l, bytes, writes, offsets[l], size, kSpace);
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

}  // namespace sharpi::emulator
