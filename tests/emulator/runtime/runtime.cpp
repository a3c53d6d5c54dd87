// The functions of CUDA's runtime that Sharpi calls.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "execution/block.h"
#include "runtime/driver.h"
#include "runtime/modules.h"
#include "runtime/streams.h"

using namespace sharpi::emulator;

namespace {

thread_local cudaError_t lastError = cudaSuccess;
// Of a kernel. A device that had one refuses all work from then on.
std::atomic<cudaError_t> deviceError{cudaSuccess};

cudaError_t fail(cudaError_t status) {
    if (status != cudaSuccess && status != cudaErrorNotReady) lastError = status;
    return status;
}

DeviceMemory& memory() { return DeviceMemory::instance(); }

cudaError_t afterWork() { return fail(deviceError.load()); }

CUstream_st* streamOf(cudaStream_t stream) {
    const bool isDefault = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return isDefault ? defaultStream() : stream;
}

// Whether all of it may be reached.
bool reaches(const void* address, size_t bytes) {
    auto at = reinterpret_cast<uintptr_t>(address);
    for (const uintptr_t end = at + bytes; at < end;) {
        const Range range = memory().find(at);
        if (!range.bytes) return false;
        at = range.begin + range.bytes;
    }
    return true;
}

Work guarded(Work work) {
    return [work = std::move(work)] {
        if (deviceError.load() != cudaSuccess) return;
        try {
            work();
        } catch (const std::exception& error) {
            std::fprintf(stderr, "emulator: %s\n", error.what());
            std::fflush(stderr);
            deviceError = cudaErrorIllegalAddress;
        }
    };
}

cudaError_t launchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared,
                         cudaStream_t stream) {
    Function* function = findFunction(host);
    if (!function) {
        std::fprintf(stderr,
                     "emulator: a kernel has no PTX that can be read; nvcc's --no-compress leaves it as it is\n");
        return fail(cudaErrorInvalidDeviceFunction);
    }
    auto launch = std::make_shared<Launch>();
    try {
        launch->kernel = &function->module->kernel(function->name);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "emulator: %s\n", error.what());
        return fail(cudaErrorInvalidDeviceFunction);
    }
    const Kernel& kernel = *launch->kernel;
    launch->grid = {grid.x, grid.y, grid.z};
    launch->block = {block.x, block.y, block.z};
    launch->dynamicShared = shared;
    if (launch->block.count() < 1 || launch->block.count() > kernel.maximumThreads || launch->grid.count() < 1 ||
        grid.y > 65535 || grid.z > 65535)
        return fail(cudaErrorInvalidConfiguration);
    if (kernel.sharedBytes + shared > std::max<size_t>(function->allowedShared, 48 * 1024)) {
        std::fprintf(stderr, "emulator: %s asks for %zu and %zu bytes of shared memory, %zu are allowed\n",
                     kernel.name.c_str(), kernel.sharedBytes, shared, function->allowedShared);
        return fail(cudaErrorInvalidValue);
    }
    launch->parameters.resize(kernel.parameterBytes);
    for (size_t i = 0; i < kernel.parameters.size(); ++i)
        std::memcpy(launch->parameters.data() + kernel.parameters[i].offset, arguments[i], kernel.parameters[i].bytes);
    if (deviceError.load() != cudaSuccess) return fail(deviceError.load());
    streamOf(stream)->give(guarded([launch] {
        Launch run = *launch;  // a graph's is run many times
        run.run();
    }));
    return cudaSuccess;
}

struct Configuration {
    dim3 grid, block;
    size_t shared = 0;
    cudaStream_t stream = nullptr;
};
thread_local Configuration pushed;

}  // namespace

extern "C" {

// --- devices --------------------------------------------------------------------------------------------------------

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device != 0) return fail(cudaErrorInvalidDevice);
    std::memset(properties, 0, sizeof(*properties));
    std::snprintf(properties->name, sizeof(properties->name), "emulator");
    properties->major = 8;
    properties->minor = 0;
    const char* processors = std::getenv("SHARPI_EMULATOR_PROCESSORS");
    properties->multiProcessorCount = processors && *processors ? std::atoi(processors) : 16;
    properties->sharedMemPerBlock = 48 * 1024;
    properties->sharedMemPerBlockOptin = 227 * 1024;
    properties->sharedMemPerMultiprocessor = 228 * 1024;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->totalGlobalMem = memory().totalBytes();
    properties->l2CacheSize = 50 << 20;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrHostRegisterReadOnlySupported: *value = 1; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: {
        cudaDeviceProp properties;
        cudaGetDeviceProperties(&properties, 0);
        *value = properties.multiProcessorCount;
        return cudaSuccess;
    }
    default: *value = 0; return cudaSuccess;
    }
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    synchronizeAll();
    return afterWork();
}

// --- errors ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
    const cudaError_t status = lastError;
    lastError = cudaSuccess;
    return status;
}
cudaError_t cudaPeekAtLastError() { return lastError; }
const char* cudaGetErrorString(cudaError_t status) {
    switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidDeviceFunction: return "invalid device function";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "an error of the emulator";
    }
}

