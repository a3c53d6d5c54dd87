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

}  // namespace

// At a multiple of a huge page, so that every one can be used.
void* PinnedMemory::reserve(size_t bytes) {
    const size_t page = granularity(), all = bytes + page;
    auto* const address = static_cast<uint8_t*>(HostMemory::reserve(all));
    const size_t before = (page - reinterpret_cast<uintptr_t>(address) % page) % page;
    if (before) ::munmap(address, before);
    ::munmap(address + before + bytes, all - before - bytes);
    return address + before;
}

bool PinnedMemory::commit(void* address, size_t bytes) {
    if (bytes > freeBytes() || !HostMemory::commit(address, bytes)) return false;
    check(cudaSetDevice(_device.index), "choosing the device");
    ::madvise(address, bytes, MADV_HUGEPAGE);
    const auto begin = reinterpret_cast<uintptr_t>(address);
    populate({begin, begin + bytes});
    const cudaError_t status = cudaHostRegister(address, bytes, cudaHostRegisterMapped);
    if (status == cudaSuccess) return true;
    cudaGetLastError();
    _refusal = cudaGetErrorString(status);
    return true;
}

void PinnedMemory::decommit(void* address, size_t bytes) noexcept {
    cudaSetDevice(_device.index);
    if (cudaHostUnregister(address) != cudaSuccess) cudaGetLastError();  // it was not locked, or the device has failed
    HostMemory::decommit(address, bytes);
}

}  // namespace sharpi::cuda
