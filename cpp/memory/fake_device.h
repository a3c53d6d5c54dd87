// A device in host memory, with a set capacity, a GPU's granularity and failures on demand: allocator, loading and
// the caches are tested on it on any machine. It is strict where a GPU is: a commit outside a reserved range or over
// another, and a decommit of anything but exactly one commit, are bugs that end the test.
#pragma once

#include <cstdint>
#include <map>

#include "memory/host_memory.h"

namespace sharpi {

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

    // The n-th commit from now fails (1: the next one); 0: none does.
    void failCommit(int n) { _failAt = n; }
    int commits() const { return _commits; }  // attempts so far
    // Ranges of more than this many bytes cannot be reserved.
    void setLargestReserve(size_t bytes) { _largestReserve = bytes; }
    size_t reserved() const;  // bytes of addresses
    // Fresh memory is full of rubbish, as a GPU's may be; else it is zero, and costs nothing until touched.
    void poisonCommits() { _poisons = true; }

private:
    using Ranges = std::map<uintptr_t, size_t>;  // bytes by address
    size_t _capacity, _granularity, _used = 0, _largestReserve = SIZE_MAX;
    int _failAt = 0, _commits = 0;
    bool _poisons = false;
    Ranges _reserved, _committed;
};

}  // namespace sharpi
