// See driver.h.
#include "runtime/driver.h"

#include <cuda.h>
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "execution/device_memory.h"
#include "runtime/streams.h"

namespace sharpi::emulator {

namespace {

constexpr size_t kGranule = size_t{2} << 20;

struct Handles {
    std::mutex mutex;
    std::map<unsigned long long, size_t> bytes;
    unsigned long long next = 1;
};
Handles& handles() {
    static Handles* const made = new Handles;
    return *made;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult getErrorString(CUresult status, const char** text) {
    *text = status == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "invalid argument";
    return CUDA_SUCCESS;
}
CUresult deviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    return CUDA_SUCCESS;
}
CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *bytes = kGranule;
    return CUDA_SUCCESS;
}
CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* const made = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(made);
    return CUDA_SUCCESS;
}
CUresult giveBack(CUdeviceptr address, size_t bytes) {
    munmap(pointer(address), bytes);
    return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
    if (bytes % kGranule) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > DeviceMemory::instance().freeBytes()) return CUDA_ERROR_OUT_OF_MEMORY;
    const std::lock_guard<std::mutex> lock(handles().mutex);
    *handle = handles().next++;
    handles().bytes[*handle] = bytes;
    return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
    const std::lock_guard<std::mutex> lock(handles().mutex);
    handles().bytes.erase(handle);
    return CUDA_SUCCESS;
}
// What is mapped counts from here on: the handle is only held until then.
CUresult map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    void* const made =
        mmap(pointer(address), bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (made == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    DeviceMemory::instance().add(made, bytes);
    DeviceMemory::instance().countMapped(static_cast<int64_t>(bytes));
    return CUDA_SUCCESS;
}
CUresult setAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
CUresult unmap(CUdeviceptr address, size_t bytes) {
    synchronizeAll();
    mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    // It may have been mapped in parts.
    for (auto at = static_cast<uintptr_t>(address); at < address + bytes;) {
        const Range range = DeviceMemory::instance().find(at);
        if (!range.bytes) break;
        DeviceMemory::instance().remove(pointer(at));
        at = range.begin + range.bytes;
    }
    DeviceMemory::instance().countMapped(-static_cast<int64_t>(bytes));
    return CUDA_SUCCESS;
}

}  // namespace

void* driverFunction(const char* name) {
    static const std::map<std::string, void*> functions = {
        {"cuGetErrorString", reinterpret_cast<void*>(getErrorString)},
        {"cuDeviceGetAttribute", reinterpret_cast<void*>(deviceGetAttribute)},
        {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
        {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
        {"cuMemAddressFree", reinterpret_cast<void*>(giveBack)},
        {"cuMemCreate", reinterpret_cast<void*>(create)},
        {"cuMemRelease", reinterpret_cast<void*>(release)},
        {"cuMemMap", reinterpret_cast<void*>(map)},
        {"cuMemSetAccess", reinterpret_cast<void*>(setAccess)},
        {"cuMemUnmap", reinterpret_cast<void*>(unmap)}};
    const auto found = functions.find(name);
    return found == functions.end() ? nullptr : found->second;
}

}  // namespace sharpi::emulator
