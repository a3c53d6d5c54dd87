// How much memory the machine and the process's control groups leave, read from a folder of made-up files.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "memory/host_memory.h"

namespace sharpi {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

class HostMemoryRoom : public ::testing::Test {
protected:
    HostMemoryRoom() {
        std::string folder = ::testing::TempDir() + "sharpi_room_XXXXXX";
        if (!::mkdtemp(folder.data())) throw std::runtime_error("no temporary folder");
        _folder = folder;
    }
    ~HostMemoryRoom() override { std::filesystem::remove_all(_folder); }
    void write(const std::string& path, const std::string& text) const {
        const std::filesystem::path at = _folder / path;
        std::filesystem::create_directories(at.parent_path());
        std::ofstream(at) << text;
    }
    // A machine with 40 GiB available and 3 GiB of files that exist in memory alone.
    void machine() const {
        write("proc/meminfo",
              "MemTotal:       67108864 kB\nMemFree:  1 kB\nMemAvailable:   41943040 kB\nShmem:  3145728 "
              "kB\nShmemHugePages: 5 kB\n");
    }
    void unified(const std::string& group, const std::string& limit, uint64_t anon, uint64_t shmem) const {
        write("groups" + group + "/memory.max", limit + "\n");
        write("groups" + group + "/memory.stat", "anon " + std::to_string(anon) + "\nfile 99999999\nkernel 5\nshmem " +
                                                     std::to_string(shmem) + "\ninactive_anon 7\n");
    }
    void expect(uint64_t available, uint64_t forFiles) const {
        const MemoryRoom room = memoryRoom(_folder / "proc", _folder / "groups");
        EXPECT_EQ(room.available, available);
        EXPECT_EQ(room.forFiles, forFiles);
    }
    std::filesystem::path _folder;
};

TEST_F(HostMemoryRoom, OfAMachineWithoutGroups) {
    expect(SIZE_MAX, SIZE_MAX);
    machine();
    expect(40 * kGiB, 43 * kGiB);
    // The lines name no group of this process, so the limits that exist are not its own.
    unified("", std::to_string(kGiB), 0, 0);
    write("groups/memory/memory.limit_in_bytes", "1\n");
    write("proc/self/cgroup", "nonsense\n:\n/:\n7\n3:cpu,memory:\n0::\n0::elsewhere\n5:memory:elsewhere\n");
    expect(40 * kGiB, 43 * kGiB);
}

TEST_F(HostMemoryRoom, OfAUnifiedGroup) {
    machine();
    write("proc/self/cgroup", "0::/a/b\n");
    unified("/a/b", std::to_string(16 * kGiB), 2 * kGiB, kGiB);
    expect(13 * kGiB, 14 * kGiB);
    unified("/a/b", "max", 2 * kGiB, kGiB);
    expect(40 * kGiB, 43 * kGiB);
    unified("/a", std::to_string(30 * kGiB), 20 * kGiB, 0);  // one around it
    expect(10 * kGiB, 10 * kGiB);
    unified("/a", std::to_string(3 * kGiB), 3 * kGiB + 1, 0);
    expect(0, 0);
}

TEST_F(HostMemoryRoom, OfAContainerThatSeesOnlyItsOwnGroup) {
    machine();
    write("proc/self/cgroup", "0::/machine/of/others\n");
    unified("", std::to_string(8 * kGiB), kGiB, 2 * kGiB);
    expect(5 * kGiB, 7 * kGiB);
    unified("", std::to_string(42 * kGiB), 0, 0);  // the machine has less, but for files
    expect(40 * kGiB, 42 * kGiB);
}

TEST_F(HostMemoryRoom, OfAGroupOfTheFirstVersion) {
    machine();
    write("proc/self/cgroup", "9:cpuset:/c\n4:hugetlb,memory:/a\n0::/\n");
    write("groups/memory/a/memory.limit_in_bytes", std::to_string(12 * kGiB) + "\n");
    write("groups/memory/a/memory.stat",
          "rss 5\nshmem 6\ntotal_rss " + std::to_string(3 * kGiB) + "\ntotal_shmem " + std::to_string(kGiB) + "\n");
    write("groups/memory/c/memory.limit_in_bytes", "1\n");  // another's
    expect(8 * kGiB, 9 * kGiB);
    write("groups/memory/a/memory.limit_in_bytes", "9223372036854771712\n");  // none
    expect(40 * kGiB, 43 * kGiB);
}

TEST_F(HostMemoryRoom, OfThisMachine) {
    const HostMemory memory;
    EXPECT_GT(memory.freeBytes(), size_t{1} << 20);
}

}  // namespace
}  // namespace sharpi
