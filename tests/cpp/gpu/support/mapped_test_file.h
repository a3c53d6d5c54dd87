// Files for the tests of pinning: mapped, without a name, and deleted with the test.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.h"
#include "gpu_test.h"
#include "model/weights.h"

namespace sharpi::cuda {

constexpr uintptr_t kPage = 4096;

// A mapped file without a name.
class TemporaryFile {
public:
    explicit TemporaryFile(const std::vector<uint8_t>& bytes, uint64_t size = 0) {
        std::string path = ::testing::TempDir() + "sharpi_transfers_XXXXXX";
        const int fd = ::mkstemp(path.data());
        bool written = fd >= 0 && ::ftruncate(fd, static_cast<off_t>(size)) == 0;
        for (size_t at = 0; written && at < bytes.size();) {
            const ssize_t count = ::write(fd, bytes.data() + at, bytes.size() - at);
            written = count > 0;
            at += static_cast<size_t>(std::max<ssize_t>(count, 0));
        }
        if (fd >= 0) ::close(fd);
        try {
            if (written) _mapped.emplace(path);
        } catch (const Error&) {
        }
        ::unlink(path.c_str());
        if (!_mapped)
            throw std::runtime_error("no temporary file of " + std::to_string(std::max<uint64_t>(size, bytes.size())) +
                                     " bytes");
    }
    const uint8_t* data() const { return _mapped->data(); }
    size_t bytes() const { return _mapped->bytes(); }

private:
    std::optional<MappedFile> _mapped;
};

// Sets SHARPI_CUDA_PIN=0 for as long as it lives.
class NoPinning {
public:
    NoPinning() { ::setenv("SHARPI_CUDA_PIN", "0", 1); }
    ~NoPinning() { ::unsetenv("SHARPI_CUDA_PIN"); }
};

// Whether the page after the one of a byte can be pinned, which means that it is not pinned yet.
inline bool canPin(const uint8_t* file) {
    void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(file) / kPage * kPage + kPage);
    const bool can = cudaHostRegister(page, kPage, cudaHostRegisterMapped | cudaHostRegisterReadOnly) == cudaSuccess;
    cudaGetLastError();
    if (can) require(cudaHostUnregister(page));
    return can;
}

}  // namespace sharpi::cuda
