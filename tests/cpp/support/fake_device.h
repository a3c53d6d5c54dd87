// A device in host memory, with a set capacity, a GPU's granularity and failures on demand: on it, the allocator,
// loading and the caches are tested on any machine. It is as strict as a GPU: a commit outside a reserved range or over
// another commit, and a decommit of anything but exactly one commit, are bugs that end the test.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "core/error.h"
#include "memory/host_memory.h"

namespace sharpi {

namespace fake {

// Aborts rather than throws: decommit and release must not throw, and misuse must not be mistaken for a refusal.
inline void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "the fake device was misused: %s\n", what);
    std::abort();
}

inline uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

inline bool overlapsAny(const std::map<uintptr_t, size_t>& ranges, uintptr_t begin, size_t bytes) {
    auto next = ranges.lower_bound(begin + bytes);
    if (next == ranges.begin()) return false;
    --next;
    return next->first + next->second > begin;
}

inline bool liesInOne(const std::map<uintptr_t, size_t>& ranges, uintptr_t begin, size_t bytes) {
    auto next = ranges.upper_bound(begin);
    if (next == ranges.begin()) return false;
    --next;
    return begin + bytes <= next->first + next->second;
}

}  // namespace fake

class FakeDevice : public HostMemory {
public:
    explicit FakeDevice(size_t capacity, size_t granularity = size_t{2} << 20)
        : _capacity(capacity), _granularity(granularity) {}
    std::string name() const override { return "the fake device"; }
    size_t granularity() const override { return _granularity; }
    size_t freeBytes() const override { return _capacity - _used; }
    void* reserve(size_t bytes) override;
    void release(void* address, size_t bytes) noexcept override;
    bool commit(void* address, size_t bytes) override;
    bool commitsZeroes() const override { return !_poisons; }
    void decommit(void* address, size_t bytes) noexcept override;

    // The n-th commit from now fails (1: the next one). 0: none does.
    void failCommit(int n) { _failAt = n; }
    int commits() const { return _commits; }  // attempts so far
    // Ranges of more than this many bytes cannot be reserved.
    void setLargestReserve(size_t bytes) { _largestReserve = bytes; }
    size_t reserved() const;  // bytes of addresses
    // From now on, newly committed memory is full of rubbish, as a GPU's may be. Before, it is zero.
    void poisonCommits() { _poisons = true; }

private:
    using Ranges = std::map<uintptr_t, size_t>;  // bytes by address
    size_t _capacity, _granularity, _used = 0, _largestReserve = SIZE_MAX;
    int _failAt = 0, _commits = 0;
    bool _poisons = false;
    Ranges _reserved, _committed;
};

// Ranges are aligned to the granularity, as a GPU's are.
inline void* FakeDevice::reserve(size_t bytes) {
    fake::require(bytes > 0 && bytes % _granularity == 0, "a range that is not a multiple of the granularity");
    if (bytes > _largestReserve || bytes > SIZE_MAX - _granularity) {
        throw Error(ErrorKind::OutOfMemory,
                    "the fake device has no range of " + std::to_string(bytes) + " addresses left");
    }
    auto* const start = static_cast<uint8_t*>(HostMemory::reserve(bytes + _granularity));
    const size_t before = (_granularity - fake::number(start) % _granularity) % _granularity;
    uint8_t* const address = start + before;
    if (before) HostMemory::release(start, before);
    HostMemory::release(address + bytes, _granularity - before);
    _reserved.emplace(fake::number(address), bytes);
    return address;
}

inline void FakeDevice::release(void* address, size_t bytes) noexcept {
    const auto range = _reserved.find(fake::number(address));
    fake::require(range != _reserved.end() && range->second == bytes, "a range given back that was not reserved so");
    fake::require(!fake::overlapsAny(_committed, fake::number(address), bytes),
                  "a range given back with memory still behind it");
    _reserved.erase(range);
    HostMemory::release(address, bytes);
}

inline bool FakeDevice::commit(void* address, size_t bytes) {
    const uintptr_t begin = fake::number(address);
    fake::require(bytes > 0 && bytes % _granularity == 0 && begin % _granularity == 0,
                  "a commit that is not in whole granules");
    fake::require(fake::liesInOne(_reserved, begin, bytes), "a commit outside what was reserved");
    fake::require(!fake::overlapsAny(_committed, begin, bytes), "a commit over another");
    ++_commits;
    if (_failAt > 0 && --_failAt == 0) return false;
    if (bytes > _capacity - _used || !HostMemory::commit(address, bytes)) return false;
    _committed.emplace(begin, bytes);
    _used += bytes;
    if (_poisons) std::memset(address, 0xcd, bytes);
    return true;
}

inline void FakeDevice::decommit(void* address, size_t bytes) noexcept {
    const auto range = _committed.find(fake::number(address));
    fake::require(range != _committed.end() && range->second == bytes,
                  "memory given back that is not exactly one commit's");
    _committed.erase(range);
    _used -= bytes;
    HostMemory::decommit(address, bytes);
}

inline size_t FakeDevice::reserved() const {
    size_t total = 0;
    for (const auto& range : _reserved) total += range.second;
    return total;
}

}  // namespace sharpi
