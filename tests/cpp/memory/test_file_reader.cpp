// Parts of mapped files that are read before they are needed: to memory, or to the page cache.
#include "memory/stream/file_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <random>

#include "core/error.h"
#include "seed.h"
#include "temporary_folder.h"

namespace {

using namespace sharpi;

constexpr size_t kBlock = FileReader::kBlock;

// A file of random bytes that ends within a block.
class MappedBytes {
public:
    explicit MappedBytes(size_t bytes) : content(bytes) {
        std::mt19937 random(testSeed(71));
        for (char& c : content) c = static_cast<char>(random());
        write();
        files.emplace_back(path());
    }
    std::string path() const { return _folder.path() + "/weights"; }
    void write() const {
        std::ofstream(path(), std::ios::binary).write(content.data(), std::streamsize(content.size()));
    }
    const uint8_t* at(size_t offset) const { return files[0].data() + offset; }

    std::vector<char> content;
    std::vector<MappedFile> files;

private:
    TemporaryFolder _folder;
};

// Room for a part, and what lies there once it is read.
struct Room {
    Room(const uint8_t* file, size_t bytes)
        : memory(FileReader::roomFor(bytes) + 1, uint8_t{0xa5}), part{file, bytes, nullptr} {
        part.to = FileReader::placeIn(memory.data() + 1, file);  // a room begins anywhere
    }
    std::vector<uint8_t> memory;
    FileReader::Part part;
};

std::string failureOf(FileReader& reader, FileReader::Ticket ticket) {
    try {
        reader.await(ticket);
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::BadModel);
        return error.what();
    }
    return "";
}

TEST(FileReader, PartsAreTheFilesWhereverTheyLie) {
    const MappedBytes file(40 * kBlock + 77);
    FileReader reader(file.files);
    std::mt19937 random(testSeed(72));
    std::vector<Room> rooms;
    rooms.emplace_back(file.at(0), 1);
    rooms.emplace_back(file.at(40 * kBlock + 76), 1);  // the file's last byte
    rooms.emplace_back(file.at(39 * kBlock + 5), kBlock + 72);
    rooms.emplace_back(file.at(3), file.content.size() - 3);
    rooms.emplace_back(file.at(100), 0);
    for (int i = 0; i < 200; ++i) {
        const size_t begin = random() % file.content.size();
        rooms.emplace_back(file.at(begin), random() % (file.content.size() - begin) + 1);
    }
    std::vector<FileReader::Part> parts;
    for (const Room& room : rooms) parts.push_back(room.part);
    const FileReader::Ticket first = reader.ask(parts);
    for (size_t i = rooms.size(); i-- > 0;) {
        reader.await(first + i);
        EXPECT_TRUE(reader.arrived(first + i));
        const FileReader::Part& part = rooms[i].part;
        ASSERT_EQ(std::memcmp(part.to, file.content.data() + (part.file - file.at(0)), part.bytes), 0) << i;
        ASSERT_EQ(rooms[i].memory[0], 0xa5) << "what lies before the room is somebody else's";
        ASSERT_LE(part.to + part.bytes, rooms[i].memory.data() + rooms[i].memory.size());
    }
    size_t bytes = 0;
    for (const FileReader::Part& part : parts) bytes += part.bytes;
    EXPECT_EQ(reader.bytesRead(), bytes);
}

TEST(FileReader, AMappedPartIsInMemoryOnceItHasArrived) {
    const MappedBytes file(64 * kBlock);
    const int fd = ::open(file.path().c_str(), O_RDONLY);
    ASSERT_EQ(::fsync(fd), 0);
    ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    ::close(fd);
    FileReader reader(file.files);
    const FileReader::Ticket ticket = reader.ask({{file.at(8 * kBlock + 1), 40 * kBlock, nullptr}});
    reader.await(ticket);
    std::vector<unsigned char> present(64);
    ASSERT_EQ(::mincore(const_cast<uint8_t*>(file.at(0)), 64 * kBlock, present.data()), 0);
    for (size_t page = 8; page <= 48; ++page) EXPECT_TRUE(present[page] & 1) << page;
    EXPECT_EQ(reader.bytesRead(), 0u) << "nothing was read to memory of ours";
}

