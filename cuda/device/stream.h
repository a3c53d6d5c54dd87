// The GPU as the engine sees it: which one, and the stream that its work goes through. No CUDA header: the engine
// includes this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

struct CUevent_st;
struct CUstream_st;
struct CUgraphExec_st;

namespace sharpi::cuda {

struct DeviceInfo {
    std::string name;
    int index = 0;
    int major = 0, minor = 0;  // compute capability
    int multiprocessors = 0;
    size_t totalBytes = 0, freeBytes = 0;
};

// The device with this number, as the driver counts. Throws Error(InvalidArgument) with the reason why there is none:
// no driver, a driver that is too old, no device, or one that this build has no kernels for.
DeviceInfo findDevice(int ordinal);

// A captured sequence of launches.
class Graph {
public:
    explicit Graph(CUgraphExec_st* exec, int64_t kernels) : _exec(exec), _kernels(kernels) {}
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    CUgraphExec_st* handle() const { return _exec; }
    int64_t kernels() const { return _kernels; }

private:
    CUgraphExec_st* _exec;
    int64_t _kernels;
};

// A point in a stream's work that other streams can wait for. Made once, of the calling thread's device; recorded again
// and again. Recorded while a capture runs, it means nothing outside of it.
class Event {
public:
    Event();
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    CUevent_st* handle() const { return _handle; }
    // Whether all that it stands for is done; so it is while nothing was recorded. Does not wait. Throws
    // Error(Internal) if the device has failed.
    bool reached() const;

private:
    CUevent_st* _handle = nullptr;
};

// Work in order on one device. Every call throws Error(Internal) with CUDA's message when the device refuses.
class Stream {
public:
    enum class Role {
        Compute,
        Feed,  // beside a Compute stream, which waits for it: its kernels go first, each after the whole of the one
               // before
    };
    explicit Stream(const DeviceInfo& device, Role role = Role::Compute);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    const DeviceInfo& device() const { return _device; }
    CUstream_st* handle() const { return _handle; }
    // Whether the next kernel may be started while its predecessor ends (programmatic dependent launch; 9.0 and later,
    // unless SHARPI_CUDA_PDL=0). Not after a wait(): kernels fetch weights before they wait for what precedes them, and
    // weights may be what the event stands for.
    bool overlapsLaunches() const { return _overlaps && !_afterWait; }
    int64_t launches() const { return _launches; }
    void countLaunch() {
        ++_launches;
        _afterWait = false;
    }

    // Makes its device the calling thread's: another library of the process may have chosen another.
    void use();

    // `host` may be pageable; it can be reused when the call returns.
    void upload(void* device, const void* host, size_t bytes);
    // In stream order, `host` pinned: not to be touched before synchronize().
    void uploadPinned(void* device, const void* host, size_t bytes);
    void downloadPinned(void* host, const void* device, size_t bytes);
    // Waits for all work and the copy.
    void download(void* host, const void* device, size_t bytes);
    void zero(void* device, size_t bytes);
    void synchronize();
    // Whether all work is done. Throws if the device has failed; does not wait.
    bool poll();

    // The event stands for all work given to the stream so far, each kernel to its end.
    void record(const Event& event);
    // Work given to the stream from here on starts after what the event stands for now. In a capture: an event recorded
    // in it, which takes the stream into the capture.
    void wait(const Event& event);
    bool capturing() const;

    // Records what `body` launches instead of running it.
    std::unique_ptr<Graph> capture(const std::function<void()>& body);
    void replay(const Graph& graph);

private:
    DeviceInfo _device;
    CUstream_st* _handle = nullptr;
    bool _overlaps = false, _afterWait = false;
    int64_t _launches = 0;
};

// Page-locked host memory, for copies that need not wait.
class PinnedBuffer {
public:
    explicit PinnedBuffer(size_t bytes);
    ~PinnedBuffer();
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;
    template <typename T> T* as() const { return static_cast<T*>(_data); }
    size_t bytes() const { return _bytes; }

private:
    void* _data = nullptr;
    size_t _bytes;
};

}  // namespace sharpi::cuda
