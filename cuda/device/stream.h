// The GPU as the engine sees it: which one, and the stream that its work goes through. No CUDA header: the engine
// includes this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

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

// The device to use. Throws Error(InvalidArgument) with the reason why there is none: no driver, a driver that is
// too old, no device, or one that this build has no kernels for.
DeviceInfo findDevice();

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

// Work in order on one device. Every call throws Error(Internal) with CUDA's message when the device refuses.
class Stream {
public:
    explicit Stream(const DeviceInfo& device);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    const DeviceInfo& device() const { return _device; }
    CUstream_st* handle() const { return _handle; }
    // Whether a kernel may be started while its predecessor ends (programmatic dependent launch; 9.0 and later,
    // unless SHARPI_CUDA_PDL=0).
    bool overlapsLaunches() const { return _overlaps; }
    int64_t launches() const { return _launches; }
    void countLaunch() { ++_launches; }

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

    // Records what `body` launches instead of running it.
    std::unique_ptr<Graph> capture(const std::function<void()>& body);
    void replay(const Graph& graph);

private:
    DeviceInfo _device;
    CUstream_st* _handle = nullptr;
    bool _overlaps = false;
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
