// See segment_writer.h.
#include "memory/spill/segment_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <new>
#include <string>

namespace sharpi {

SegmentWriter::SegmentWriter(CacheDirectoryOptions options, size_t mostQueued)
    : _options(std::move(options)), _mostQueued(mostQueued), _directory(_options) {
    _thread = std::thread([this] { work(); });
}

SegmentWriter::~SegmentWriter() {
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _isEnding = true;
    }
    _changed.notify_all();
    _thread.join();
}

void SegmentWriter::push(const SegmentKey& key, CopiedBytes copy) {
    _queued += copy->size();
    _queue.emplace_back(key, std::move(copy));
    _changed.notify_all();
}

void SegmentWriter::add(const SegmentKey& key, CopiedBytes copy) {
    std::lock_guard<std::mutex> lock(_mutex);
    if (!_hasFailed && hasRoom(copy->size())) push(key, std::move(copy));
}

void SegmentWriter::addWaiting(const SegmentKey& key, CopiedBytes copy) {
    std::unique_lock<std::mutex> lock(_mutex);
    _changed.wait(lock, [&] { return _hasFailed || hasRoom(copy->size()); });
    if (!_hasFailed) push(key, std::move(copy));
}

CopiedBytes SegmentWriter::find(const SegmentKey& key) const {
    std::lock_guard<std::mutex> lock(_mutex);
    const auto found = std::find_if(_queue.begin(), _queue.end(), [&](const auto& one) { return one.first == key; });
    return found == _queue.end() ? nullptr : found->second;
}

void SegmentWriter::work() {
    while (true) {
        std::pair<SegmentKey, CopiedBytes> next;
        {
            std::unique_lock<std::mutex> lock(_mutex);
            _changed.wait(lock, [&] { return _isEnding || !_queue.empty(); });
            if (_queue.empty()) return;
            next = _queue.front();
        }
        std::string problem;
        try {
            if (!_directory.write(next.first, *next.second)) problem = std::strerror(errno);
        } catch (const std::bad_alloc&) {
            problem = "no memory left";  // so short that the string needs none
        } catch (const std::exception& error) {
            problem = error.what();
        }
        if (!problem.empty()) return fail(problem);
        ++_written;
        std::lock_guard<std::mutex> lock(_mutex);
        _queue.pop_front();
        _queued -= next.second->size();
        _changed.notify_all();
    }
}

void SegmentWriter::fail(const std::string& reason) {
    {
        std::lock_guard<std::mutex> lock(_mutex);
        _hasFailed = true;
        _queue.clear();
        _queued = 0;
    }
    _changed.notify_all();
    if (!_options.notice) return;
    try {
        _options.notice("nothing more is written to the cache directory " + _options.path + ": " + reason);
    } catch (const std::bad_alloc&) {  // then nobody is told
    }
}

}  // namespace sharpi
