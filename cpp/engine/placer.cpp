// See placer.h.
#include "engine/placer.h"

namespace sharpi {

namespace {

const float* copiedVector(Allocator& allocator, std::vector<Buffer>& buffers, const float* host, size_t count, const std::string& name) {
    buffers.emplace_back(allocator, count * sizeof(float), name);
    auto* data = buffers.back().as<float>();
    if (host) allocator.memory().upload(data, host, count * sizeof(float));
    return data;
}

}  // namespace

const float* MappedPlacer::vector(const float* host, size_t count, const std::string& name) {
    return copiedVector(_allocator, _buffers, host, count, name);
}

const float* CopyingPlacer::vector(const float* host, size_t count, const std::string& name) {
    return copiedVector(_allocator, _buffers, host, count, name);
}

Matrix CopyingPlacer::matrix(const Matrix& host, const std::string& name) {
    return stack({host, 0, 1}, name).first;
}

MatrixStack CopyingPlacer::stack(const MatrixStack& host, const std::string& name) {
    MatrixStack placed = host;
    placed.stride = host.count > 1 ? Allocator::aligned(_layout.bytes(host.first)) : _layout.bytes(host.first);
    _buffers.emplace_back(_allocator, placed.stride * static_cast<size_t>(host.count), name);
    placed.first.data = _buffers.back().as<uint8_t>();
    if (host.first.data) {
        for (int32_t i = 0; i < host.count; ++i) _layout.fill(placed.at(i), host.at(i));
    }
    return placed;
}

}  // namespace sharpi
