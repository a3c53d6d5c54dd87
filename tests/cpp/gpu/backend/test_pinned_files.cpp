// Which parts of a file are pinned, where the device then reads them, and what happens to parts that memory or the
// system does not let be pinned.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "device/pinned_files.h"
#include "gpu_test.h"
#include "mapped_test_file.h"

namespace sharpi::cuda {
namespace {

HostRange range(uintptr_t begin, uintptr_t end) { return {reinterpret_cast<const uint8_t*>(begin), end - begin}; }

TEST(PagesToPin, AreWholeAndJoinedOverSmallGapsOfOneMapping) {
    const uintptr_t base = 16 << 20, far = base + kPinnedGap + 3 * kPage;
    const std::vector<HostRange> always = {range(far + 5, far + 6), range(base + 10, base + 20),
                                           range(base + 2 * kPage - 1, base + 2 * kPage + 1)};
    const AddressRange low{base, base + 3 * kPage};
    // A distance of one page less than the gap, and of the gap itself.
    EXPECT_EQ(pagesToPin({always, {}, {}}, {{0, far + kPage}}, kPage).always,
              (std::vector<AddressRange>{low, {far, far + kPage}}));
    const std::vector<HostRange> nearer = {always[1], always[2], range(far - kPage, far - kPage + 1)};
    EXPECT_EQ(pagesToPin({nearer, {}, {}}, {{0, far + kPage}}, kPage).always, (std::vector<AddressRange>{{base, far}}));
    // The pages between two mappings belong to neither.
    EXPECT_EQ(pagesToPin({nearer, {}, {}}, {{0, base + 3 * kPage}, {base + 3 * kPage, far}}, kPage).always,
              (std::vector<AddressRange>{low, {far - kPage, far}}));
    EXPECT_TRUE(pagesToPin({{range(base, base)}, {}, {}}, {}, kPage).always.empty());
}

// Compares with a plain implementation over sets of pages.
TEST(PagesToPin, RandomRangesAreAllCoveredOnceAndOnlyThey) {
    std::mt19937 random(testSeed());
    for (int turn = 0; turn < 300; ++turn) {
        const auto some = [&](int count) {
            std::vector<HostRange> ranges;
            for (int i = 0; i < count; ++i) {
                const uintptr_t begin = (uintptr_t{64} << 20) + random() % (uintptr_t{24} << 20);
                ranges.push_back(range(begin, begin + 1 + random() % (random() % 2 ? 300000 : 9000)));
            }
            return ranges;
        };
        // In the order of precedence for a page that several classes want.
        const std::vector<HostRange> wanted[] = {some(static_cast<int>(random() % 9)),
                                                 some(static_cast<int>(random() % 9)),
                                                 some(static_cast<int>(random() % 9))};
        const uintptr_t cut = (uintptr_t{64} << 20) + random() % 6000 * kPage;
        const PagesToPin found =
            pagesToPin({wanted[0], wanted[2], wanted[1]}, {{0, cut}, {cut, uintptr_t{1} << 40}}, kPage);
        const std::vector<AddressRange> pages[] = {found.always, found.optional, found.once};
        std::set<uintptr_t> of[3], pinned, any;
        for (size_t c = 0; c < 3; ++c)
            for (const HostRange& r : wanted[c]) {
                const auto begin = reinterpret_cast<uintptr_t>(r.begin);
                for (uintptr_t p = begin / kPage; p <= (begin + r.bytes - 1) / kPage; ++p)
                    of[c].insert(p), any.insert(p);
            }
        for (size_t c = 0; c < 3; ++c) {
            uintptr_t last = 0;
            for (const AddressRange& r : pages[c]) {
                ASSERT_EQ(r.begin % kPage + r.end % kPage, 0u);
                ASSERT_LT(r.begin, r.end);
                ASSERT_LE(last, r.begin);
                last = r.end;
                uintptr_t gap = 0;
                for (uintptr_t p = r.begin / kPage; p < r.end / kPage; ++p) {
                    ASSERT_TRUE(pinned.insert(p).second) << "the page is pinned twice";
                    gap = any.count(p) ? 0 : gap + 1;
                    ASSERT_LT(gap * kPage, kPinnedGap) << "the page is far from any range";
                }
            }
            for (const uintptr_t p : of[c])
                ASSERT_TRUE(pinned.count(p))
                    << "page " << p << " of class " << c << " is pinned for a weaker class, or not at all";
        }
    }
}

TEST(PagesThatFit, AreAllOfThemOrTheFirstOfThreeQuarters) {
    const std::vector<AddressRange> ranges = {
        {16 * kPage, 32 * kPage}, {40 * kPage, 50 * kPage}, {80 * kPage, 134 * kPage}};  // 16, 10 and 54 pages
    using Ranges = std::vector<AddressRange>;
    const auto fitting = [&](size_t pinned, size_t room) { return pagesThatFit(ranges, pinned * kPage, room, kPage); };
    EXPECT_EQ(fitting(0, SIZE_MAX), ranges);
    EXPECT_EQ(fitting(1000, SIZE_MAX), ranges);
    EXPECT_EQ(fitting(10, 96 * kPage), ranges);  // a sixteenth stays free
    EXPECT_EQ(fitting(11, 96 * kPage), (Ranges{ranges[0], ranges[1], {80 * kPage, 115 * kPage}}));
    EXPECT_EQ(fitting(0, 36 * kPage), (Ranges{ranges[0], ranges[1], {80 * kPage, 81 * kPage}}));
    EXPECT_EQ(fitting(1, 36 * kPage), (Ranges{ranges[0], ranges[1]}));
    EXPECT_EQ(fitting(2, 36 * kPage), (Ranges{ranges[0], {40 * kPage, 49 * kPage}}));
    EXPECT_EQ(fitting(0, 2 * kPage), (Ranges{{16 * kPage, 17 * kPage}}));
    for (const size_t pinned : {27, 28, 1000}) EXPECT_EQ(fitting(pinned, 36 * kPage), Ranges());
    EXPECT_EQ(fitting(0, kPage), Ranges());
    EXPECT_EQ(fitting(0, 0), Ranges());
    EXPECT_EQ(pagesThatFit({}, 5, 0, kPage), Ranges());
}

class PinnedFilesTest : public GpuTest {
protected:
    std::vector<uint8_t> randomBytes(size_t count) {
        std::vector<uint8_t> bytes(count);
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random()());
        return bytes;
    }
    // Reads bytes at a device address.
    static std::vector<uint8_t> deviceReads(const uint8_t* at, size_t bytes) {
        const DeviceArray<uint8_t> copy(bytes);
        require(cudaMemcpy(copy.get(), at, bytes, cudaMemcpyDefault));
        return copy.read();
    }
    // Reads every byte through source().
    static std::vector<uint8_t> throughSources(const PinnedFiles& files, const uint8_t* file, size_t bytes) {
        std::vector<uint8_t> found;
        while (found.size() < bytes) {
            const HostRange source = files.source(file + found.size(), bytes - found.size());
            if (source.bytes == 0 || source.bytes > bytes - found.size())
                throw std::runtime_error("a source of " + std::to_string(source.bytes) + " bytes");
            found.insert(found.end(), source.begin, source.begin + source.bytes);
        }
        return found;
    }
};

// Every byte is right, also if several threads copy.
TEST_F(PinnedFilesTest, ACopyIsTheWholeOfTheFile) {
    const std::vector<uint8_t> bytes = randomBytes((size_t{20} << 20) + random()() % 100000);
    const TemporaryFile file(bytes);
    for (const bool pinned : {true, false}) {
        std::optional<NoPinning> off;
        if (!pinned) off.emplace();
        PinnedFiles files(stream().device());
        files.pin({{{file.data(), file.bytes()}}, {}, {}});
        const HostRange source = files.source(file.data() + 77, file.bytes() - 77);
        ASSERT_EQ(source.bytes, file.bytes() - 77);
        EXPECT_EQ(source.begin == file.data() + 77, pinned);
        EXPECT_EQ(std::memcmp(source.begin, &bytes[77], source.bytes), 0);
        ASSERT_NE(files.reachable(file.data() + 77, file.bytes() - 77), nullptr);
        EXPECT_EQ(files.reachable(file.data() + 77, file.bytes() - 77), files.reachable(file.data(), 1) + 77);
        EXPECT_GE(files.bytes(), file.bytes());
        EXPECT_EQ(deviceReads(files.reachable(file.data() + 5000, 9000), 9000),
                  std::vector<uint8_t>(&bytes[5000], &bytes[14000]));
    }
}

// A container's limit leaves room for 24 MiB, so 18 of the 40 MiB in two files are pinned.
TEST_F(PinnedFilesTest, WhatIsOptionalIsPinnedAsFarAsMemoryGoes) {
    constexpr size_t kMiB = size_t{1} << 20;
    std::string folder = ::testing::TempDir() + "sharpi_room_XXXXXX";
    ASSERT_NE(::mkdtemp(folder.data()), nullptr);
    const auto write = [&](const std::string& path, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(folder + path).parent_path());
        std::ofstream(folder + path) << text;
    };
    write("/proc/meminfo", "MemAvailable: 41943040 kB\nShmem: 0 kB\n");
    write("/proc/self/cgroup", "0::/a\n");
    write("/groups/a/memory.max", std::to_string(30 * kMiB) + "\n");
    write("/groups/a/memory.stat", "anon " + std::to_string(6 * kMiB) + "\nshmem 0\n");

