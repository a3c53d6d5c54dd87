// The state of layers that carry a sequence's past in a fixed number of floats (Gated DeltaNet), in slots. A slot holds
// one state of all such layers: that of a sequence after some number of its tokens.
//
// A step reads the state in one slot and writes the one after it to another, so the state before is still there: a step
// that fails, and tokens that are taken back, cost nothing. States stay until their slot is needed. With no slot to
// spare a step overwrites the state that it begins from.
#pragma once

#include <vector>

#include "memory/allocator.h"

namespace sharpi {

// Of one layer; both 0 for a layer that keeps nothing here.
struct RecurrentShape {
    int64_t convFloats = 0;    // the convolution's last inputs
    int64_t matrixFloats = 0;  // the matrices of all heads
};

// One layer's states, slot after slot. How the floats of a state are laid out is the backend's to choose.
struct RecurrentLayer {
    RecurrentShape shape;
    float* conv = nullptr;
    float* matrix = nullptr;
    float* convOf(int32_t slot) const { return conv + slot * shape.convFloats; }
    float* matrixOf(int32_t slot) const { return matrix + slot * shape.matrixFloats; }
};

// Rows [begin, end) of a sequence's part of a batch, counted from its first: they begin from the state in slot `from`
// (-1: from nothing, all zeros) and leave theirs in slot `to`, which may be the same.
struct StateStep {
    int64_t begin = 0, end = 0;
    int32_t from = -1, to = -1;
};

class RecurrentState {
public:
    RecurrentState() = default;
    // Throws Error(OutOfMemory).
    RecurrentState(Allocator& allocator, const std::vector<RecurrentShape>& layers, int32_t slots);
    // 0 where no layer keeps anything; then there are no slots, and all that follows does nothing.
    static size_t bytesFor(const std::vector<RecurrentShape>& layers, int32_t slots);

    const RecurrentLayer& layer(size_t index) const { return _layers[index]; }
    size_t bytes() const { return _buffer.bytes(); }
    bool any() const { return _slots > 0; }
    int32_t freeSlots() const { return static_cast<int32_t>(_free.size()); }

    // Takes slots for a step from `begin` tokens, where the sequence's state is, to `end`. marks: lengths between
    // these, ascending, after which the state is wanted too, those nearest the end the most. Marks for which no slot
    // can be had are left out, and the first may be had by overwriting the state that the step begins from. Throws
    // Error(OutOfMemory) when there is no slot at all, and Error(Internal) for a step from elsewhere or impossible
    // marks; nothing has changed then.
    void extend(int32_t sequence, int64_t begin, int64_t end, const std::vector<int64_t>& marks = {});
    // The number of marks that extend() can keep without giving up a state that keep() asked for. There is no limit if
    // there are no slots.
    int32_t snapshotRoom(int32_t sequence) const;
    // What the step that was begun consists of; none: nothing.
    std::vector<StateStep> steps(int32_t sequence) const;
    // The step is done.
    void commit(int32_t sequence);
    // Forgets a step that was begun, and all states after more than `tokens` tokens. Of how many tokens the state is
    // that is left, at most `tokens`.
    int64_t truncate(int32_t sequence, int64_t tokens);
    // The state after `tokens` tokens shall be among the last to be given up, and the one that was so of this sequence
    // no longer: a long conversation would fill all slots with the ends of its prompts. Whether it is held.
    bool keep(int32_t sequence, int64_t tokens);

private:
    struct State {
        int64_t tokens = 0;
        int32_t slot = -1;
        bool kept = false;
        uint64_t made = 0;  // counts up
    };
    struct Sequence {
        std::vector<State> states;  // ascending; the last is where the sequence is
        std::vector<State> coming;  // of the step under way
        int64_t begin = 0;          // of that step
        int32_t from = -1;
    };
    Sequence& at(int32_t sequence);
    int32_t take(bool evenKept);

    int32_t _slots = 0;
    uint64_t _made = 0;
    Buffer _buffer;
    std::vector<RecurrentLayer> _layers;
    std::vector<int32_t> _free;
    std::vector<Sequence> _sequences;
};

}  // namespace sharpi
