// See streams.h.
#include "runtime/streams.h"

#include <algorithm>

namespace sharpi::emulator {

namespace {

struct Streams {
    std::mutex mutex;
    std::vector<CUstream_st*> all;
};
Streams& streams() {
    static Streams* const made = new Streams;
    return *made;
}

}  // namespace

void Mark::set() {
    const std::lock_guard<std::mutex> lock(_mutex);
    _set = true;
    _changed.notify_all();
}

void Mark::wait() {
    std::unique_lock<std::mutex> lock(_mutex);
    _changed.wait(lock, [this] { return _set; });
}

bool Mark::isSet() {
    const std::lock_guard<std::mutex> lock(_mutex);
    return _set;
}

CUstream_st* defaultStream() {
    static CUstream_st* const stream = new CUstream_st;
    return stream;
}

void synchronizeAll() {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    for (CUstream_st* stream : streams().all) stream->synchronize();
}

}  // namespace sharpi::emulator

using namespace sharpi::emulator;

CUstream_st::CUstream_st() : _thread([this] { run(); }) {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.push_back(this);
}

CUstream_st::~CUstream_st() {
    {
        const std::lock_guard<std::mutex> lock(streams().mutex);
        streams().all.erase(std::find(streams().all.begin(), streams().all.end(), this));
    }
    {
        const std::lock_guard<std::mutex> lock(_mutex);
        _ends = true;
        _changed.notify_all();
    }
    _thread.join();
}

void CUstream_st::run() {
    std::unique_lock<std::mutex> lock(_mutex);
    for (;;) {
        _changed.wait(lock, [this] { return _ends || !_work.empty(); });
        if (_work.empty()) return;
        const Work work = std::move(_work.front());
        _work.pop_front();
        _busy = true;
        lock.unlock();
        work();
        lock.lock();
        _busy = false;
        _changed.notify_all();
    }
}

void CUstream_st::give(Work work) {
    if (capture && !capture->ended) {
        capture->work.push_back(std::move(work));
        return;
    }
    const std::lock_guard<std::mutex> lock(_mutex);
    _work.push_back(std::move(work));
    _changed.notify_all();
}

void CUstream_st::synchronize() {
    std::unique_lock<std::mutex> lock(_mutex);
    _changed.wait(lock, [this] { return _work.empty() && !_busy; });
}

bool CUstream_st::isIdle() {
    const std::lock_guard<std::mutex> lock(_mutex);
    return _work.empty() && !_busy;
}
