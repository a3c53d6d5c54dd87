// See pinned_memory.h.
#include "device/pinned_memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/launch.cuh"
#include "device/pinned_files.h"

namespace sharpi::cuda {

namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, since Linux 5.14, which older headers lack

// Takes the pages, by several threads: the system clears them.
void populate(const AddressRange& pages) {
    inParts(pages, [](const AddressRange& part) {
        if (::madvise(reinterpret_cast<void*>(part.begin), part.bytes(), kPopulateWrite) == 0) return;
        const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
        for (uintptr_t at = part.begin; at < part.end; at += page) *reinterpret_cast<volatile uint8_t*>(at) = 0;
    });
}

constexpr size_t kHugePage = size_t{2} << 20;

// Addresses of `bytes` bytes, whole pages, at a multiple of a huge page, so that every one can be used. reserved: of
// kHugePage more.
uint8_t* trimmed(uint8_t* reserved, size_t bytes) {
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(reserved) % kHugePage) % kHugePage;
    if (before) ::munmap(reserved, before);
    if (before < kHugePage) ::munmap(reserved + before + bytes, kHugePage - before);
    return reserved + before;
}

size_t wholePages(size_t bytes) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    return (bytes + page - 1) / page * page;
}

// A forked process, which may not use the model, would get copies of all these pages, or share them with a device that
// does not know.
void adviseOn(void* address, size_t bytes) {
    ::madvise(address, bytes, MADV_HUGEPAGE);
    ::madvise(address, bytes, MADV_DONTFORK);
}

void* takePages(size_t bytes) noexcept {
    if (bytes < kHugePage) {  // many small mappings would use up those that a process may have
        void* memory = nullptr;
        if (cudaHostAlloc(&memory, bytes, cudaHostAllocDefault) == cudaSuccess) return memory;
        cudaGetLastError();  // so that no later call reports it
        return nullptr;
    }
    const size_t whole = wholePages(bytes);
    void* const reserved =
        ::mmap(nullptr, whole + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) return nullptr;
    uint8_t* const address = trimmed(static_cast<uint8_t*>(reserved), whole);
    adviseOn(address, whole);
    if (cudaHostRegister(address, whole, cudaHostRegisterDefault) == cudaSuccess) return address;
    cudaGetLastError();  // so that no later call reports it
    ::munmap(address, whole);
    return nullptr;
}

void givePages(void* memory, size_t bytes) noexcept {
    if (bytes < kHugePage) {
        cudaFreeHost(memory);
        return;
    }
    if (cudaHostUnregister(memory) != cudaSuccess) cudaGetLastError();  // the device has failed
    ::munmap(memory, wholePages(bytes));
}

}  // namespace

HostPages pinnedPages() { return {takePages, givePages}; }

size_t HugePages::granularity() const { return kHugePage; }

void* HugePages::reserve(size_t bytes) {
    return trimmed(static_cast<uint8_t*>(HostMemory::reserve(bytes + kHugePage)), bytes);
}

bool HugePages::commit(void* address, size_t bytes) {
    if (bytes > freeBytes() || !HostMemory::commit(address, bytes)) return false;
    adviseOn(address, bytes);
    const auto begin = reinterpret_cast<uintptr_t>(address);
    populate({begin, begin + bytes});
    return true;
}

PinnedRange::PinnedRange(const DeviceInfo& device, uint8_t* begin, size_t bytes)
    : _device(device), _begin(begin), _bytes(bytes) {
    check(cudaSetDevice(_device.index), "choosing the device");
    const cudaError_t status = cudaHostRegister(_begin, wholePages(_bytes), cudaHostRegisterMapped);
    if (status != cudaSuccess) {
        cudaGetLastError();
        _refusal = cudaGetErrorString(status);
        return;
    }
    void* onDevice = nullptr;
    check(cudaHostGetDevicePointer(&onDevice, _begin, 0), "asking for the device's address of pinned memory");
    _onDevice = static_cast<const uint8_t*>(onDevice);
}

PinnedRange::~PinnedRange() {
    if (!_onDevice) return;
    cudaSetDevice(_device.index);
    if (cudaHostUnregister(_begin) != cudaSuccess) cudaGetLastError();  // the device has failed
}

const uint8_t* PinnedRange::reachable(const uint8_t* host, size_t bytes) const {
    if (!_onDevice || host < _begin || host + bytes > _begin + _bytes) return nullptr;
    return _onDevice + (host - _begin);
}

}  // namespace sharpi::cuda