// Whether the rest of a cut file is read to memory or mapped, it is an error of that part alone.
TEST(FileReader, AFileThatWasCutIsAnError) {
    const MappedBytes file(32 * kBlock);
    ASSERT_EQ(::truncate(file.path().c_str(), 16 * kBlock), 0);
    FileReader reader(file.files);
    const Room whole(file.at(2 * kBlock), kBlock), lost(file.at(20 * kBlock), kBlock),
        half(file.at(15 * kBlock), 2 * kBlock);
    const FileReader::Ticket first = reader.ask({lost.part,
                                                 half.part,
                                                 {file.at(20 * kBlock), kBlock, nullptr},
                                                 whole.part,
                                                 {file.at(2 * kBlock), kBlock, nullptr}});
    for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(failureOf(reader, first + i),
                  file.path() + ": a part of it cannot be read: is the file whole, and the disk sound?");
        EXPECT_FALSE(reader.arrived(first + i));
    }
    reader.await(first + 3);
    reader.await(first + 4);
    // The file is whole again.
    reader.beginPass();
    file.write();
    const FileReader::Ticket again = reader.ask({lost.part});
    reader.await(again);
    EXPECT_EQ(std::memcmp(lost.part.to, file.content.data() + 20 * kBlock, kBlock), 0);
}

// What lies at the path by then is another file.
TEST(FileReader, AFileThatWasReplacedIsReadAsItWas) {
    const MappedBytes file(8 * kBlock);
    ASSERT_EQ(::unlink(file.path().c_str()), 0);
    std::ofstream(file.path(), std::ios::binary) << std::string(8 * kBlock, 'x');
    FileReader reader(file.files);
    const Room room(file.at(kBlock + 9), 3 * kBlock);
    reader.await(reader.ask({room.part}));
    EXPECT_EQ(std::memcmp(room.part.to, file.content.data() + kBlock + 9, 3 * kBlock), 0);
}

TEST(FileReader, APartOfNoFileIsRefused) {
    const MappedBytes file(kBlock);
    FileReader reader(file.files);
    const std::vector<uint8_t> elsewhere(10);
    const Room room(elsewhere.data(), 10);
    EXPECT_THROW(reader.ask({room.part}), Error);
}

// Reads from disks by this process say that its model may not be in memory; after some passes without any it is.
TEST(FileReader, ItIsWantedWhileTheProcessReadsFromADisk) {
    const MappedBytes file(256 * kBlock);
    FileReader reader(file.files);
    reader.beginPass();
    for (int pass = 0; pass < FileReader::kCalmPasses; ++pass) reader.beginPass();
    EXPECT_FALSE(reader.wanted());
    const int fd = ::open(file.path().c_str(), O_RDONLY);
    ASSERT_EQ(::fsync(fd), 0);
    ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    ::close(fd);
    unsigned char present = 0;
    ASSERT_EQ(::mincore(const_cast<uint8_t*>(file.at(0)), 1, &present), 0);
    if (present & 1) GTEST_SKIP() << "the temporary folder is in memory, and no disk is read for it";
    uint8_t sum = 0;
    for (size_t page = 0; page < 256; page += 64) sum = static_cast<uint8_t>(sum + *file.at(page * kBlock));
    reader.beginPass();
    EXPECT_TRUE(reader.wanted()) << "a page was read from the disk, for the sum " << int{sum};
    for (int pass = 1; pass < FileReader::kCalmPasses; ++pass) reader.beginPass();
    EXPECT_TRUE(reader.wanted());
    reader.beginPass();
    EXPECT_FALSE(reader.wanted());
}

// Nobody waits for these parts.
TEST(FileReader, ItEndsWithPartsOnTheirWay) {
    const MappedBytes file(512 * kBlock);
    std::vector<Room> rooms;
    for (size_t i = 0; i < 64; ++i) rooms.emplace_back(file.at(i * 7 * kBlock + i), 8 * kBlock);
    std::vector<FileReader::Part> parts;
    for (const Room& room : rooms) parts.push_back(room.part);
    FileReader reader(file.files);
    reader.ask(parts);
}

}  // namespace
