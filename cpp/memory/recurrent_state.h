// The state of layers that carry a sequence's past in a fixed number of floats (Gated DeltaNet, Mamba 2). An entry
// holds the state of all such layers after some number of a sequence's tokens.
//
// A step reads the state in one entry and writes the next state to another, so the earlier state is still there: a
// failed step and a rollback cost nothing. States stay until their entry is needed. If no entry can be had, a step
// overwrites the state that it begins from.
#pragma once

#include <vector>

#include "memory/allocator.h"
#include "memory/copy_buffers.h"

namespace sharpi {

// A layer's part of a state; both 0 for a layer that has none.
struct RecurrentShape {
    int64_t convFloats = 0;    // the convolution's last inputs
    int64_t matrixFloats = 0;  // the matrices of all heads
};

// One layer's states, entry after entry. The backend chooses how the floats of a state are laid out.
struct RecurrentLayer {
    RecurrentShape shape;
    float* conv = nullptr;
    float* matrix = nullptr;
    float* convOf(int32_t entry) const { return conv + entry * shape.convFloats; }
    float* matrixOf(int32_t entry) const { return matrix + entry * shape.matrixFloats; }
};

// Rows [begin, end) of a sequence's rows in a batch. They begin from the state in entry `from` (-1: all zeros) and
// write the state after them to entry `to`, which may be the same.
struct StateStep {
    int64_t begin = 0, end = 0;
    int32_t from = -1, to = -1;
};

class RecurrentState {
public:
    RecurrentState() = default;
    // Throws Error(OutOfMemory).
    RecurrentState(Allocator& allocator, const std::vector<RecurrentShape>& layers, int32_t entries);
    // 0 if no layer has a state; then there are no entries, and the calls below do nothing.
    static size_t bytesFor(const std::vector<RecurrentShape>& layers, int32_t entries);

    const RecurrentLayer& layer(size_t index) const { return _layers[index]; }
    size_t bytes() const { return _buffer.bytes(); }
    bool any() const { return _entries > 0; }
    int32_t freeEntries() const { return static_cast<int32_t>(_free.size()); }

    // Takes entries for a step from `begin` tokens, which must be the sequence's present state, to `end`. marks:
    // lengths between these, ascending, after which the state is wanted too; those nearest the end have priority. A
    // mark for which no entry can be had is left out; the first mark may overwrite the state that the step begins from.
    // leave: steps of other sequences that are to begin with this one; marks leave each of them an entry. Throws
    // Error(OutOfMemory) if there is no entry at all, and Error(Internal) for another state or impossible marks;
    // nothing has changed then.
    void extend(int32_t sequence, int64_t begin, int64_t end, const std::vector<int64_t>& marks = {},
                int32_t leave = 0);
    // The number of steps that can begin, each with an entry of its own: one that finds none overwrites the state that
    // it begins from, and if it then fails that state is lost. There is no limit if no layer has a state.
    int32_t stepRoom() const;
    // The number of marks that extend() can keep without evicting a state that keep() protects. There is no limit if no
    // layer has a state.
    int32_t snapshotRoom(int32_t sequence) const;
    // The parts of the step that extend() began; empty if there is none.
    std::vector<StateStep> steps(int32_t sequence) const;
    // The step is done.
    void commit(int32_t sequence);
    // Forgets a step that extend() began, and all states after more than `tokens` tokens. Returns the number of tokens
    // that the remaining state covers, at most `tokens`.
    int64_t truncate(int32_t sequence, int64_t tokens);
    // Protects the state after `tokens` tokens: it is evicted only if no other can be. The sequence's state that was
    // protected before no longer is, or the ends of a long conversation's prompts would fill all entries. Returns false
    // if there is no such state.
    bool keep(int32_t sequence, int64_t tokens);

    size_t stateBytes() const;
    // A copy in RAM of the state after `tokens` tokens; nothing if it is not held.
    CopyVector copy(int32_t sequence, int64_t tokens) const;
    // The sequence continues from a copied state after `tokens` tokens, which are more than it has. Returns false, and
    // changes nothing, if no entry can be had.
    bool restore(int32_t sequence, int64_t tokens, const CopyVector& state);

private:
    struct State {
        int64_t tokens = 0;
        int32_t entry = -1;
        bool kept = false;  // keep() protects it
        uint64_t made = 0;  // later states have higher numbers
    };
    struct Sequence {
        std::vector<State> states;  // ascending; the last is the present one
        std::vector<State> coming;  // written by the present step
        int64_t begin = 0;          // of that step
        int32_t from = -1;          // the entry that it begins from
    };
    Sequence& at(int32_t sequence);
    int32_t take(bool evenKept);
    template <typename Body> void forParts(int32_t entry, const Body& body) const;

    DeviceMemory* _memory = nullptr;
    std::shared_ptr<CopyBuffers> _copies;
    int32_t _entries = 0;
    uint64_t _made = 0;
    Buffer _buffer;
    std::vector<RecurrentLayer> _layers;
    std::vector<int32_t> _free;
    std::vector<Sequence> _sequences;
};

}  // namespace sharpi