    const std::vector<uint8_t> bytes = randomBytes(20 * kMiB);
    const TemporaryFile one(bytes), two(bytes);
    const TemporaryFile &low = one.data() < two.data() ? one : two, &high = one.data() < two.data() ? two : one;
    {
        PinnedFiles files(stream().device(), [&] { return memoryRoom(folder + "/proc", folder + "/groups"); });
        files.pin({{{high.data() + 19 * kMiB, kMiB}}, {}, {{high.data(), 19 * kMiB}, {low.data(), 20 * kMiB}}});
        // 1 MiB is read in every pass, which leaves 17.
        const uint8_t* const end = low.data() + 17 * kMiB;
        EXPECT_NE(files.reachable(low.data(), 17 * kMiB), nullptr);
        EXPECT_EQ(files.reachable(low.data(), 17 * kMiB + 1), nullptr);
        EXPECT_NE(files.reachable(end - 1, 1), nullptr);
        EXPECT_EQ(files.reachable(end, 1), nullptr);
        EXPECT_EQ(files.reachable(end - 10, 11), nullptr);
        EXPECT_EQ(files.reachable(high.data(), 1), nullptr);
        EXPECT_NE(files.reachable(high.data() + 19 * kMiB, kMiB), nullptr);
        EXPECT_EQ(files.reachable(high.data() + 19 * kMiB - 1, 2), nullptr);
        EXPECT_EQ(deviceReads(files.reachable(end - 70000, 70000), 70000),
                  std::vector<uint8_t>(&bytes[17 * kMiB - 70000], &bytes[17 * kMiB]));
        for (const TemporaryFile* file : {&low, &high}) {
            EXPECT_EQ(throughSources(files, file->data() + 3, file->bytes() - 3),
                      std::vector<uint8_t>(bytes.begin() + 3, bytes.end()));
            files.expect(file->data() + 3, file->bytes() - 3);
        }
        EXPECT_FALSE(canPin(end - 2 * kPage));
        EXPECT_TRUE(canPin(end));
        ASSERT_EQ(files.notes().size(), 1u);
        const std::string note = files.notes()[0];
        for (const char* part : {"22 MiB of 39 MiB", "only 24 MiB"})
            EXPECT_NE(note.find(part), std::string::npos) << note;
    }
    EXPECT_TRUE(canPin(low.data()));
    std::filesystem::remove_all(folder);
}

