// See ram_level.h.
#include "transfers/ram_level.h"

namespace sharpi {

RamLevel::RamLevel(const cuda::DeviceInfo& device, const std::vector<MappedFile>& files)
    : _device(device),
      _allocator(_memory),
      _slots(_allocator, ramSlotLayout()),
      _reader(files),
      _experts(_slots, _reader, nullptr) {}

void RamLevel::take(const ExpertSlotManager& layers, const SlotBudget& budget) {
    for (int32_t layer = 0; layer < layers.layers(); ++layer) _slots.addLayer(layers.file(layer));
    _slots.take(budget, nullptr);
    if (_slots.bytes() > 0) _pinned.emplace(_device, _slots.memory(), _slots.bytes());
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
    if (!_pinned || _pinned->refusal().empty()) return {};
    return {"the system did not lock the experts' slots in RAM (" + _pinned->refusal() +
            "): the CPU computes with them, and prompts copy them more slowly"};
}

}  // namespace sharpi
