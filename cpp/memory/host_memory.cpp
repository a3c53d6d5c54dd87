// See device_memory.h.
#include <sys/mman.h>

#include <string>

#include "core/error.h"
#include "memory/device_memory.h"

namespace sharpi {

void* HostMemory::allocate(size_t bytes, const char* what) {
    if (bytes == 0) bytes = 1;
    const bool overCapacity = _capacity != 0 && (bytes > _capacity || _held > _capacity - bytes);
    void* data = overCapacity ? MAP_FAILED
                              : ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        throw Error(ErrorKind::OutOfMemory, "out of memory: " + std::string(what) + " needs " + std::to_string(bytes) +
                                                " bytes; a smaller context or batch needs less");
    }
    _held += bytes;
    return data;
}

void HostMemory::free(void* data, size_t bytes) noexcept {
    if (bytes == 0) bytes = 1;
    ::munmap(data, bytes);
    _held -= bytes;
}

}  // namespace sharpi
