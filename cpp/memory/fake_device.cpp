// See fake_device.h.
#include "memory/fake_device.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/error.h"

namespace sharpi {

namespace {

// Not an exception: decommit and release must not throw, and a misuse must not be mistaken for a refusal.
void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "the fake device was misused: %s\n", what);
    std::abort();
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

bool overlapsAny(const std::map<uintptr_t, size_t>& ranges, uintptr_t begin, size_t bytes) {
    auto next = ranges.lower_bound(begin + bytes);
    if (next == ranges.begin()) return false;
    --next;
    return next->first + next->second > begin;
}

bool liesInOne(const std::map<uintptr_t, size_t>& ranges, uintptr_t begin, size_t bytes) {
    auto next = ranges.upper_bound(begin);
    if (next == ranges.begin()) return false;
    --next;
    return begin + bytes <= next->first + next->second;
}

}  // namespace

// Aligned to the granularity, as a GPU's ranges are and the host's pages need not be.
void* FakeDevice::reserve(size_t bytes) {
    require(bytes > 0 && bytes % _granularity == 0, "a range that is not a multiple of the granularity");
    if (bytes > _largestReserve || bytes > SIZE_MAX - _granularity) {
        throw Error(ErrorKind::OutOfMemory,
                    "the fake device has no range of " + std::to_string(bytes) + " addresses left");
    }
    auto* const start = static_cast<uint8_t*>(HostMemory::reserve(bytes + _granularity));
    const size_t before = (_granularity - number(start) % _granularity) % _granularity;
    uint8_t* const address = start + before;
    if (before) HostMemory::release(start, before);
    HostMemory::release(address + bytes, _granularity - before);
    _reserved.emplace(number(address), bytes);
    return address;
}

void FakeDevice::release(void* address, size_t bytes) noexcept {
    const auto range = _reserved.find(number(address));
    require(range != _reserved.end() && range->second == bytes, "a range given back that was not reserved so");
    require(!overlapsAny(_committed, number(address), bytes), "a range given back with memory still behind it");
    _reserved.erase(range);
    HostMemory::release(address, bytes);
}

bool FakeDevice::commit(void* address, size_t bytes) {
    const uintptr_t begin = number(address);
    require(bytes > 0 && bytes % _granularity == 0 && begin % _granularity == 0,
            "a commit that is not in whole granules");
    require(liesInOne(_reserved, begin, bytes), "a commit outside what was reserved");
    require(!overlapsAny(_committed, begin, bytes), "a commit over another");
    ++_commits;
    if (_failAt > 0 && --_failAt == 0) return false;
    if (bytes > _capacity - _used || !HostMemory::commit(address, bytes)) return false;
    _committed.emplace(begin, bytes);
    _used += bytes;
    if (_poisons) std::memset(address, 0xcd, bytes);
    return true;
}

void FakeDevice::decommit(void* address, size_t bytes) noexcept {
    const auto range = _committed.find(number(address));
    require(range != _committed.end() && range->second == bytes, "memory given back that is not exactly one commit's");
    _committed.erase(range);
    _used -= bytes;
    HostMemory::decommit(address, bytes);
}

size_t FakeDevice::reserved() const {
    size_t total = 0;
    for (const auto& range : _reserved) total += range.second;
    return total;
}

}  // namespace sharpi