TEST_F(PinnedFilesTest, WhatIsOptionalStaysAsItIsWhereTheSystemRefuses) {
    const std::vector<uint8_t> bytes = randomBytes(size_t{3} << 20);
    const TemporaryFile file(bytes);
    for (const bool refused : {false, true}) {
        std::optional<NoPinning> off;
        if (refused) off.emplace();
        PinnedFiles files(stream().device());
        files.pin({{}, {}, {{file.data() + 100, file.bytes() - 100}}});
        EXPECT_EQ(files.reachable(file.data() + 100, file.bytes() - 100) == nullptr, refused);
        EXPECT_EQ(files.source(file.data() + 200, 1000).begin, file.data() + 200) << "no copy";
        EXPECT_EQ(throughSources(files, file.data(), file.bytes()), bytes);
        ASSERT_EQ(files.notes().size(), refused ? 1u : 0u);
        for (const std::string& note : files.notes())
            EXPECT_NE(note.find("SHARPI_CUDA_PIN=0"), std::string::npos) << note;
        files.unpinOnce();
        EXPECT_EQ(canPin(file.data() + 200), refused) << "it is pinned for good";
    }
}

// A page that belongs to ranges of several classes goes to the class that cannot do without it.
TEST_F(PinnedFilesTest, WhatIsReadOnceIsNotReadByKernels) {
    const TemporaryFile file(randomBytes(size_t{6} << 20));
    const size_t third = file.bytes() / 3 + 100;
    PinnedFiles files(stream().device());
    files.pin({{{file.data(), third}},
               {{file.data() + 2 * third, file.bytes() - 2 * third}},
               {{file.data() + third, third}}});
    EXPECT_NE(files.reachable(file.data(), third), nullptr);
    EXPECT_EQ(files.reachable(file.data(), 2 * third), nullptr) << "the bytes are in two pins";
    EXPECT_NE(files.reachable(file.data() + third, 1), nullptr);
    EXPECT_NE(files.reachable(file.data() + third + kPage, third - kPage), nullptr);
    EXPECT_NE(files.reachable(file.data() + 2 * third, 1), nullptr) << "the page has optional bytes too";
    EXPECT_EQ(files.reachable(file.data() + 2 * third + kPage, 1), nullptr);
    EXPECT_FALSE(canPin(file.data() + 2 * third + kPage));
    files.unpinOnce();
    EXPECT_TRUE(canPin(file.data() + 2 * third + kPage));
    EXPECT_NE(files.reachable(file.data() + 2 * third - 1, 1), nullptr);
}

}  // namespace
}  // namespace sharpi::cuda
