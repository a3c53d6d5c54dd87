// See recurrent_state.h.
#include "memory/recurrent_state.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/error.h"

namespace sharpi {

namespace {

// Each part of a layer is aligned for vector loads.
size_t partBytes(int64_t floats, int32_t entries) {
    return Allocator::aligned(sizeof(float) * static_cast<size_t>(floats) * static_cast<size_t>(entries));
}

}  // namespace

size_t RecurrentState::bytesFor(const std::vector<RecurrentShape>& layers, int32_t entries) {
    size_t bytes = 0;
    for (const RecurrentShape& shape : layers)
        bytes += partBytes(shape.convFloats, entries) + partBytes(shape.matrixFloats, entries);
    return bytes;
}

RecurrentState::RecurrentState(Allocator& allocator, const std::vector<RecurrentShape>& layers, int32_t entries) {
    const size_t bytes = bytesFor(layers, entries);
    if (!bytes) return;
    _memory = &allocator.memory();
    _copies = std::make_shared<CopyBuffers>(_memory->hostPages());
    _entries = entries;
    _buffer = Buffer(allocator, bytes, "recurrent state");
    auto* next = _buffer.as<uint8_t>();
    for (const RecurrentShape& shape : layers) {
        uint8_t* matrix = next + partBytes(shape.convFloats, entries);
        _layers.push_back({shape, reinterpret_cast<float*>(next), reinterpret_cast<float*>(matrix)});
        next = matrix + partBytes(shape.matrixFloats, entries);
    }
    for (int32_t entry = entries - 1; entry >= 0; --entry) _free.push_back(entry);
}

RecurrentState::Sequence& RecurrentState::at(int32_t sequence) {
    if (_sequences.size() <= static_cast<size_t>(sequence)) _sequences.resize(static_cast<size_t>(sequence) + 1);
    return _sequences[static_cast<size_t>(sequence)];
}

// A free entry, or one whose state is evicted: never a sequence's present state, unprotected states before protected
// ones, older before newer. -1 if there is none.
int32_t RecurrentState::take(bool evenKept) {
    if (_free.empty()) {
        std::vector<State>* among = nullptr;
        size_t index = 0;
        for (Sequence& s : _sequences) {
            for (size_t i = 0; i + 1 < s.states.size(); ++i) {
                const State &state = s.states[i], *best = among ? &(*among)[index] : nullptr;
                if (state.kept && !evenKept) continue;
                if (best && std::pair(best->kept, best->made) < std::pair(state.kept, state.made)) continue;
                among = &s.states;
                index = i;
            }
        }
        if (!among) return -1;
        _free.push_back((*among)[index].entry);
        among->erase(among->begin() + static_cast<std::ptrdiff_t>(index));
    }
    const int32_t entry = _free.back();
    _free.pop_back();
    return entry;
}

void RecurrentState::extend(int32_t sequence, int64_t begin, int64_t end, const std::vector<int64_t>& marks,
                            int32_t leave) {
    if (!any() || begin == end) return;
    Sequence& s = at(sequence);
    if (!s.coming.empty() || (s.states.empty() ? 0 : s.states.back().tokens) != begin) {
        throw Error(ErrorKind::Internal, "the recurrent state of sequence " + std::to_string(sequence) +
                                             " is not that of its " + std::to_string(begin) + " tokens");
    }
    for (size_t i = 0; i < marks.size(); ++i) {
        if (marks[i] > (i ? marks[i - 1] : begin) && marks[i] < end) continue;
        throw Error(ErrorKind::Internal, "a state wanted after " + std::to_string(marks[i]) +
                                             " tokens of a step from " + std::to_string(begin) + " to " +
                                             std::to_string(end));
    }
    int32_t last = take(true);
    s.begin = begin;
    s.from = s.states.empty() ? -1 : s.states.back().entry;
    if (last < 0) {
        if (s.from < 0) {
            throw Error(ErrorKind::OutOfMemory,
                        "no room for the recurrent state of another sequence, " + std::to_string(_entries) +
                            " are held; close other sessions or load with room for more sequences");
        }
        last = s.from;
        s.states.pop_back();
    }
    s.coming.push_back({end, last, false, 0});
    for (auto mark = marks.rbegin(); mark != marks.rend(); ++mark) {
        if (leave > 0 && stepRoom() <= leave) break;
        int32_t entry = take(false);
        const bool inPlace = entry < 0 && !s.states.empty() && s.states.back().entry == s.from && !s.states.back().kept;
        if (inPlace) {
            entry = s.from;
            s.states.pop_back();
        }
        if (entry < 0) entry = take(true);
        if (entry < 0) break;
        s.coming.insert(s.coming.begin(), {*mark, entry, false, 0});
        if (inPlace) break;
    }
}

int32_t RecurrentState::stepRoom() const {
    if (!any()) return std::numeric_limits<int32_t>::max();
    int32_t room = freeEntries();
    for (const Sequence& s : _sequences) room += std::max(static_cast<int32_t>(s.states.size()) - 1, 0);
    return room;
}

int32_t RecurrentState::snapshotRoom(int32_t sequence) const {
    if (!any()) return std::numeric_limits<int32_t>::max();
    int32_t room = freeEntries() - 1;  // one is for the state after the step
    for (size_t index = 0; index < _sequences.size(); ++index) {
        const std::vector<State>& states = _sequences[index].states;
        for (size_t i = 0; i < states.size(); ++i) {
            const bool mayGo = i + 1 < states.size() || index == static_cast<size_t>(sequence);
            if (mayGo && !states[i].kept) ++room;
        }
    }
    return std::max(room, 0);
}

std::vector<StateStep> RecurrentState::steps(int32_t sequence) const {
    std::vector<StateStep> steps;
    if (static_cast<size_t>(sequence) >= _sequences.size()) return steps;
    const Sequence& s = _sequences[static_cast<size_t>(sequence)];
    int64_t begin = 0;
    int32_t from = s.from;
    for (const State& state : s.coming) {
        steps.push_back({begin, state.tokens - s.begin, from, state.entry});
        begin = steps.back().end;
        from = state.entry;
    }
    return steps;
}

void RecurrentState::commit(int32_t sequence) {
    if (!any()) return;
    Sequence& s = at(sequence);
    for (State& state : s.coming) {
        state.made = ++_made;
        s.states.push_back(state);
    }
    s.coming.clear();
}

int64_t RecurrentState::truncate(int32_t sequence, int64_t tokens) {
    if (!any()) return tokens;
    Sequence& s = at(sequence);
    for (const State& state : s.coming) _free.push_back(state.entry);
    s.coming.clear();
    while (!s.states.empty() && s.states.back().tokens > tokens) {
        _free.push_back(s.states.back().entry);
        s.states.pop_back();
    }
    return s.states.empty() ? 0 : s.states.back().tokens;
}

bool RecurrentState::keep(int32_t sequence, int64_t tokens) {
    if (!any()) return false;
    std::vector<State>& states = at(sequence).states;
    const auto state = std::find_if(states.begin(), states.end(), [&](const State& s) { return s.tokens == tokens; });
    if (state == states.end()) return false;
    for (State& other : states) other.kept = false;
    state->kept = true;
    return true;
}

// Calls body(address, bytes) for the parts of a state.
template <typename Body> void RecurrentState::forParts(int32_t entry, const Body& body) const {
    for (const RecurrentLayer& layer : _layers) {
        const RecurrentShape& shape = layer.shape;
        if (shape.convFloats) body(layer.convOf(entry), sizeof(float) * static_cast<size_t>(shape.convFloats));
        if (shape.matrixFloats) body(layer.matrixOf(entry), sizeof(float) * static_cast<size_t>(shape.matrixFloats));
    }
}

size_t RecurrentState::stateBytes() const {
    size_t all = 0;
    forParts(0, [&](const float*, size_t bytes) { all += bytes; });
    return all;
}

CopyVector RecurrentState::copy(int32_t sequence, int64_t tokens) const {
    CopyVector copied{CopyAllocator<uint8_t>(_copies)};
    if (static_cast<size_t>(sequence) >= _sequences.size()) return copied;
    const std::vector<State>& states = _sequences[static_cast<size_t>(sequence)].states;
    const auto state = std::find_if(states.begin(), states.end(), [&](const State& s) { return s.tokens == tokens; });
    if (state == states.end()) return copied;
    copied.resize(stateBytes());
    uint8_t* to = copied.data();
    forParts(state->entry, [&](const float* from, size_t bytes) {
        _memory->download(to, from, bytes);
        to += bytes;
    });
    return copied;
}

bool RecurrentState::restore(int32_t sequence, int64_t tokens, const CopyVector& state) {
    std::vector<State>& states = at(sequence).states;
    states.reserve(states.size() + 1);
    const int32_t entry = take(true);
    if (entry < 0) return false;
    try {
        const uint8_t* from = state.data();
        forParts(entry, [&](float* to, size_t bytes) {
            _memory->upload(to, from, bytes);
            from += bytes;
        });
    } catch (...) {
        _free.push_back(entry);
        throw;
    }
    states.push_back({tokens, entry, false, ++_made});
    return true;
}

}  // namespace sharpi
