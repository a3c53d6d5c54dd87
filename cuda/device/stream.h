// The GPU as the engine sees it: which device it is, and the stream that its work goes through. No CUDA header, because
// the engine includes this one.
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

// A device as findDevice() found it. A launch reads what it depends on from its stream's device and never keeps it for
// the whole process, because another device may differ.
struct DeviceInfo {
    std::string name;
    int index = 0;             // CUDA's ordinal
    int major = 0, minor = 0;  // compute capability
    int codeVersion = 0;       // the compute capability that its kernels were compiled for (code_version.h)
    int multiprocessors = 0;
    size_t sharedPerBlock = 0, sharedPerMultiprocessor = 0;  // shared memory that kernels may ask for, in bytes
    size_t totalBytes = 0, freeBytes = 0;
};

// Opens device `index` and makes it the calling thread's. Throws Error(InvalidArgument) with the reason why it cannot
// be used: no driver, a driver that is too old, no such device, or no kernels for it in this build.
DeviceInfo findDevice(int index);

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

// A point in a stream's work that other streams can wait for. It belongs to the device that the calling thread has when
// it is made, and can be recorded many times. An event that is recorded in a capture has no meaning outside of it.
class Event {
public:
    Event();
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    CUevent_st* handle() const { return _handle; }
    // Whether all work before the event is done; true if it was never recorded. Does not wait. Throws Error(Internal)
    // if the device has failed.
    bool reached() const;
    // Waits for that work. Throws the same.
    void await() const;

private:
    CUevent_st* _handle = nullptr;
};

// Work that one device does in order. Every call throws Error(Internal) with CUDA's message if the device refuses.
class Stream {
public:
    enum class Role {
        Compute,
        Feed,  // works beside a Compute stream, which waits for it: its kernels have priority and never overlap
    };
    explicit Stream(const DeviceInfo& device, Role role = Role::Compute);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    const DeviceInfo& device() const { return _device; }
    CUstream_st* handle() const { return _handle; }
    // Whether the next kernel may start while its predecessor ends (programmatic dependent launch; 9.0 and later,
    // unless SHARPI_CUDA_PDL=0). Never after a wait(): kernels fetch weights before they wait for their predecessor,
    // and the event may stand for the arrival of weights.
    bool overlapsLaunches() const { return _overlaps && !_afterWait; }
    int64_t launches() const { return _launches; }
    void countLaunch() {
        ++_launches;
        _afterWait = false;
    }

    // Makes the stream's device the calling thread's. Other code in the process may have chosen another.
    void use();

    // `host` may be pageable. The caller may reuse it when the call returns.
    void upload(void* device, const void* host, size_t bytes);
    // In stream order. `host` is pinned and must not be touched before synchronize().
    void uploadPinned(void* device, const void* host, size_t bytes);
    void downloadPinned(void* host, const void* device, size_t bytes);
    // Waits for all work and for the copy.
    void download(void* host, const void* device, size_t bytes);
    void zero(void* device, size_t bytes);
    void synchronize();
    // Whether all work is done. Throws if the device has failed; does not wait.
    bool poll();

    // From now on the event stands for all work given to the stream so far, each kernel to its end.
    void record(const Event& event);
    // Work given to the stream from now on starts after what the event stands for now. If the event was recorded in a
    // capture, the stream joins that capture.
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

// Pinned host memory, for copies that do not block.
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
