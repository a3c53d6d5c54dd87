// Copies in files: what comes back is what was written, or nothing.
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "memory/spill/cache_directory.h"
#include "memory/spill/segment_writer.h"
#include "seed.h"
#include "temporary_folder.h"

namespace {

using namespace sharpi;
namespace fs = std::filesystem;

using Bytes = CopyVector;

SegmentKey page(uint8_t number) { return {SegmentKind::Page, {number}}; }

Bytes contents(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void overwrite(const fs::path& path, const Bytes& bytes) {
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

class CachedFiles : public testing::Test {
protected:
    static constexpr size_t kSize = 100, kFile = kSize + sizeof(SegmentHeader);

    CacheDirectoryOptions options(uint64_t most = 1 << 20, uint8_t identity = 7) {
        CacheDirectoryOptions made;
        made.path = folder.path();
        made.mostBytes = most;
        made.identity = {identity};
        made.notice = [this](const std::string& line) {
            const std::lock_guard<std::mutex> lock(_mutex);  // writers have threads of their own
            notices.push_back(line);
        };
        return made;
    }
    static Bytes copyOf(uint8_t number) { return Bytes(kSize, number); }

    TemporaryFolder folder;
    std::vector<std::string> notices;

private:
    std::mutex _mutex;
};

TEST_F(CachedFiles, AreThereForAnotherProcess) {
    CacheDirectory first(options());
    EXPECT_FALSE(first.has(page(1)));
    EXPECT_FALSE(first.read(page(1), kSize));
    ASSERT_TRUE(first.write(page(1), copyOf(1)));
    ASSERT_TRUE(first.write({SegmentKind::State, {1}}, copyOf(2)));
    for (const CacheDirectory* directory : {&first, new CacheDirectory(options())}) {
        const std::unique_ptr<const CacheDirectory> owned(directory == &first ? nullptr : directory);
        EXPECT_TRUE(directory->has(page(1)));
        EXPECT_EQ(*directory->read(page(1), kSize), copyOf(1));
        EXPECT_EQ(*directory->read({SegmentKind::State, {1}}, kSize), copyOf(2));
        EXPECT_FALSE(directory->has(page(2)));
    }
    EXPECT_EQ(notices.size(), 0U);
    for (const fs::path& file : folder.files()) {
        EXPECT_EQ(fs::file_size(file), kFile);
        EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
        EXPECT_EQ(fs::status(file.parent_path()).permissions(), fs::perms::owner_all);
    }
}

TEST_F(CachedFiles, OfAnotherIdentityAreNotUsed) {
    CacheDirectory first(options());
    ASSERT_TRUE(first.write(page(1), copyOf(1)));
    const CacheDirectory other(options(1 << 20, 8));
    EXPECT_FALSE(other.has(page(1)));
    EXPECT_FALSE(other.read(page(1), kSize));
    // Not even if somebody moves them.
    const fs::path file = folder.files().front();
    const fs::path moved = fs::path(folder.path()) / hex({8}) / file.filename();
    fs::copy_file(file, moved);
    EXPECT_FALSE(other.read(page(1), kSize));
    EXPECT_EQ(notices.size(), 1U);
    EXPECT_FALSE(fs::exists(moved));
    EXPECT_TRUE(first.read(page(1), kSize));
    // Nor under another name, or as another kind.
    fs::copy_file(file, file.parent_path() / (hex({2}) + ".page"));
    fs::copy_file(file, file.parent_path() / (hex({1}) + ".state"));
    EXPECT_FALSE(first.read(page(2), kSize));
    EXPECT_FALSE(first.read({SegmentKind::State, {1}}, kSize));
    EXPECT_EQ(notices.size(), 3U);
}

TEST_F(CachedFiles, AreNotUsedIfAnyBitIsWrong) {
    CacheDirectory directory(options());
    for (size_t bit = 0; bit < 8 * kFile; ++bit) {
        ASSERT_TRUE(directory.write(page(1), copyOf(1)));
        Bytes bytes = contents(folder.files().front());
        ASSERT_EQ(bytes.size(), kFile);
        bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] ^ 1u << bit % 8);
        overwrite(folder.files().front(), bytes);
        ASSERT_FALSE(directory.read(page(1), kSize)) << "bit " << bit;
        ASSERT_EQ(notices.size(), bit + 1);
        ASSERT_FALSE(directory.has(page(1))) << "it is removed, so that it is written again";
    }
    EXPECT_NE(notices.front().find("is damaged; it is not used"), std::string::npos);
}

TEST_F(CachedFiles, AreNotUsedInAnyOtherSize) {
    CacheDirectory directory(options());
    ASSERT_TRUE(directory.write(page(1), copyOf(1)));
    const Bytes whole = contents(folder.files().front());
    const fs::path path = folder.files().front();
    for (size_t size = 0; size <= kFile + 1; ++size) {
        Bytes bytes = whole;
        bytes.resize(size);
        overwrite(path, bytes);
        ASSERT_EQ(directory.read(page(1), kSize) != nullptr, size == kFile) << size;
    }
    overwrite(path, whole);
    EXPECT_FALSE(directory.read(page(1), kSize + 1)) << "another size is expected";
    fs::create_directory(path);
    EXPECT_FALSE(directory.read(page(1), kSize));
    EXPECT_NE(notices.back().find("is no file"), std::string::npos);
}

TEST_F(CachedFiles, AreNotUsedIfTheyAreFullOfRubbish) {
    CacheDirectory directory(options());
    std::mt19937 random(testSeed(1));
    for (int round = 0; round < 200; ++round) {
        ASSERT_TRUE(directory.write(page(1), copyOf(1)));
        Bytes bytes = contents(folder.files().front());
        const size_t begin = random() % kFile, end = begin + 1 + random() % (kFile - begin);
        bool differs = false;
        for (size_t i = begin; i < end; ++i) {
            const auto byte = static_cast<uint8_t>(random());
            differs = differs || byte != bytes[i];
            bytes[i] = byte;
        }
        overwrite(folder.files().front(), bytes);
        ASSERT_EQ(directory.read(page(1), kSize) == nullptr, differs) << begin << " to " << end;
    }
}

TEST_F(CachedFiles, ThoseUsedLongestAgoGoFirst) {
    CacheDirectory directory(options(4 * kFile + kFile / 2));
    for (uint8_t i = 1; i <= 4; ++i) ASSERT_TRUE(directory.write(page(i), copyOf(i)));
    directory.use({page(2), page(1)});  // 2 last
    ASSERT_TRUE(directory.write(page(4), copyOf(4)));
    ASSERT_TRUE(directory.write(page(5), copyOf(5)));
    EXPECT_FALSE(directory.has(page(3)));
    // Another model's count too.
    CacheDirectory other(options(4 * kFile + kFile / 2, 8));
    ASSERT_TRUE(other.write(page(1), copyOf(1)));
    EXPECT_FALSE(directory.has(page(1)));
    ASSERT_TRUE(other.write(page(2), copyOf(2)));
    EXPECT_FALSE(directory.has(page(2)));
    for (const uint8_t i : {4, 5}) EXPECT_TRUE(directory.has(page(i))) << int{i};
    EXPECT_EQ(folder.files().size(), 4U);
    EXPECT_TRUE(directory.write(page(9), Bytes(5 * kFile)));
    EXPECT_FALSE(directory.has(page(9))) << "larger than all that is allowed";
    EXPECT_EQ(folder.files().size(), 4U);
}

// Each of the processes knows only what it writes itself, until it looks.
TEST_F(CachedFiles, OfManyProcessesStayNearTheLimit) {
    const uint64_t most = 64 * kFile;
    CacheDirectory a(options(most)), b(options(most, 8));
    for (int i = 0; i < 200; ++i) {
        for (CacheDirectory* directory : {&a, &b})
            ASSERT_TRUE(directory->write({SegmentKind::Page, {static_cast<uint8_t>(i), 1}}, copyOf(1)));
        ASSERT_LE(folder.files().size() * kFile, most + most / 8);
    }
}

// The directory is not looked through for each file that goes.
TEST_F(CachedFiles, ThatOthersUseMeanwhileStay) {
    CacheDirectory directory(options(64 * kFile));
    for (uint8_t i = 0; i <= 64; ++i) ASSERT_TRUE(directory.write(page(i), copyOf(i)));
    EXPECT_FALSE(directory.has(page(0)));
    CacheDirectory(options()).use({page(1)});
    ASSERT_TRUE(directory.write(page(65), copyOf(65)));
    EXPECT_TRUE(directory.has(page(1)));
    EXPECT_FALSE(directory.has(page(2)));
    EXPECT_EQ(folder.files().size(), 64U);
}

TEST_F(CachedFiles, WhatOthersPutThereStays) {
    const fs::path root(folder.path());
    std::vector<fs::path> theirs = {root / "letter.txt", root / (hex({1}) + ".page"), root / "photos" / "1.page",
                                    root / hex({7}) / "notes.page"};
    for (const fs::path& path : theirs) {
        fs::create_directories(path.parent_path());
        overwrite(path, Bytes(1000));
    }
    const fs::path old = root / hex({7}) / ".draft-1-1", fresh = root / hex({7}) / ".draft-2-1";
    for (const fs::path& path : {old, fresh}) overwrite(path, Bytes(10));
    fs::last_write_time(old, fs::file_time_type::clock::now() - std::chrono::hours(2));
    CacheDirectory directory(options(2 * kFile));
    for (uint8_t i = 1; i <= 5; ++i) ASSERT_TRUE(directory.write(page(i), copyOf(i)));
    for (const fs::path& path : theirs) EXPECT_TRUE(fs::exists(path)) << path;
    EXPECT_FALSE(fs::exists(old)) << "a process that has died left it";
    EXPECT_TRUE(fs::exists(fresh));
}

TEST_F(CachedFiles, AFileThatCannotBeWrittenLeavesNothing) {
    for (const int failing : {1, 2}) {
        CacheDirectoryOptions made = options();
        int calls = 0;
        made.write = [&](int file, const void* data, size_t bytes) {
            if (++calls != failing) return CacheDirectoryOptions::writeFully(file, data, bytes);
            CacheDirectoryOptions::writeFully(file, data, bytes / 2);
            errno = ENOSPC;
            return false;
        };
        CacheDirectory directory(made);
        EXPECT_FALSE(directory.write(page(1), copyOf(1)));
        EXPECT_EQ(errno, ENOSPC);
        EXPECT_EQ(folder.files().size(), 0U);
        EXPECT_TRUE(directory.write(page(1), copyOf(1)));
        fs::remove(folder.files().front());
    }
}

TEST_F(CachedFiles, ADirectoryThatCannotBeUsedIsRefused) {
    const fs::path file = fs::path(folder.path()) / "file";
    overwrite(file, {1});
    CacheDirectoryOptions made = options();
    made.path = (file / "inside").string();
    try {
        CacheDirectory directory(made);
        FAIL() << "a directory in a file";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
        EXPECT_NE(std::string(error.what()).find("cannot be used"), std::string::npos) << error.what();
    }
}

// --- the thread that writes ------------------------------------------------------------------------------------------

CopiedBytes shared(Bytes bytes) { return std::make_shared<const Bytes>(std::move(bytes)); }

// A disk that does nothing until it is let go.
class SlowDisk {
public:
    bool write(int file, const void* data, size_t bytes) {
        std::unique_lock<std::mutex> lock(_mutex);
        _isAsked = true;
        _changed.notify_all();
        _changed.wait(lock, [&] { return _isFree; });
        return CacheDirectoryOptions::writeFully(file, data, bytes);
    }
    void waitUntilAsked() {
        std::unique_lock<std::mutex> lock(_mutex);
        _changed.wait(lock, [&] { return _isAsked; });
    }
    void letGo() {
        std::lock_guard<std::mutex> lock(_mutex);
        _isFree = true;
        _changed.notify_all();
    }

private:
    std::mutex _mutex;
    std::condition_variable _changed;
    bool _isAsked = false, _isFree = false;
};

TEST_F(CachedFiles, AreFoundWhileTheyWaitToBeWritten) {
    SlowDisk disk;
    CacheDirectoryOptions made = options();
    made.write = [&](int file, const void* data, size_t bytes) { return disk.write(file, data, bytes); };
    {
        SegmentWriter writer(made, 3 * kSize);
        for (uint8_t i = 1; i <= 3; ++i) writer.add(page(i), shared(copyOf(i)));
        disk.waitUntilAsked();
        writer.add(page(4), shared(copyOf(4)));
        for (uint8_t i = 1; i <= 3; ++i) EXPECT_EQ(*writer.find(page(i)), copyOf(i));
        EXPECT_FALSE(writer.find(page(4))) << "the queue was full";
        EXPECT_EQ(writer.written(), 0);
        std::thread waiting([&] { writer.addWaiting(page(5), shared(copyOf(5))); });
        disk.letGo();
        waiting.join();
    }
    const CacheDirectory directory(options());
    for (const uint8_t i : {1, 2, 3, 5}) EXPECT_EQ(*directory.read(page(i), kSize), copyOf(i)) << int{i};
    EXPECT_FALSE(directory.has(page(4)));
}

TEST_F(CachedFiles, AFullDiskIsToldOnceAndHoldsNobodyUp) {
    CacheDirectoryOptions made = options();
    made.write = [](int, const void*, size_t) {
        errno = ENOSPC;
        return false;
    };
    {
        SegmentWriter writer(made, kSize);
        for (uint8_t i = 1; i <= 20; ++i) writer.addWaiting(page(i), shared(copyOf(i)));
        EXPECT_EQ(writer.written(), 0);
    }
    EXPECT_EQ(folder.files().size(), 0U);
    ASSERT_EQ(notices.size(), 1U);
    EXPECT_EQ(notices.front(),
              "nothing more is written to the cache directory " + folder.path() + ": No space left on device");
}

// Two processes that have computed the same write the same files.
TEST_F(CachedFiles, TwoWritersDoNotHurtEachOther) {
    {
        SegmentWriter a(options(), 1 << 20), b(options(), 1 << 20);
        for (uint8_t i = 0; i < 50; ++i)
            for (SegmentWriter* writer : {&a, &b}) writer->add(page(i), shared(copyOf(i)));
    }
    const CacheDirectory directory(options());
    for (uint8_t i = 0; i < 50; ++i) ASSERT_EQ(*directory.read(page(i), kSize), copyOf(i)) << int{i};
    EXPECT_EQ(folder.files().size(), 50U);
    EXPECT_EQ(notices.size(), 0U);
}

}  // namespace
