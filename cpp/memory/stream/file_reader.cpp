// See file_reader.h.
#include "memory/stream/file_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/thread_pool.h"

namespace sharpi {

namespace {

constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14: older headers have no name for it

// Grows with every read from a disk that this process asked for. A network's file system counts only what was waited
// for.
int64_t readFromDisks() {
    rusage use = {};
    ::getrusage(RUSAGE_SELF, &use);
    return int64_t{use.ru_inblock} + use.ru_majflt;
}

// Brings the pages of a mapped file into the page cache. Returns false if they cannot be read.
bool readPages(const uint8_t* data, size_t bytes) {
    static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<uintptr_t>(data), begin = address / page * page, end = address + bytes;
    auto* const first = reinterpret_cast<uint8_t*>(begin);
    ::madvise(first, end - begin, MADV_WILLNEED);  // requests the whole part at once
    int result = 0;
    do {
        result = ::madvise(first, end - begin, kPopulateRead);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return true;
    if (errno != EINVAL) return errno == ENOMEM;  // memory is short for now, and the file is sound
    for (uintptr_t at = begin; at < end; at += page) static_cast<void>(*reinterpret_cast<volatile uint8_t*>(at));
    return true;
}

}  // namespace

FileReader::FileReader(const std::vector<MappedFile>& files) {
    for (const MappedFile& file : files) _files.push_back({&file});
}

FileReader::~FileReader() {
    {
        const std::lock_guard<std::mutex> lock(_mutex);
        _stop = true;
    }
    _more.notify_all();
    const bool forked = _forks != forksSoFar();
    for (std::thread& thread : _threads) forked ? thread.detach() : thread.join();
    for (const File& file : _files) {
        if (file.fd >= 0) ::close(file.fd);
    }
}

bool FileReader::beginPass() {
    if (!_threads.empty() && _forks != forksSoFar()) {
        throw Error(ErrorKind::InvalidArgument,
                    "a model cannot be used in a process that was forked after it was loaded: load it in that process");
    }
    bool failed = false;
    {
        std::unique_lock<std::mutex> lock(_mutex);
        _less.wait(lock, [&] { return _arrived == _asked.size(); });
        _asked.clear();
        _next = _arrived = 0;
        std::swap(failed, _failed);
    }
    const int64_t read = readFromDisks();
    if (read > _readBefore) _passesLeft = kCalmPasses;
    else if (_passesLeft > 0) --_passesLeft;
    _readBefore = read;
    return !failed;
}

void FileReader::startThreads() {
    _forks = forksSoFar();
    _threads.reserve(kThreads);
    try {
        while (_threads.size() < kThreads) _threads.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
        // Those that could be started do the work; without any, ask() does it.
    }
}

FileReader::Ticket FileReader::ask(const std::vector<Part>& parts) {
    if (_threads.empty() && !parts.empty()) startThreads();
    std::unique_lock<std::mutex> lock(_mutex);
    const Ticket first = _asked.size();
    for (const Part& part : parts) {
        if (part.bytes) fileOf(part.file);  // throws here rather than in a thread of the reader's
    }
    for (const Part& part : parts) _asked.push_back({part});
    _more.notify_all();
    while (_threads.empty() && readNext(lock)) {
    }
    return first;
}

bool FileReader::arrived(Ticket ticket) {
    const std::lock_guard<std::mutex> lock(_mutex);
    return state(ticket) == State::Arrived;
}

void FileReader::await(Ticket ticket) {
    std::unique_lock<std::mutex> lock(_mutex);
    if (state(ticket) == State::Waiting) {
        const auto start = std::chrono::steady_clock::now();
        _less.wait(lock, [&] { return state(ticket) != State::Waiting; });
        _waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    if (state(ticket) == State::Arrived) return;
    throw Error(ErrorKind::BadModel, fileOf(_asked[static_cast<size_t>(ticket)].part.file).mapped->path() +
                                         ": a part of it cannot be read: is the file whole, and the disk sound?");
}

void FileReader::settle(Ticket ticket) {
    std::unique_lock<std::mutex> lock(_mutex);
    _less.wait(lock, [&] { return state(ticket) != State::Waiting; });
}

double FileReader::waited() {
    const std::lock_guard<std::mutex> lock(_mutex);
    return _waited;
}

uint64_t FileReader::bytesRead() {
    const std::lock_guard<std::mutex> lock(_mutex);
    return _bytesRead;
}

void FileReader::work() {
    std::unique_lock<std::mutex> lock(_mutex);
    for (;;) {
        _more.wait(lock, [&] { return _stop || _next < _asked.size(); });
        if (_stop) return;
        readNext(lock);
    }
}

// Reads the next part, without the lock meanwhile. Returns false if there is none.
bool FileReader::readNext(std::unique_lock<std::mutex>& lock) {
    if (_next >= _asked.size()) return false;
    const Ticket ticket = _next++;
    const Part part = _asked[static_cast<size_t>(ticket)].part;
    lock.unlock();
    const bool done = read(part);
    lock.lock();
    _asked[static_cast<size_t>(ticket)].state = done ? State::Arrived : State::Failed;
    if (done && part.to) _bytesRead += part.bytes;
    _failed |= !done;
    ++_arrived;
    _less.notify_all();
    return true;
}

FileReader::File& FileReader::fileOf(const uint8_t* address) {
    const auto found = std::find_if(_files.begin(), _files.end(), [&](const File& file) {
        return address >= file.mapped->data() && address < file.mapped->data() + file.mapped->bytes();
    });
    if (found == _files.end()) throw Error(ErrorKind::Internal, "a part to be read is in none of the model's files");
    return *found;
}

// Some file systems cannot read past the page cache. By its path, another file might be found there by now.
int FileReader::opened(File& file) {
    const std::lock_guard<std::mutex> lock(_opening);
    const std::string same = "/proc/self/fd/" + std::to_string(file.mapped->descriptor());
    if (file.fd < 0) file.fd = ::open(same.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (file.fd < 0) file.fd = ::fcntl(file.mapped->descriptor(), F_DUPFD_CLOEXEC, 0);
    return file.fd;
}

bool FileReader::read(const Part& part) {
    if (part.bytes == 0) return true;
    return part.to ? copy(part) : readPages(part.file, part.bytes);
}

// Whole blocks; the file's last one may be cut short.
bool FileReader::copy(const Part& part) {
    File& file = fileOf(part.file);
    int fd = opened(file);
    const auto offset = static_cast<size_t>(part.file - file.mapped->data()), ahead = offset % kBlock;
    const size_t wanted = ahead + part.bytes, whole = (wanted + kBlock - 1) / kBlock * kBlock;
    for (size_t done = 0; done < wanted;) {
        const ssize_t count =
            ::pread(fd, part.to - ahead + done, whole - done, static_cast<off_t>(offset - ahead + done));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && errno == EINVAL && fd != file.mapped->descriptor()) {
            fd = file.mapped->descriptor();  // this disk's blocks are larger
            continue;
        }
        if (count <= 0) return false;
        done += static_cast<size_t>(count);
    }
    return true;
}

}  // namespace sharpi
