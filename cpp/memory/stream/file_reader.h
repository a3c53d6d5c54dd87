// Reads parts of the model's files before they are needed, for models that are larger than RAM. A product that meets a
// page which is not in memory waits for this page alone, and then for the next one: the disk has little to do at a
// time. Here a part, such as a matrix of an expert, is asked for as a whole as soon as it is known to be needed, and
// threads of the reader's own read it, so that the disk always has many requests. Parts go
// - either to memory of the caller's, past the system's page cache (O_DIRECT), which costs the processors little: a
//   cache that is managed page by page, and is full, costs them some microseconds a page;
// - or to the page cache, where the file is mapped. A part that is there already costs some microseconds, so this is
//   worth asking for only if the process has read from a disk of late (wanted()).
//
// A mapped page that cannot be read raises SIGBUS for whoever touches it. Here it is an Error.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "model/weights.h"

namespace sharpi {

class FileReader {
public:
    // Enough for a disk that serves 32 requests at once; the system cuts a part into several requests.
    static constexpr int kThreads = 16;
    // Passes without a read from a disk after which wanted() says no.
    static constexpr int kCalmPasses = 16;
    // What is read to memory is read in whole blocks of the disk.
    static constexpr size_t kBlock = 4096;

    // A part of a mapped file. to: where its first byte goes, at the same place in a block of kBlock bytes as the
    // mapped byte; the whole blocks around the part are overwritten. nullptr: to the page cache.
    struct Part {
        const uint8_t* file = nullptr;
        size_t bytes = 0;
        uint8_t* to = nullptr;
    };
    // Memory for a part of `bytes` bytes, wherever it begins in the file and the memory in a block; and where the part
    // begins in that memory.
    static size_t roomFor(size_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock + 2 * kBlock; }
    static uint8_t* placeIn(uint8_t* room, const uint8_t* file) {
        const uintptr_t blocks = (reinterpret_cast<uintptr_t>(room) + kBlock - 1) / kBlock * kBlock;
        return reinterpret_cast<uint8_t*>(blocks) + reinterpret_cast<uintptr_t>(file) % kBlock;
    }
    // Counts the parts asked for. It is good until the next beginPass().
    using Ticket = uint64_t;

    // The files must outlive the reader. They are opened when they are first read.
    explicit FileReader(const std::vector<MappedFile>& files);
    ~FileReader();
    FileReader(const FileReader&) = delete;
    FileReader& operator=(const FileReader&) = delete;

    // Waits for what the last pass asked for, and looks whether the process has read from a disk since the last call.
    // Returns false if a part could not be read. Throws Error(InvalidArgument) in a process that was forked after the
    // reader's threads were started.
    bool beginPass();
    bool wanted() const { return _passesLeft > 0; }

    // Begins to read the parts, in their order; part i has the ticket that is returned, plus i. The threads are started
    // by the first call; if the system refuses them, the parts are read here.
    Ticket ask(const std::vector<Part>& parts);
    bool arrived(Ticket ticket);
    // Returns once the part is in memory. Throws Error(BadModel), which names the file, if it cannot be read; other
    // parts are not affected.
    void await(Ticket ticket);
    // Returns once the part is in memory or has failed: its memory is not written any more.
    void settle(Ticket ticket);

    // Bytes that were read to memory so far. What goes to the page cache is not counted.
    uint64_t bytesRead();
    // Seconds for which await() has waited so far.
    double waited();

private:
    enum class State : uint8_t { Waiting, Arrived, Failed };
    struct Asked {
        Part part;
        State state = State::Waiting;
    };
    struct File {
        const MappedFile* mapped = nullptr;
        int fd = -1;
    };
    void startThreads();
    void work();
    bool readNext(std::unique_lock<std::mutex>& lock);
    File& fileOf(const uint8_t* address);
    int opened(File& file);
    bool read(const Part& part);
    bool copy(const Part& part);
    State state(Ticket ticket) const { return _asked[static_cast<size_t>(ticket)].state; }

    std::vector<File> _files;
    std::mutex _opening;

    std::mutex _mutex;                     // over all that follows
    std::condition_variable _more, _less;  // parts were asked for; parts have arrived
    std::deque<Asked> _asked;              // by ticket
    Ticket _next = 0;                      // the first that nobody has begun to read
    uint64_t _arrived = 0, _bytesRead = 0;
    double _waited = 0;
    bool _failed = false;  // a part of this pass
    bool _stop = false;

    std::vector<std::thread> _threads;
    uint64_t _forks = 0;  // of this process when they were started
    int _passesLeft = 0;
    int64_t _readBefore = 0;  // what the process had read from disks at the last beginPass()
};

}  // namespace sharpi
