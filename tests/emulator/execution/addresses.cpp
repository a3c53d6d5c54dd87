// See addresses.h.
#include "execution/addresses.h"

#include <cstdio>

namespace sharpi::emulator {

namespace {

std::string hexadecimal(uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

std::string accessOf(size_t bytes, bool writes) {
    return std::string(writes ? "a write" : "a read") + " of " + std::to_string(bytes) + " bytes";
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

}  // namespace

void checkLane(Warp& warp, const Instruction& in, int lane, uintptr_t address, size_t bytes, bool writes) {
    const Range range = rangeOf(warp, lane, address);
    const size_t offset = address - range.begin;
    if (!range.bytes)
        fault(warp, in, 1u << lane, accessOf(bytes, writes) + " at " + hexadecimal(address) + ", where nothing is");
    if (offset + bytes > range.bytes)
        fault(warp, in, 1u << lane,
              accessOf(bytes, writes) + ", " + std::to_string(range.bytes - offset) +
                  " before the end of an allocation of " + std::to_string(range.bytes));
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

void faultOutside(const Warp& warp, const Instruction& in, int lane, size_t bytes, bool writes, int64_t offset,
                  int64_t size, Space space) {
    fault(warp, in, 1u << lane,
          accessOf(bytes, writes) + " at " + std::to_string(offset) + " of " + std::to_string(size) + " bytes of " +
              (space == Space::Shared  ? "shared memory"
               : space == Space::Local ? "local memory"
                                       : "parameters"));
}

}  // namespace sharpi::emulator
