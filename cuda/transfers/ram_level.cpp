// See ram_level.h.
#include "transfers/ram_level.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "device/launch.cuh"

namespace sharpi {

RamLevel::RamLevel(const cuda::DeviceInfo& device, const std::vector<MappedFile>& files)
    : _memory(device),
      _allocator(_memory),
      _slots(_allocator, ramSlotLayout()),
      _reader(files),
      _experts(_slots, _reader, nullptr) {}

void RamLevel::take(const ExpertSlotManager& layers, size_t bytes) {
    for (int32_t layer = 0; layer < layers.layers(); ++layer) _slots.addLayer(layers.file(layer));
    _slots.take(bytes, nullptr);
    if (_slots.layers() == 0 || _slots.bytes() == 0) return;
    for (int32_t layer = 0; layer < _slots.layers(); ++layer) {
        const uint8_t* const first = _slots.slots(layer).gate.first.data;
        if (!_begin || first < _begin) _begin = first;
    }
    if (!_memory.refusal().empty()) return;
    void* device = nullptr;
    cuda::check(cudaHostGetDevicePointer(&device, const_cast<uint8_t*>(_begin), 0),
                "asking for the device's address of pinned memory");
    _device = static_cast<const uint8_t*>(device);
}

const uint8_t* RamLevel::reachable(const uint8_t* host, size_t bytes) const {
    if (!_device || host < _begin || host + bytes > _begin + _slots.bytes()) return nullptr;
    return _device + (host - _begin);
}

size_t RamLevel::readAhead(const ExpertSlotManager& layers, const std::vector<std::pair<int32_t, int32_t>>& order,
                           size_t first) {
    constexpr size_t kBytes = size_t{256} << 20;
    std::vector<FileReader::Part> parts;
    size_t count = 0, bytes = 0;
    for (; first + count < order.size() && bytes < kBytes; ++count) {
        const auto [layer, expert] = order[first + count];
        const ExpertStacks& file = layers.file(layer);
        for (const MatrixStack* stack : {&file.gate, &file.up, &file.down}) {
            if (stack->count > 0) parts.push_back({stack->at(expert).data, fileBytes(stack->first), nullptr});
        }
        bytes += layers.expertBytes(layer);
    }
    const FileReader::Ticket asked = _reader.ask(parts);
    for (size_t i = 0; i < parts.size(); ++i) _reader.await(asked + i);
    _reader.beginPass();
    return count;
}

void RamLevel::addTo(ExpertCounts& counts) const {
    counts.disk = _experts.counts();
    counts.disk.ramCapacity = _slots.capacity();
    counts.disk.ramResident = _slots.resident();
}

std::vector<std::string> RamLevel::notes() const {
    if (_memory.refusal().empty()) return {};
    return {"the system did not lock the experts' slots in RAM (" + _memory.refusal() +
            "): the CPU computes with them, and prompts copy them more slowly"};
}

}  // namespace sharpi
