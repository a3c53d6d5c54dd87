// See cache_directory.h.
#include "memory/spill/cache_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace sharpi {

namespace fs = std::filesystem;

namespace {

constexpr const char* kDraft = ".draft-";
// A draft that is older was left by a process that has died.
constexpr auto kOldDraft = std::chrono::hours(1);
// The directory is looked through again after this part of what it may hold was written.
constexpr uint64_t kLooksInEachFill = 16;

const char* suffixOf(SegmentKind kind) { return kind == SegmentKind::Page ? ".page" : ".state"; }

bool isHex(const std::string& text) {
    return text.size() == 2 * Digest().size() && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

bool isSegment(const fs::path& path) {
    return isHex(path.stem().string()) && (path.extension() == ".page" || path.extension() == ".state");
}

// Names a draft as no other of this process is named, whichever directory object writes it.
std::string nextDraft() {
    static std::atomic<uint64_t> drafts{0};
    return kDraft + std::to_string(::getpid()) + "-" + std::to_string(drafts++);
}

class File {
public:
    File(const std::string& path, int flags) : _number(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {}
    ~File() {
        if (_number >= 0) ::close(_number);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int number() const { return _number; }
    explicit operator bool() const { return _number >= 0; }

private:
    int _number;
};

// Returns whether all of it was there.
bool readFully(int file, void* data, size_t bytes) {
    for (auto* to = static_cast<uint8_t*>(data); bytes > 0;) {
        const ssize_t count = ::read(file, to, bytes);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return false;
        to += count;
        bytes -= static_cast<size_t>(count);
    }
    return true;
}

SegmentHeader headerOf(const SegmentKey& key, const Digest& identity, const CopyVector& copy) {
    SegmentHeader header;
    header.kind = key.kind;
    header.identity = identity;
    header.name = key.name;
    header.bytes = copy.size();
    header.sum = checksum(copy.data(), copy.size());
    return header;
}

// Calls body(entry) for what is in a directory; whatever goes away meanwhile is left out.
template <typename Body> void forEntries(const fs::path& path, const Body& body) {
    std::error_code failed;
    for (fs::directory_iterator at(path, failed), end; !failed && at != end; at.increment(failed)) body(*at);
}

int64_t usedAt(const fs::path& path, std::error_code& failed) {
    return fs::last_write_time(path, failed).time_since_epoch().count();
}

}  // namespace

static_assert(sizeof(SegmentHeader) == 96, "it has no gaps, whose bytes would be any");

bool CacheDirectoryOptions::writeFully(int file, const void* data, size_t bytes) {
    for (const auto* from = static_cast<const uint8_t*>(data); bytes > 0;) {
        const ssize_t count = ::write(file, from, bytes);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return false;
        from += count;
        bytes -= static_cast<size_t>(count);
    }
    return true;
}

CacheDirectory::CacheDirectory(CacheDirectoryOptions options)
    : _options(std::move(options)), _folder(_options.path + "/" + hex(_options.identity)) {
    std::error_code failed;
    fs::create_directories(_options.path, failed);
    if (!failed && ::mkdir(_folder.c_str(), 0700) != 0 && errno != EEXIST) failed = {errno, std::generic_category()};
    if (!failed && ::access(_folder.c_str(), R_OK | W_OK | X_OK) != 0) failed = {errno, std::generic_category()};
    if (failed) {
        throw Error(ErrorKind::InvalidArgument, "the cache directory " + _options.path + " cannot be used: " +
                                                    failed.message() + "; name one that can be written to");
    }
}

std::string CacheDirectory::pathOf(const SegmentKey& key) const {
    return _folder + "/" + hex(key.name) + suffixOf(key.kind);
}

bool CacheDirectory::has(const SegmentKey& key) const { return ::access(pathOf(key).c_str(), R_OK) == 0; }

// What is wrong with the file, if anything; else reads what it holds.
std::string CacheDirectory::problemOf(int file, const SegmentKey& key, CopyVector& copy) const {
    struct stat status{};
    SegmentHeader header;
    if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return "is no file";
    if (static_cast<uint64_t>(status.st_size) != sizeof header + copy.size()) return "has another size";
    if (!readFully(file, &header, sizeof header) || !readFully(file, copy.data(), copy.size()))
        return "cannot be read to its end";
    const SegmentHeader expected = headerOf(key, _options.identity, copy);
    return std::memcmp(&header, &expected, sizeof header) == 0 ? "" : "is damaged";
}

CopiedBytes CacheDirectory::read(const SegmentKey& key, size_t bytes) const {
    const std::string path = pathOf(key);
    const File file(path, O_RDONLY | O_NONBLOCK);
    if (!file) return nullptr;
    auto copy = std::make_shared<CopyVector>(bytes);
    const std::string problem = problemOf(file.number(), key, *copy);
    if (problem.empty()) return copy;
    ::unlink(path.c_str());
    if (_options.notice) _options.notice(path + " " + problem + "; it is not used");
    return nullptr;
}

void CacheDirectory::use(const std::vector<SegmentKey>& keys) const {
    auto now = fs::file_time_type::clock::now();
    for (const SegmentKey& key : keys) {
        std::error_code failed;
        fs::last_write_time(pathOf(key), now, failed);
        now -= std::chrono::microseconds(1);
    }
}

bool CacheDirectory::write(const SegmentKey& key, const CopyVector& copy) {
    const uint64_t bytes = sizeof(SegmentHeader) + copy.size();
    if (bytes > _options.mostBytes) return true;
    if (has(key)) {
        use({key});
        return true;
    }
    if (!makeRoom(bytes)) return true;
    const SegmentHeader header = headerOf(key, _options.identity, copy);
    const std::string draft = _folder + "/" + nextDraft();
    bool isWritten = false;
    {
        const File file(draft, O_WRONLY | O_CREAT | O_EXCL);
        isWritten = file && _options.write(file.number(), &header, sizeof header) &&
                    _options.write(file.number(), copy.data(), copy.size());
    }
    if (isWritten && ::rename(draft.c_str(), pathOf(key).c_str()) == 0) {
        use({key});  // the system's own times are too coarse to tell which of two files came first
        _held += bytes;
        _unseen += bytes;
        return true;
    }
    const int reason = errno;
    ::unlink(draft.c_str());
    errno = reason;
    return false;
}

// Returns whether there is room then: files that cannot be removed may take all of it.
bool CacheDirectory::makeRoom(uint64_t bytes) {
    bool hasLooked = _unseen >= _options.mostBytes / kLooksInEachFill;
    if (hasLooked) look();
    while (_held + bytes > _options.mostBytes) {
        if (_found.empty() && !std::exchange(hasLooked, true)) look();
        if (_found.empty()) return false;
        const Found oldest = std::move(_found.back());
        _found.pop_back();
        std::error_code failed;
        if (usedAt(oldest.path, failed) != oldest.used && !failed) continue;  // it is not the oldest any more
        fs::remove(oldest.path, failed);
        if (!failed) _held -= oldest.bytes;
    }
    return true;
}

void CacheDirectory::look() {
    _found = segmentsIn(_options.path);
    _held = _unseen = 0;
    for (const Found& file : _found) _held += file.bytes;
}

// The files of all identities, those used longest ago last. Removes drafts that nobody will complete.
std::vector<CacheDirectory::Found> CacheDirectory::segmentsIn(const std::string& root) {
    const int64_t old = (fs::file_time_type::clock::now() - kOldDraft).time_since_epoch().count();
    std::vector<Found> found;
    forEntries(root, [&](const fs::directory_entry& folder) {
        if (!isHex(folder.path().filename().string())) return;
        forEntries(folder.path(), [&](const fs::directory_entry& file) {
            std::error_code failed;
            const int64_t used = usedAt(file.path(), failed);
            const uint64_t bytes = failed ? 0 : fs::file_size(file.path(), failed);
            if (failed) return;
            if (isSegment(file.path())) found.push_back({file.path().string(), bytes, used});
            else if (file.path().filename().string().rfind(kDraft, 0) == 0 && used < old)
                fs::remove(file.path(), failed);
        });
    });
    std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.used > b.used; });
    return found;
}

}  // namespace sharpi