// --- memory ---------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** out, size_t bytes) {
    *out = bytes ? memory().take(bytes) : nullptr;
    return *out || !bytes ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* address) {
    synchronizeAll();
    return !address || memory().release(address) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
    void* made = bytes > (size_t{16} << 30) ? nullptr : std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    *out = made;
    if (!made) return fail(cudaErrorMemoryAllocation);
    memory().add(made, bytes);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
    if (!address) return cudaSuccess;
    synchronizeAll();
    if (!memory().remove(address)) return fail(cudaErrorInvalidValue);
    std::free(address);
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
    if (!address || !bytes) return fail(cudaErrorInvalidValue);
    return memory().add(address, bytes, flags & cudaHostRegisterReadOnly) ? cudaSuccess
                                                                          : fail(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* address) {
    synchronizeAll();
    return memory().remove(address) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
    if (!reaches(host, 1)) return fail(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* freeBytes, size_t* totalBytes) {
    *freeBytes = memory().freeBytes();
    *totalBytes = memory().totalBytes();
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    const bool toDevice = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool fromDevice = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if ((toDevice && !reaches(to, bytes)) || (fromDevice && !reaches(from, bytes))) return fail(cudaErrorInvalidValue);
    if (deviceError.load() != cudaSuccess) return fail(deviceError.load());
    CUstream_st* const queue = streamOf(stream);
    queue->give(guarded([=] { std::memmove(to, from, bytes); }));
    // The caller may touch memory that is not pinned as soon as this returns.
    if (!queue->capture && (!reaches(to, bytes) || !reaches(from, bytes))) {
        queue->synchronize();
        return afterWork();
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t status = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    if (status != cudaSuccess) return status;
    defaultStream()->synchronize();
    return afterWork();
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    if (!reaches(to, bytes)) return fail(cudaErrorInvalidValue);
    if (deviceError.load() != cudaSuccess) return fail(deviceError.load());
    streamOf(stream)->give(guarded([=] { std::memset(to, value, bytes); }));
    return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// --- streams --------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    *stream = new CUstream_st;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    streamOf(stream)->synchronize();
    return afterWork();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (!streamOf(stream)->isIdle()) return cudaErrorNotReady;
    return afterWork();
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    streamOf(stream)->give([=] { function(data); });
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    CUstream_st* const queue = streamOf(stream);
    const std::lock_guard<std::mutex> lock(event->mutex);
    if (queue->capture && !queue->capture->ended) {
        event->capture = queue->capture;
        return cudaSuccess;
    }
    event->capture = nullptr;
    auto mark = std::make_shared<Mark>();
    event->mark = mark;
    queue->give([mark] { mark->set(); });
    return afterWork();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    CUstream_st* const queue = streamOf(stream);
    const std::lock_guard<std::mutex> lock(event->mutex);
    if (event->capture && !event->capture->ended) {
        queue->capture = event->capture;
        return cudaSuccess;
    }
    if (const std::shared_ptr<Mark> mark = event->mark) queue->give([mark] { mark->wait(); });
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    const std::lock_guard<std::mutex> lock(event->mutex);
    if (event->mark && !event->mark->isSet()) return cudaErrorNotReady;
    return afterWork();
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    std::shared_ptr<Mark> mark;
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        mark = event->mark;
    }
    if (mark) mark->wait();
    return afterWork();
}

// --- graphs ---------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    streamOf(stream)->capture = std::make_shared<Capture>();
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const std::shared_ptr<Capture>& capture = streamOf(stream)->capture;
    *status = capture && !capture->ended ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    CUstream_st* const queue = streamOf(stream);
    *graph = nullptr;
    if (!queue->capture) return fail(cudaErrorIllegalState);
    queue->capture->ended = true;
    *graph = new CUgraph_st{std::move(queue->capture)};
    queue->capture = nullptr;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = new CUgraphExec_st{graph->capture};
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    if (deviceError.load() != cudaSuccess) return fail(deviceError.load());
    for (const Work& work : exec->capture->work) streamOf(stream)->give(work);
    return cudaSuccess;
}

// --- kernels --------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void* host, cudaFuncAttribute attribute, int value) {
    Function* function = findFunction(host);
    if (!function) return fail(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        size_t own = 0;
        try {
            own = function->module->kernel(function->name).sharedBytes;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "emulator: %s\n", error.what());
            return fail(cudaErrorInvalidDeviceFunction);
        }
        if (value < 0 || value + own > 227 * 1024) return fail(cudaErrorInvalidValue);
        function->allowedShared = own + static_cast<size_t>(value);
    }
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* host) {
    Function* function = findFunction(host);
    if (!function) return fail(cudaErrorInvalidDeviceFunction);
    std::memset(attributes, 0, sizeof(*attributes));
    attributes->ptxVersion = attributes->binaryVersion = function->codeVersion ? function->codeVersion : 80;
    attributes->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t,
                                                                   unsigned) {
    *blocks = std::max(1, std::min(2048 / std::max(threads, 1), 4));
    return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = {grid, block, shared, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *static_cast<cudaStream_t*>(stream) = pushed.stream;
    return cudaSuccess;
}
// A kernel's handle is the address of its host function.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
    return launchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t stream) {
    return launchKernel(host, grid, block, arguments, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* host, void** arguments) {
    return launchKernel(host, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** address, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    *address = driverFunction(symbol);
    if (found) *found = *address ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

}  // extern "C"
