// See cuda_memory.h.
//
// The driver's functions are looked up at run time instead of linked, so that the package can be imported on a
// machine without a driver. A mapping alone owns its memory: the handle is released as soon as the memory is mapped,
// and unmapping gives the memory back.
#include "device/cuda_memory.h"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "core/error.h"
#include "device/launch.cuh"
#include "device/pinned_memory.h"

namespace sharpi::cuda {

namespace {

// Sets `function` to null if the driver is too old to have it. version: the CUDA release in which the function got its
// present form.
template <typename Function> void find(Function& function, const char* symbol, unsigned version) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion(symbol, &address, version, cudaEnableDefault, &found);
#elif CUDART_VERSION >= 12000
    (void)version;
    const cudaError_t status = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &found);
#else
    (void)version;
    const cudaError_t status = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault);
    found = address ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
#endif
    if (status != cudaSuccess) cudaGetLastError();
    const bool usable = status == cudaSuccess && found == cudaDriverEntryPointSuccess;
    function = usable ? reinterpret_cast<Function>(address) : nullptr;
}

CUdeviceptr devicePointer(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

CUmemAllocationProp propertiesOn(const DeviceInfo& device) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device.index;
    return properties;
}

}  // namespace

struct CudaMemory::Driver {
    PFN_cuGetErrorString_v6000 getErrorString;
    PFN_cuDeviceGetAttribute_v2000 deviceGetAttribute;
    PFN_cuMemGetAllocationGranularity_v10020 memGetAllocationGranularity;
    PFN_cuMemAddressReserve_v10020 memAddressReserve;
    PFN_cuMemAddressFree_v10020 memAddressFree;
    PFN_cuMemCreate_v10020 memCreate;
    PFN_cuMemRelease_v10020 memRelease;
    PFN_cuMemMap_v10020 memMap;
    PFN_cuMemSetAccess_v10020 memSetAccess;
    PFN_cuMemUnmap_v10020 memUnmap;

    Driver() {
        find(getErrorString, "cuGetErrorString", 6000);
        find(deviceGetAttribute, "cuDeviceGetAttribute", 2000);
        find(memGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020);
        find(memAddressReserve, "cuMemAddressReserve", 10020);
        find(memAddressFree, "cuMemAddressFree", 10020);
        find(memCreate, "cuMemCreate", 10020);
        find(memRelease, "cuMemRelease", 10020);
        find(memMap, "cuMemMap", 10020);
        find(memSetAccess, "cuMemSetAccess", 10020);
        find(memUnmap, "cuMemUnmap", 10020);
    }

    bool supports(int device) const {
        const bool complete = getErrorString && deviceGetAttribute && memGetAllocationGranularity &&
                              memAddressReserve && memAddressFree && memCreate && memRelease && memMap &&
                              memSetAccess && memUnmap;
        int supported = 0;
        return complete &&
               deviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) ==
                   CUDA_SUCCESS &&
               supported != 0;
    }

    void check(CUresult status, const char* what) const {
        if (status == CUDA_SUCCESS) return;
        const char* words = nullptr;
        if (getErrorString(status, &words) != CUDA_SUCCESS || !words) words = "an unknown error";
        const std::string told = std::string("CUDA: ") + what + ": " + words;
        // The runtime's errors have the driver's numbers.
        if (isLost(static_cast<cudaError_t>(status))) throw lostDevice(told);
        throw Error(ErrorKind::Internal, told);
    }
};

CudaMemory::CudaMemory(Stream& stream) : _stream(stream) {
    _stream.use();
    cuda::check(cudaFree(nullptr), "starting the device");  // the runtime may not have made its context yet
    _driver = std::make_unique<Driver>();
    if (!_driver->supports(stream.device().index)) {
        throw Error(ErrorKind::InvalidArgument,
                    stream.device().name +
                        " or its driver lacks virtual memory management, which Sharpi needs to allocate GPU memory");
    }
    const CUmemAllocationProp properties = propertiesOn(stream.device());
    _driver->check(_driver->memGetAllocationGranularity(&_granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                   "asking for the granularity of memory");
}

CudaMemory::~CudaMemory() = default;

// cudaMemGetInfo answers for the calling thread's device.
size_t CudaMemory::freeBytes() const {
    _stream.use();
    size_t free = 0, total = 0;
    cuda::check(cudaMemGetInfo(&free, &total), "asking for free memory");
    return free;
}

void* CudaMemory::reserve(size_t bytes) {
    _stream.use();
    CUdeviceptr address = 0;
    const CUresult status = _driver->memAddressReserve(&address, bytes, _granularity, 0, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY ||
        status == CUDA_ERROR_INVALID_VALUE) {  // invalid: more than the address space
        throw Error(ErrorKind::OutOfMemory,
                    "the GPU has no contiguous range of " + std::to_string(bytes) + " addresses left");
    }
    _driver->check(status, "reserving addresses");
    return reinterpret_cast<void*>(address);
}

void CudaMemory::release(void* address, size_t bytes) noexcept {
    cudaSetDevice(_stream.device().index);
    _driver->memAddressFree(devicePointer(address), bytes);
}

bool CudaMemory::commit(void* address, size_t bytes) {
    _stream.use();
    const CUmemAllocationProp properties = propertiesOn(_stream.device());
    CUmemGenericAllocationHandle handle = 0;
    CUresult status = _driver->memCreate(&handle, bytes, &properties, 0);
    if (status == CUDA_ERROR_OUT_OF_MEMORY) return false;
    _driver->check(status, "taking memory");

    status = _driver->memMap(devicePointer(address), bytes, 0, handle, 0);
    const bool mapped = status == CUDA_SUCCESS;
    _driver->memRelease(handle);
    if (mapped) {
        CUmemAccessDesc access = {};
        access.location = properties.location;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        status = _driver->memSetAccess(devicePointer(address), bytes, &access, 1);
        if (status != CUDA_SUCCESS) _driver->memUnmap(devicePointer(address), bytes);
    }
    if (status == CUDA_ERROR_OUT_OF_MEMORY) return false;  // page tables take memory too
    _driver->check(status, "mapping memory");
    return true;
}

void CudaMemory::decommit(void* address, size_t bytes) noexcept {
    cudaSetDevice(_stream.device().index);
    try {
        _stream.synchronize();
    } catch (const Error&) {
        // After a fault nothing runs any more. The call that used the stream reports the error.
    }
    _driver->memUnmap(devicePointer(address), bytes);
}

HostPages CudaMemory::hostPages() const { return pinnedPages(); }

void CudaMemory::upload(void* to, const void* host, size_t bytes) {
    _stream.use();
    _stream.upload(to, host, bytes);
}

void CudaMemory::download(void* host, const void* from, size_t bytes) {
    _stream.use();
    _stream.download(host, from, bytes);
}

void CudaMemory::zero(void* address, size_t bytes) {
    _stream.use();
    _stream.zero(address, bytes);
}

}  // namespace sharpi::cuda
