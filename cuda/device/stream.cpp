// See stream.h.
#include "device/stream.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>

#include "device/code_version.h"
#include "device/launch.cuh"

namespace sharpi::cuda {

namespace {

[[noreturn]] void noDevice(const std::string& reason) {
    throw Error(ErrorKind::InvalidArgument, "there is no usable GPU: " + reason);
}

bool switchedOff(const char* name) {
    const char* value = std::getenv(name);
    return value && std::strcmp(value, "0") == 0;
}

// Reads the answer to a query whether work is done.
bool isDone(cudaError_t status) {
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    check(status, "work on the device");
    return true;
}

// How many devices the driver lists; at least one.
int countDevices() {
    int driver = 0, count = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) noDevice("no NVIDIA driver is installed");
    if (const cudaError_t counted = cudaGetDeviceCount(&count); counted != cudaSuccess) {
        cudaGetLastError();
        if (counted == cudaErrorInsufficientDriver) {
            int runtime = 0;
            cudaRuntimeGetVersion(&runtime);
            noDevice("the driver supports CUDA " + std::to_string(driver / 1000) + "." +
                     std::to_string(driver % 1000 / 10) + ", this build needs " + std::to_string(runtime / 1000) + "." +
                     std::to_string(runtime % 1000 / 10) + ": update the driver");
        }
        noDevice(cudaGetErrorString(counted));
    }
    if (count == 0) noDevice("the driver lists no device");
    return count;
}

}  // namespace

DeviceInfo findDevice(int index) {
    const int count = countDevices();
    const std::string ordinal = "device " + std::to_string(index);
    if (index < 0 || index >= count)
        noDevice(ordinal + " does not exist; the driver lists " + std::to_string(count) + ", counted from 0");
    cudaDeviceProp properties = {};
    // Choosing a device sets it up, which fails if its memory is full or another process has it to itself.
    cudaError_t status = cudaSetDevice(index);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(&properties, index);
    if (status != cudaSuccess) {
        cudaGetLastError();
        noDevice(ordinal + ": " + cudaGetErrorString(status));
    }
    DeviceInfo info;
    info.name = properties.name;
    info.index = index;
    info.major = properties.major;
    info.minor = properties.minor;
    info.multiprocessors = properties.multiProcessorCount;
    info.sharedPerBlock = properties.sharedMemPerBlockOptin;
    info.sharedPerMultiprocessor = properties.sharedMemPerMultiprocessor;
    if (info.major * 10 + info.minor < 75) {
        noDevice(info.name + " has compute capability " + std::to_string(info.major) + "." +
                 std::to_string(info.minor) + ", Sharpi needs at least 7.5");
    }
    const char* problem = nullptr;
    info.codeVersion = codeVersion(&problem);
    if (info.codeVersion == 0) {
        noDevice(problem ? info.name + ": " + problem
                         : "this build has no kernels for " + info.name +
                               "; build on a machine that shows it, or set SHARPI_CUDA_ARCHITECTURES");
    }
    if (status = cudaMemGetInfo(&info.freeBytes, &info.totalBytes); status != cudaSuccess) {
        cudaGetLastError();
        noDevice(info.name + ": " + cudaGetErrorString(status));
    }
    return info;
}

Graph::~Graph() { cudaGraphExecDestroy(_exec); }

Event::Event() { check(cudaEventCreateWithFlags(&_handle, cudaEventDisableTiming), "creating an event"); }

Event::~Event() { cudaEventDestroy(_handle); }

bool Event::reached() const { return isDone(cudaEventQuery(_handle)); }

void Event::await() const { check(cudaEventSynchronize(_handle), "waiting for the device"); }

Stream::Stream(const DeviceInfo& device, Role role) : _device(device) {
    check(cudaSetDevice(device.index), "choosing the device");
    int lowest = 0, highest = 0;  // priorities: the smaller number goes first
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities");
    check(cudaStreamCreateWithPriority(&_handle, cudaStreamNonBlocking, role == Role::Feed ? highest : lowest),
          "creating a stream");
    // Kernels that were compiled for older devices do not wait for their predecessors themselves.
    _overlaps =
        role == Role::Compute && device.major >= 9 && device.codeVersion >= 90 && !switchedOff("SHARPI_CUDA_PDL");
}

Stream::~Stream() {
    cudaStreamSynchronize(_handle);
    cudaStreamDestroy(_handle);
}

void Stream::use() { check(cudaSetDevice(_device.index), "choosing the device"); }

void Stream::upload(void* device, const void* host, size_t bytes) {
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, _handle), "copying to the device");
    synchronize();
}

void Stream::uploadPinned(void* device, const void* host, size_t bytes) {
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, _handle), "copying to the device");
}

void Stream::downloadPinned(void* host, const void* device, size_t bytes) {
    check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, _handle), "copying from the device");
}

void Stream::download(void* host, const void* device, size_t bytes) {
    downloadPinned(host, device, bytes);
    synchronize();
}

void Stream::zero(void* device, size_t bytes) {
    check(cudaMemsetAsync(device, 0, bytes, _handle), "clearing device memory");
}

void Stream::synchronize() { check(cudaStreamSynchronize(_handle), "waiting for the device"); }

bool Stream::poll() { return isDone(cudaStreamQuery(_handle)); }

void Stream::record(const Event& event) {
    check(cudaEventRecord(event.handle(), _handle), "marking a point in a stream");
}

void Stream::wait(const Event& event) {
    check(cudaStreamWaitEvent(_handle, event.handle(), 0), "waiting for another stream");
    _afterWait = true;
}

bool Stream::capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(_handle, &status), "asking whether a stream is being recorded");
    return status != cudaStreamCaptureStatusNone;
}

std::unique_ptr<Graph> Stream::capture(const std::function<void()>& body) {
    const int64_t before = _launches;
    check(cudaStreamBeginCapture(_handle, cudaStreamCaptureModeThreadLocal), "starting to record a step");
    cudaGraph_t graph = nullptr;
    try {
        body();
    } catch (...) {
        _launches = before;
        cudaStreamEndCapture(_handle, &graph);
        if (graph) cudaGraphDestroy(graph);
        cudaGetLastError();
        throw;
    }
    const int64_t kernels = _launches - before;
    _launches = before;
    check(cudaStreamEndCapture(_handle, &graph), "recording a step");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "preparing a recorded step");
    return std::make_unique<Graph>(exec, kernels);
}

void Stream::replay(const Graph& graph) {
    check(cudaGraphLaunch(graph.handle(), _handle), "replaying a step");
    _launches += graph.kernels();
}

PinnedBuffer::PinnedBuffer(size_t bytes) : _bytes(bytes) {
    check(cudaHostAlloc(&_data, bytes ? bytes : 1, cudaHostAllocDefault), "taking page-locked host memory");
    std::memset(_data, 0, bytes);
}

PinnedBuffer::~PinnedBuffer() { cudaFreeHost(_data); }

}  // namespace sharpi::cuda
