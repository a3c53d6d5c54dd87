// See ram_experts.h.
#include "experts/ram_experts.h"

#include <algorithm>

namespace sharpi {

namespace {

// A prompt counts for as much as some of the tokens that will follow it.
constexpr int64_t kPromptTokens = 64;

size_t sizeOf(const Matrix& m) { return m.data ? fileBytes(m) : 0; }

}  // namespace

DeviceLayout ramSlotLayout() {
    DeviceLayout layout;
    layout.bytes = [](const Matrix& m) { return FileReader::roomFor(fileBytes(m)); };
    return layout;
}

void RamExperts::fill(const LayerExperts& wanted) {
    if (_slots.capacity() == 0 || wanted.empty()) return;
    beginPass(1);
    LayerExperts placed;
    std::vector<Ticket> asked;
    // What was placed in a pass stays for the pass, so slots of a size that are all taken refuse the others.
    for (const auto& [layer, expert] : wanted) {
        const auto slot = _slots.getOrLoad(layer, expert, true);
        if (!slot || !slot->fill) continue;
        Place place;
        place.matrices = inFile(_slots.file(layer), expert);
        toSlot(layer, expert, *slot, place);
        placed.emplace_back(layer, expert);
        asked.push_back(*place.first);
    }
    try {
        for (const Ticket first : asked) {
            for (Ticket i = 0; i < 3; ++i) _reader.await(first + i);
        }
    } catch (...) {
        passFailed();
        throw;
    }
    beginPass(1);
    _slots.addWanted(placed);
}

void RamExperts::beginPass(int64_t rows) {
    _rows = rows;
    releaseFetched();
    const bool whole = _reader.beginPass();
    _ahead.clear();
    if (_slots.capacity() == 0) return;
    // Nobody waited for an expert that was read ahead in vain.
    if (!whole) _slots.passFailed();
    _slots.beginPass();
}

void RamExperts::passFailed() {
    _fetched.clear();  // perhaps they were not
    _reader.beginPass();
    _ahead.clear();
    if (_slots.capacity() > 0) _slots.passFailed();
}

std::array<Matrix, 3> RamExperts::inFile(const ExpertStacks& file, int32_t expert) {
    return {file.gate.at(expert), file.gated() ? file.up.at(expert) : Matrix(), file.down.at(expert)};
}

bool RamExperts::find(int32_t layer, const std::vector<int32_t>& expertBegin, int32_t next) {
    settleBefore(layer);
    releaseFetched();
    const bool slotted = _slots.capacity() > 0;
    if (!slotted && !_reader.wanted()) return false;
    const ExpertStacks& file = _slots.file(layer);
    const auto count = static_cast<size_t>(file.gate.count);
    std::vector<int32_t> chosen;
    _places.assign(count, {});
    for (size_t e = 0; e < count; ++e) {
        if (expertBegin[e] == expertBegin[e + 1]) continue;
        chosen.push_back(static_cast<int32_t>(e));
        _places[e].matrices = inFile(file, static_cast<int32_t>(e));
    }
    if (slotted) placeInSlots(layer, chosen, expertBegin);
    for (const int32_t e : chosen) {
        Place& place = _places[static_cast<size_t>(e)];
        if (!place.present && !place.first) askFor(place, {});
        ++(place.present ? _hits : _reads);
    }
    // So many rows will need most of the next layer's experts. The disk reads them while these are computed.
    if (next >= 0 && expertBegin[count] >= 2 * static_cast<int32_t>(count)) readAhead(next);
    return true;
}

// The slots of experts that were read ahead for earlier layers may be given to others from now on. Those that were not
// chosen may still be on their way there.
void RamExperts::settleBefore(int32_t layer) {
    for (auto ahead = _ahead.begin(); ahead != _ahead.end() && ahead->first.first < layer;) {
        for (Ticket i = 0; i < 3; ++i) _reader.settle(ahead->second + i);
        ahead = _ahead.erase(ahead);
    }
}

void RamExperts::releaseFetched() {
    for (const auto& [layer, expert] : _fetched) _slots.release(layer, expert);
    _fetched.clear();
}

void RamExperts::placeInSlots(int32_t layer, const std::vector<int32_t>& chosen,
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
        if (_profiler) _profiler->count(layer, e, place.present ? Event::Hit : Event::Fetched, times);
    }
}

void RamExperts::readAhead(int32_t layer) {
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

void RamExperts::toSlot(int32_t layer, int32_t expert, const ExpertSlotManager::Place& slot, Place& place) {
    const std::array<uint8_t*, 3> to = roomOf(layer, slot.slot, place.matrices);
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

// Where a slot keeps an expert's matrices; null for one that it does not have.
std::array<uint8_t*, 3> RamExperts::roomOf(int32_t layer, int32_t slot, const std::array<Matrix, 3>& matrices) const {
    const ExpertStacks slots = _slots.slots(layer);
    const std::array<const MatrixStack*, 3> stacks{&slots.gate, &slots.up, &slots.down};
    std::array<uint8_t*, 3> to{};
    for (size_t i = 0; i < to.size(); ++i) {
        if (!matrices[i].data) continue;
        to[i] = FileReader::placeIn(const_cast<uint8_t*>(stacks[i]->at(slot).data), matrices[i].data);
    }
    return to;
}

void RamExperts::askFor(Place& place, const std::array<uint8_t*, 3>& to) {
    std::vector<FileReader::Part> parts;
    for (size_t i = 0; i < to.size(); ++i) parts.push_back({place.matrices[i].data, sizeOf(place.matrices[i]), to[i]});
    place.first = _reader.ask(parts);
}

bool RamExperts::arrived(int32_t expert, size_t which) {
    return at(expert).present || _reader.arrived(*at(expert).first + which);
}

void RamExperts::await(int32_t expert, size_t which) {
    if (!at(expert).present) _reader.await(*at(expert).first + which);
}

// In turn, so that all layers get their part of the free slots.
RamExperts::Origins RamExperts::originsOf(const std::vector<std::vector<int32_t>>& wanted) {
    Origins origins;
    size_t most = 0;
    for (const std::vector<int32_t>& experts : wanted) {
        origins.emplace_back(experts.size());
        most = std::max(most, experts.size());
    }
    for (size_t i = 0; i < most; ++i) {
        for (size_t l = 0; l < wanted.size(); ++l) {
            if (i >= wanted[l].size()) continue;
            const auto layer = static_cast<int32_t>(l);
            const auto slot = _slots.getOrLoad(layer, wanted[l][i], true);
            if (!slot) continue;
            const std::array<uint8_t*, 3> room = roomOf(layer, slot->slot, inFile(_slots.file(layer), wanted[l][i]));
            for (size_t m = 0; m < room.size(); ++m) {
                if (slot->fill) origins[l][i][m].keep = room[m];
                else origins[l][i][m].inRam = room[m];
            }
        }
    }
    return origins;
}

DiskCounts RamExperts::counts() const {
    DiskCounts counts;
    counts.hits = _hits;
    counts.reads = _reads;
    counts.bytes = _reader.bytesRead();
    counts.waited = _reader.waited();
    return counts;
}

}  // namespace sharpi
