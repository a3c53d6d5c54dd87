// See own_pages.h.
#include "placement/own_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "core/error.h"

namespace sharpi {

// Pages that can be read alone are another mapping than their neighbours, which can be written.
OwnPages::OwnPages(const std::vector<uint8_t>& bytes) {
    if (bytes.empty()) return;
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    _bytes = (bytes.size() + page - 1) / page * page;
    void* const begin = ::mmap(nullptr, _bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (begin == MAP_FAILED)
        throw Error(ErrorKind::OutOfMemory,
                    "the system has no " + std::to_string(_bytes) + " bytes for a matrix that is made when loading");
    _begin = begin;
    std::memcpy(_begin, bytes.data(), bytes.size());
    ::mprotect(_begin, _bytes, PROT_READ);
}

OwnPages::~OwnPages() {
    if (_begin) ::munmap(_begin, _bytes);
}

}  // namespace sharpi
