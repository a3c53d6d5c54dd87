// See host_memory.h.
#include "memory/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "core/error.h"

namespace sharpi {

namespace {

// The numbers of a file of lines "name number", by the line's first word ("MemAvailable:"). Empty if there is no such
// file.
std::map<std::string, uint64_t> numbersIn(const std::string& path) {
    std::map<std::string, uint64_t> numbers;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string name;
        uint64_t number = 0;
        if (words >> name >> number) numbers[name] = number;
    }
    return numbers;
}

MemoryRoom least(const MemoryRoom& a, const MemoryRoom& b) {
    return {std::min(a.available, b.available), std::min(a.forFiles, b.forFiles)};
}

MemoryRoom machineRoom(const std::string& processes) {
    auto kib = numbersIn(processes + "/meminfo");
    if (!kib.count("MemAvailable:")) return {};
    const uint64_t available = kib["MemAvailable:"] * 1024;
    return {available, available + kib["Shmem:"] * 1024};
}

// The room that the limit of one control group leaves. Pages of files count as room, since a group at its limit drops
// them first.
MemoryRoom groupRoom(const std::string& folder, bool unified) {
    std::ifstream file(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
    uint64_t limit = 0;
    if (!(file >> limit)) return {};  // no such group, or "max"
    auto bytes = numbersIn(folder + "/memory.stat");
    // These numbers include the groups below it.
    const uint64_t own = bytes[unified ? "anon" : "total_rss"], shared = bytes[unified ? "shmem" : "total_shmem"];
    const auto left = [&](uint64_t taken) { return limit > taken ? limit - taken : 0; };
    return {left(own + shared), left(own)};
}

// The least room that the group at `path` and the groups around it leave. In a container `root` may be the container's
// own group, while the path is one of the machine's, which the container cannot see.
MemoryRoom groupsRoom(const std::string& root, std::string path, bool unified) {
    MemoryRoom room = groupRoom(root, unified);
    for (; path.size() > 1; path.resize(path.rfind('/'))) room = least(room, groupRoom(root + path, unified));
    return room;
}

// Addresses without memory. PROT_NONE rather than MAP_NORESERVE: the system counts such pages only when they become
// writable, and can refuse them then, as it would any other allocation.
constexpr int kEmpty = MAP_PRIVATE | MAP_ANONYMOUS;

}  // namespace

MemoryRoom memoryRoom(const std::string& processes, const std::string& groups) {
    MemoryRoom room = machineRoom(processes);
    std::ifstream file(processes + "/self/cgroup");
    // The lines are "number:controllers:/path"; the unified hierarchy names no controllers.
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos || line[second + 1] != '/') continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",",
                          path = line.substr(second + 1);
        if (controllers == ",,") room = least(room, groupsRoom(groups, path, true));
        if (controllers.find(",memory,") != std::string::npos)
            room = least(room, groupsRoom(groups + "/memory", path, false));
    }
    return room;
}

size_t HostMemory::granularity() const { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

size_t HostMemory::freeBytes() const {
    if (const size_t bytes = memoryRoom().available; bytes != SIZE_MAX) return bytes;
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
