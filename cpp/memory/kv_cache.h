// Keys and values of all layers, in pages of a fixed number of tokens. A sequence has a list of pages; page p of the
// list holds its tokens from p * pageTokens on, in every layer. The same handles also reach the states of layers that
// keep no keys and values (recurrent_state.h).
#pragma once

#include <vector>

#include "memory/allocator.h"
#include "memory/kv_pages.h"
#include "memory/recurrent_state.h"

namespace sharpi {

// Both 0: the layer keeps no keys and values.
struct KvLayerShape {
    int32_t kvHeads = 0, headDim = 0;
};

class KvCache {
public:
    static constexpr int32_t kPageTokens = 64;

    // Room for `tokens` tokens in all, rounded up to whole pages. Throws Error(OutOfMemory).
    KvCache(Allocator& allocator, const std::vector<KvLayerShape>& layers, KvType type, int64_t tokens,
            RecurrentState states = {});
    static size_t bytesFor(const std::vector<KvLayerShape>& layers, KvType type, int64_t tokens);

    int32_t createSequence();
    void releaseSequence(int32_t sequence);
    int64_t length(int32_t sequence) const { return at(sequence).length; }
    // Makes room for `tokens` more tokens, which the next step computes. marks: lengths of the sequence after which the
    // state is kept, if there is room, so that rolling back to them costs nothing (RecurrentState::extend). Throws
    // Error(OutOfMemory) if no page or no entry for the state is free; the sequence is then unchanged.
    void extend(int32_t sequence, int64_t tokens, const std::vector<int64_t>& marks = {});
    // The number of marks that can be kept at no cost (RecurrentState::snapshotRoom).
    int32_t snapshotRoom(int32_t sequence) const { return _states.snapshotRoom(sequence); }
    // Takes pages for `tokens` more tokens, without changing the sequence's length; truncate() gives back the unused
    // ones. Returns false, and changes nothing, if there are too few.
    bool reserve(int32_t sequence, int64_t tokens);
    // The tokens that extend() made room for have been computed.
    void commit(int32_t sequence) { _states.commit(sequence); }
    // Rolls back to the first `tokens` tokens, or to fewer if the state after these is no longer there. Returns the
    // number that it kept; the others have to be computed again. Throws Error(InvalidArgument) if the sequence has
    // fewer than `tokens`.
    int64_t truncate(int32_t sequence, int64_t tokens);
    // Protects the state after `tokens` tokens, so that rolling back to it stays possible as long as there is room. It
    // replaces the state that an earlier call protected.
    void keepState(int32_t sequence, int64_t tokens) { _states.keep(sequence, tokens); }

    const int32_t* pageTable(int32_t sequence) const { return at(sequence).pages.data(); }
    const KvPages& layer(size_t index) const { return _layers[index]; }
    const RecurrentState& states() const { return _states; }
    size_t bytes() const { return _buffer.bytes(); }
    int64_t freePages() const { return static_cast<int64_t>(_freePages.size()); }

private:
    struct Sequence {
        bool live = false;
        int64_t length = 0;
        std::vector<int32_t> pages;
    };
    const Sequence& at(int32_t sequence) const;
    Sequence& at(int32_t sequence) { return const_cast<Sequence&>(static_cast<const KvCache*>(this)->at(sequence)); }

    Buffer _buffer;
    std::vector<KvPages> _layers;
    std::vector<Sequence> _sequences;
    std::vector<int32_t> _freePages;
    RecurrentState _states;
};

}  // namespace sharpi
