// See weights.h.
#include "model/weights.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace sharpi {

MappedFile::MappedFile(const std::string& path) : _path(path) {
    const auto fail = [&](const char* what) {
        throw Error(ErrorKind::BadModel, path + ": " + what + ": " + std::strerror(errno));
    };
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("cannot be opened");
    struct stat status = {};
    void* mapped = MAP_FAILED;
    if (::fstat(fd, &status) == 0 && status.st_size > 0) {
        _bytes = static_cast<uint64_t>(status.st_size);
        mapped = ::mmap(nullptr, _bytes, PROT_READ, MAP_SHARED, fd, 0);
    } else {
        errno = EINVAL;
    }
    if (mapped == MAP_FAILED) {
        const int error = errno;
        ::close(fd);
        errno = error;
        fail("cannot be mapped into memory");
    }
    _descriptor = fd;
    _data = static_cast<const uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
    if (!_data) return;
    ::munmap(const_cast<uint8_t*>(_data), _bytes);
    ::close(_descriptor);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : _path(std::move(other._path)), _descriptor(other._descriptor), _data(other._data), _bytes(other._bytes) {
    other._data = nullptr;
}

Weights::Weights(const std::vector<std::string>& paths, TensorTable tensors) : _tensors(std::move(tensors)) {
    _files.reserve(paths.size());
    for (const std::string& path : paths) _files.emplace_back(path);
    for (const TensorInfo& t : _tensors.all()) {
        if (t.file < 0 || static_cast<size_t>(t.file) >= _files.size()) {
            throw Error(ErrorKind::BadModel, "tensor '" + t.name + "' is in file " + std::to_string(t.file) + " of " +
                                                 std::to_string(_files.size()));
        }
        const MappedFile& file = _files[t.file];
        if (t.offset > file.bytes() || t.bytes > file.bytes() - t.offset) {
            throw Error(ErrorKind::BadModel,
                        file.path() + ": tensor '" + t.name + "' lies outside the file: was it cut short?");
        }
    }
}

uint64_t Weights::bytes() const {
    uint64_t total = 0;
    for (const TensorInfo& t : _tensors.all()) total += t.bytes;
    return total;
}

Matrix Weights::matrix(const WeightSlice& slice, int64_t expert) const {
    Matrix m = whole(slice);
    m.rows = slice.rows;
    m.cols = slice.cols;
    if (m.data)
        m.data += static_cast<size_t>(slice.rowBegin + expert * slice.expertStride) * rowBytes(m.type, slice.cols);
    return m;
}

MatrixStack Weights::stack(const WeightSlice& slice) const {
    const Matrix first = matrix(slice);
    return {first, static_cast<size_t>(slice.expertStride) * rowBytes(first.type, first.cols),
            static_cast<int32_t>(slice.experts)};
}

Matrix Weights::whole(const WeightSlice& slice) const {
    const TensorInfo& t = _tensors.all().at(static_cast<size_t>(slice.tensor));
    Matrix m;
    m.type = t.type;
    m.cols = t.shape[0];
    m.rows = 1;
    for (size_t d = 1; d < t.shape.size(); ++d) m.rows *= t.shape[d];
    if (!_files.empty()) m.data = _files[t.file].data() + t.offset;
    return m;
}

}  // namespace sharpi
