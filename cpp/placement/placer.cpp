// See placer.h.
#include "placement/placer.h"

#include <algorithm>

#include "core/contract.h"

namespace sharpi {

namespace {

Weight weightOf(const Matrix& file, const uint8_t* data) {
    Weight weight;
    static_cast<Matrix&>(weight) = file;
    weight.data = data;
    weight.file = file.data;
    return weight;
}

WeightStack stackOf(const MatrixStack& file) {
    WeightStack placed;
    static_cast<MatrixStack&>(placed) = placed.file = file;
    return placed;
}

const float* copiedVector(Allocator& allocator, std::vector<Buffer>& buffers, const float* host, size_t count,
                          const std::string& name) {
    buffers.emplace_back(allocator, count * sizeof(float), name);
    auto* data = buffers.back().as<float>();
    if (host) allocator.memory().upload(data, host, count * sizeof(float));
    return data;
}

}  // namespace

std::vector<Weight> MappedPlacer::weights(const std::vector<FileMatrix>& files) {
    std::vector<Weight> placed;
    for (const FileMatrix& f : files) placed.push_back(weightOf(f.file, f.file.data));
    return placed;
}

Weight MappedPlacer::table(const FileMatrix& file) { return weightOf(file.file, file.file.data); }

PlacedExperts MappedPlacer::experts(const ExpertStacks& file, Home, const std::string&) {
    _slots.addLayer(file);
    return {stackOf(file.gate), stackOf(file.up), stackOf(file.down)};
}

Weight MappedPlacer::made(const Matrix& shape, std::vector<uint8_t> bytes, const std::string& name) {
    const size_t size = static_cast<size_t>(shape.rows) * rowBytes(shape.type, shape.cols);
    _buffers.emplace_back(_allocator, size, name);
    auto* const data = _buffers.back().as<uint8_t>();
    if (!bytes.empty()) _allocator.memory().upload(data, bytes.data(), size);
    return weightOf(shape, data);
}

const float* MappedPlacer::vector(const float* host, size_t count, const std::string& name) {
    return copiedVector(_allocator, _buffers, host, count, name);
}

const uint8_t* DevicePlacer::room(size_t bytes, const std::string& name) {
    _buffers.emplace_back(_allocator, bytes, name);
    return _buffers.back().as<uint8_t>();
}

Weight DevicePlacer::made(const Matrix& shape, std::vector<uint8_t> bytes, const std::string& name) {
    Matrix host = shape;
    _made.emplace_back(bytes);
    host.data = _made.back().data();
    return weights({{host, {}, name}})[0];
}

const float* DevicePlacer::vector(const float* host, size_t count, const std::string& name) {
    return copiedVector(_allocator, _buffers, host, count, name);
}

std::vector<Weight> DevicePlacer::weights(const std::vector<FileMatrix>& files) {
    const bool resident =
        std::all_of(files.begin(), files.end(), [](const FileMatrix& f) { return f.home.home == Home::Vram; });
    std::vector<Matrix> inFile, onDevice;
    std::vector<Weight> placed;
    for (const FileMatrix& f : files) {
        inFile.push_back(f.file);
        placed.push_back(weightOf(f.file, resident ? room(_layout.bytes(f.file), f.name) : nullptr));
        onDevice.push_back(placed.back());
    }
    // Whole blocks of activations on either side.
    const int64_t rows = files[0].file.rows, wanted = std::max<int64_t>(0, rows - files[0].home.cpuRows);
    const int64_t cpuRows =
        resident ? 0 : rows - std::min(rows, (wanted + kContractBlock - 1) / kContractBlock * kContractBlock);
    const int32_t group = resident ? _stream.addResident(onDevice, inFile) : _stream.addStreamed(inFile, cpuRows);
    for (size_t i = 0; i < placed.size(); ++i) {
        placed[i].group = group;
        placed[i].member = static_cast<int32_t>(i);
        placed[i].cpuRows = cpuRows;
    }
    return placed;
}

Weight DevicePlacer::table(const FileMatrix& file) {
    if (file.home.home == Home::Vram) return weights({file})[0];
    _stream.addTable(file.file);
    return weightOf(file.file, nullptr);
}

void DevicePlacer::finish() {
    _stream.take();
    _stream.uploadAll();
}

PlacedExperts DevicePlacer::experts(const ExpertStacks& file, Home home, const std::string& name) {
    if (home == Home::Vram)
        return {residentStack(file.gate, name), residentStack(file.up, name), residentStack(file.down, name)};
    _slots.addLayer(file);
    _stackGroups.emplace_back();
    return {streamedStack(file.gate), streamedStack(file.up), streamedStack(file.down)};
}

WeightStack DevicePlacer::streamedStack(const MatrixStack& file) {
    WeightStack placed = stackOf(file);
    if (file.count == 0) return placed;
    placed.first.data = nullptr;
    placed.group = _stream.addStreamedStack(file);
    _stackGroups.back().push_back(placed.group);
    return placed;
}

WeightStack DevicePlacer::residentStack(const MatrixStack& file, const std::string& name) {
    WeightStack placed = stackOf(file);
    if (file.count == 0) return placed;
    placed.stride = file.count > 1 ? Allocator::aligned(_layout.bytes(file.first)) : _layout.bytes(file.first);
    placed.first.data = room(placed.stride * static_cast<size_t>(file.count), name);
    std::vector<Matrix> inFile, onDevice;
    for (int32_t i = 0; i < file.count; ++i) {
        inFile.push_back(file.at(i));
        onDevice.push_back(placed.at(i));
    }
    placed.group = _stream.addResident(onDevice, inFile);
    return placed;
}

}  // namespace sharpi
