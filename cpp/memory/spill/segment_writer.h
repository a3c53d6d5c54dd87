// Writes copies to a CacheDirectory with a thread of its own, so that no step waits for the disk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "memory/spill/cache_directory.h"

namespace sharpi {

class SegmentWriter {
public:
    // mostQueued: bytes of copies that wait at most.
    SegmentWriter(CacheDirectoryOptions options, size_t mostQueued);
    // Writes what is queued.
    ~SegmentWriter();
    SegmentWriter(const SegmentWriter&) = delete;
    SegmentWriter& operator=(const SegmentWriter&) = delete;

    const CacheDirectory& directory() const { return _directory; }
    // A copy that finds the queue full is left out. After a file could not be written, all are.
    void add(const SegmentKey& key, CopiedBytes copy);
    // Waits until there is room in the queue.
    void addWaiting(const SegmentKey& key, CopiedBytes copy);
    // A copy that is queued, or nothing.
    CopiedBytes find(const SegmentKey& key) const;
    int64_t written() const { return _written; }  // copies

private:
    void work();
    void fail(const std::string& reason);
    bool hasRoom(size_t bytes) const { return _queue.empty() || _queued + bytes <= _mostQueued; }
    void push(const SegmentKey& key, CopiedBytes copy);

    const CacheDirectoryOptions _options;
    const size_t _mostQueued;
    CacheDirectory _directory;

    mutable std::mutex _mutex;  // guards the following
    std::condition_variable _changed;
    std::deque<std::pair<SegmentKey, CopiedBytes>> _queue;  // the first is being written
    size_t _queued = 0;                                     // bytes
    bool _isEnding = false, _hasFailed = false;

    std::atomic<int64_t> _written{0};
    std::thread _thread;  // the last member: it uses all others
};

}  // namespace sharpi
