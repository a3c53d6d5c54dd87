// See host_memory.h.
#include "memory/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "core/error.h"

namespace sharpi {

namespace {

// MemAvailable of /proc/meminfo in bytes: what can be had without swapping. 0 where the system does not say.
size_t availableBytes() {
    std::FILE* file = std::fopen("/proc/meminfo", "r");
    if (!file) return 0;
    char line[128];
    unsigned long long kib = 0;
    while (std::fgets(line, sizeof line, file) && std::sscanf(line, "MemAvailable: %llu", &kib) != 1) {
    }
    std::fclose(file);
    return static_cast<size_t>(kib) * 1024;
}

// Addresses without memory. PROT_NONE rather than MAP_NORESERVE: the system does not count such pages, but does count
// them when they become writable, and so can refuse there what it would refuse to anyone.
constexpr int kEmpty = MAP_PRIVATE | MAP_ANONYMOUS;

}  // namespace

size_t HostMemory::granularity() const { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

size_t HostMemory::freeBytes() const {
    if (const size_t bytes = availableBytes()) return bytes;
#ifdef _SC_AVPHYS_PAGES
    return static_cast<size_t>(::sysconf(_SC_AVPHYS_PAGES)) * granularity();
#else
    return static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * granularity();
#endif
}

void* HostMemory::reserve(size_t bytes) {
    void* address = ::mmap(nullptr, bytes, PROT_NONE, kEmpty, -1, 0);
    if (address == MAP_FAILED) {
        throw Error(ErrorKind::OutOfMemory, "the system has no range of " + std::to_string(bytes) + " addresses left");
    }
    return address;
}

void HostMemory::release(void* address, size_t bytes) noexcept { ::munmap(address, bytes); }

bool HostMemory::commit(void* address, size_t bytes) { return ::mprotect(address, bytes, PROT_READ | PROT_WRITE) == 0; }

void HostMemory::decommit(void* address, size_t bytes) noexcept {
    // Mapping anew drops the pages; a stray access faults instead of reading zeroes.
    ::mmap(address, bytes, PROT_NONE, kEmpty | MAP_FIXED, -1, 0);
}

void HostMemory::upload(void* to, const void* host, size_t bytes) { std::memcpy(to, host, bytes); }
void HostMemory::download(void* host, const void* from, size_t bytes) { std::memcpy(host, from, bytes); }
void HostMemory::zero(void* address, size_t bytes) { std::memset(address, 0, bytes); }

}  // namespace sharpi
