// See expert_source.h.
#include "cpu/expert_source.h"

#include <algorithm>

namespace sharpi {

namespace {

// A prompt counts for as much as some of the tokens that will follow it.
constexpr int64_t kPromptTokens = 64;

size_t sizeOf(const Matrix& m) { return m.data ? fileBytes(m) : 0; }

}  // namespace

void ExpertSource::beginPass(int64_t rows) {
    _rows = rows;
    const bool whole = _reader.beginPass();
    _ahead.clear();
    if (_slots.capacity() == 0) return;
    // Nobody waited for an expert that was read ahead in vain.
    if (!whole) _slots.passFailed();
    _slots.beginPass();
}

void ExpertSource::passFailed() {
    _reader.beginPass();
    _ahead.clear();
    if (_slots.capacity() > 0) _slots.passFailed();
}

std::array<Matrix, 3> ExpertSource::inFile(const ExpertStacks& file, int32_t expert) {
    return {file.gate.at(expert), file.gated() ? file.up.at(expert) : Matrix(), file.down.at(expert)};
}

bool ExpertSource::find(const ExpertCall& call, const std::vector<int32_t>& expertBegin) {
    settleBefore(call.routing.expertLayer);
    const bool slotted = _slots.capacity() > 0;
    if (!slotted && !_reader.wanted()) return false;
    const ExpertStacks file{call.gate, call.up, call.down};
    const auto count = static_cast<size_t>(call.routing.count);
    std::vector<int32_t> chosen;
    _places.assign(count, {});
    for (size_t e = 0; e < count; ++e) {
        if (expertBegin[e] == expertBegin[e + 1]) continue;
        chosen.push_back(static_cast<int32_t>(e));
        _places[e].matrices = inFile(file, static_cast<int32_t>(e));
    }
    if (slotted) placeInSlots(call.routing.expertLayer, chosen, expertBegin);
    for (const int32_t e : chosen) {
        Place& place = _places[static_cast<size_t>(e)];
        if (!place.present && !place.first) askFor(place, {});
    }
    // So many rows will need most of the next layer's experts. The disk reads them while these are computed.
    if (call.next && expertBegin[count] >= 2 * static_cast<int32_t>(count)) readAhead(call.next->expertLayer);
    return true;
}

// The slots of experts that were read ahead for earlier layers may be given to others from now on. Those that were not
// chosen may still be on their way there.
void ExpertSource::settleBefore(int32_t layer) {
    for (auto ahead = _ahead.begin(); ahead != _ahead.end() && ahead->first.first < layer;) {
        for (Ticket i = 0; i < 3; ++i) _reader.settle(ahead->second + i);
        ahead = _ahead.erase(ahead);
    }
}

void ExpertSource::placeInSlots(int32_t layer, const std::vector<int32_t>& chosen,
                                const std::vector<int32_t>& expertBegin) {
    _slots.reached(layer, chosen.data(), static_cast<int32_t>(chosen.size()));
    const double weight = std::min(1.0, static_cast<double>(kPromptTokens) / static_cast<double>(_rows));
    for (const int32_t e : chosen) {
        const auto expert = static_cast<size_t>(e);
        _slots.addUses(layer, e, static_cast<float>((expertBegin[expert + 1] - expertBegin[expert]) * weight));
    }
    using Event = ExpertAccessProfiler::Event;
    for (const int32_t e : chosen) {
        Place& place = _places[static_cast<size_t>(e)];
        if (const auto slot = _slots.getOrLoad(layer, e)) toSlot(layer, e, *slot, place);
        const auto times =
            static_cast<uint64_t>(expertBegin[static_cast<size_t>(e) + 1] - expertBegin[static_cast<size_t>(e)]);
        _profiler.count(layer, e, place.present ? Event::Hit : Event::Fetched, times);
    }
}

void ExpertSource::readAhead(int32_t layer) {
    const ExpertStacks& file = _slots.file(layer);
    for (int32_t e = 0; e < file.gate.count; ++e) {
        Place place;
        place.matrices = inFile(file, e);
        if (_slots.capacity() == 0) {
            askFor(place, {});
        } else if (const auto slot = _slots.getOrLoad(layer, e, true)) {
            toSlot(layer, e, *slot, place);
            if (slot->fill) _ahead[{layer, e}] = *place.first;
        }
    }
}

void ExpertSource::toSlot(int32_t layer, int32_t expert, const ExpertSlotManager::Place& slot, Place& place) {
    const ExpertStacks slots = _slots.slots(layer);
    const std::array<const MatrixStack*, 3> stacks{&slots.gate, &slots.up, &slots.down};
    std::array<uint8_t*, 3> to{};
    for (size_t i = 0; i < to.size(); ++i) {
        if (!place.matrices[i].data) continue;
        to[i] = FileReader::placeIn(const_cast<uint8_t*>(stacks[i]->at(slot.slot).data), place.matrices[i].data);
    }
    if (slot.fill) {
        askFor(place, to);
    } else if (const auto ahead = _ahead.find({layer, expert}); ahead != _ahead.end()) {
        place.first = ahead->second;
    } else {
        place.present = true;
    }
    for (size_t i = 0; i < to.size(); ++i) {
        if (to[i]) place.matrices[i].data = to[i];
    }
}

void ExpertSource::askFor(Place& place, const std::array<uint8_t*, 3>& to) {
    std::vector<FileReader::Part> parts;
    for (size_t i = 0; i < to.size(); ++i) parts.push_back({place.matrices[i].data, sizeOf(place.matrices[i]), to[i]});
    place.first = _reader.ask(parts);
}

bool ExpertSource::arrived(int32_t expert, size_t which) {
    return at(expert).present || _reader.arrived(*at(expert).first + which);
}

void ExpertSource::await(int32_t expert, size_t which) {
    if (!at(expert).present) _reader.await(*at(expert).first + which);
}

}  // namespace sharpi
