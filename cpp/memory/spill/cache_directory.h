// A directory with copies of pages and states, a file for each. They outlive the process and may be read by another
// one.
//
// A file is ROOT/IDENTITY/NAME.page or .state. IDENTITY is a digest of all that decides the bits beside the text, so
// models, formats and arithmetics never meet; NAME is the PageName. What is in a file is therefore always the same,
// whoever writes it, and processes need not know of each other: a file is written under another name and renamed.
//
// A file begins with a SegmentHeader, and whatever is wrong with it or with what follows makes it as good as missing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "memory/pages/saved_copies.h"

namespace sharpi {

// What a copy is of.
enum class SegmentKind : uint32_t { Page = 1, State = 2 };

struct SegmentKey {
    SegmentKind kind = SegmentKind::Page;
    PageName name{};
    bool operator==(const SegmentKey& other) const { return kind == other.kind && name == other.name; }
};

// Little-endian, as all machines are that Sharpi runs on.
struct SegmentHeader {
    char magic[8] = {'S', 'H', 'A', 'R', 'P', 'I', 'K', 'V'};
    uint32_t version = 1;
    SegmentKind kind = SegmentKind::Page;
    Digest identity{};
    PageName name{};
    uint64_t bytes = 0;  // that follow
    uint64_t sum = 0;    // their checksum()
};

struct CacheDirectoryOptions {
    std::string path;        // none: nothing is written
    uint64_t mostBytes = 0;  // of all files in it, whatever wrote them
    Digest identity{};
    // Told a line for people about what has gone wrong. Any thread calls it.
    std::function<void(const std::string&)> notice;
    // Writes all of it or returns false with errno, as a test's does at will.
    std::function<bool(int file, const void* data, size_t bytes)> write = writeFully;

    static bool writeFully(int file, const void* data, size_t bytes);
};

// has() and read() may be called while another thread calls the others.
class CacheDirectory {
public:
    // Makes the directory. Throws Error(InvalidArgument) if it cannot be made, or written to.
    explicit CacheDirectory(CacheDirectoryOptions options);

    bool has(const SegmentKey& key) const;
    // A copy of this size. Nothing if there is no such file, or one that is damaged; that one is removed, with a
    // notice.
    CopiedBytes read(const SegmentKey& key, size_t bytes) const;
    // These have been used now, the first of them most recently. Files go that were used longest ago.
    void use(const std::vector<SegmentKey>& keys) const;
    // If there is no such file yet. Removes others so that there is room; a copy that exceeds it all is left out.
    // Returns false if the file could not be written; nothing of it is left then.
    bool write(const SegmentKey& key, const CopyVector& copy);

private:
    struct Found {
        std::string path;
        uint64_t bytes = 0;
        int64_t used = 0;  // when, by the file system's clock
    };
    static std::vector<Found> segmentsIn(const std::string& root);
    std::string pathOf(const SegmentKey& key) const;
    bool makeRoom(uint64_t bytes);
    void look();
    std::string problemOf(int file, const SegmentKey& key, CopyVector& copy) const;

    const CacheDirectoryOptions _options;
    const std::string _folder;      // that of the identity
    uint64_t _held = 0;             // bytes in the directory when it was last looked through, and written since
    uint64_t _unseen = UINT64_MAX;  // bytes written since then; others write too
    // What was found then and is not yet removed, the longest unused last. Looking for each file that is written would
    // take longer than writing it.
    std::vector<Found> _found;
};

}  // namespace sharpi
