// Streams, events and graphs. A stream is a thread that does what it was given, in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sharpi::emulator {

using Work = std::function<void()>;

// A point in a stream's work.
class Mark {
public:
    void set();
    void wait();
    bool isSet();

private:
    std::mutex _mutex;
    std::condition_variable _changed;
    bool _set = false;
};

// What streams record instead of doing it, in the order of the calls, which is one that their events allow.
struct Capture {
    std::vector<Work> work;
    bool ended = false;
};

}  // namespace sharpi::emulator

struct CUstream_st {
    CUstream_st();
    ~CUstream_st();
    // Does it, or records it.
    void give(sharpi::emulator::Work work);
    void synchronize();
    bool isIdle();

    std::shared_ptr<sharpi::emulator::Capture> capture;

private:
    void run();
    std::mutex _mutex;
    std::condition_variable _changed;
    std::deque<sharpi::emulator::Work> _work;
    bool _busy = false, _ends = false;
    std::thread _thread;
};

struct CUevent_st {
    std::mutex mutex;
    std::shared_ptr<sharpi::emulator::Mark> mark;
    std::shared_ptr<sharpi::emulator::Capture> capture;
};

struct CUgraph_st {
    std::shared_ptr<sharpi::emulator::Capture> capture;
};

struct CUgraphExec_st {
    std::shared_ptr<sharpi::emulator::Capture> capture;
};

namespace sharpi::emulator {

CUstream_st* defaultStream();
// Waits for all streams.
void synchronizeAll();

}  // namespace sharpi::emulator
