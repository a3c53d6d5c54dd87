// Keys and values of all layers, in pages of a fixed number of tokens. A sequence holds a list of pages; page p of
// a sequence's list holds its tokens p * pageTokens onwards, in every layer. Beside it, behind the same handles, the
// states of layers that keep no keys and values (recurrent_state.h).
#pragma once

#include <vector>

#include "memory/allocator.h"
#include "memory/kv_pages.h"
#include "memory/recurrent_state.h"

namespace sharpi {

// Both 0: the layer keeps nothing here.
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
    // Makes room for `tokens` more, which the next step computes. marks: lengths of the sequence whose states are kept
    // if there is room, so that cutting back to them costs nothing: see RecurrentState::extend. Throws
    // Error(OutOfMemory) when no page is free, or no slot for the state; the sequence is then unchanged.
    void extend(int32_t sequence, int64_t tokens, const std::vector<int64_t>& marks = {});
    // The number of marks that can be had at no cost: see RecurrentState::snapshotRoom.
    int32_t snapshotRoom(int32_t sequence) const { return _states.snapshotRoom(sequence); }
    // Pages for `tokens` more, at the sequence's length as it stays; truncate() gives back what is not used. Whether
    // there are.
    bool reserve(int32_t sequence, int64_t tokens);
    // What extend() made room for has been computed.
    void commit(int32_t sequence) { _states.commit(sequence); }
    // Keeps the first `tokens`, or fewer where the state after these is no longer there: how many it keeps. The others
    // have to be computed again. Throws Error(InvalidArgument) when the sequence has fewer.
    int64_t truncate(int32_t sequence, int64_t tokens);
    // Cutting the sequence back to `tokens` shall stay possible as long as there is room; of what was said before, no
    // longer.
    void keepState(int32_t sequence, int64_t tokens) { _states.keep(sequence, tokens); }

    const int32_t* pageTable(int32_t sequence) const { return at(sequence).pages.data(); }
    const KvPages& layer(size_t index) const { return _layers[index]; }
    const RecurrentState& states() const { return _states; }
    KvType type() const { return _type; }
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

    KvType _type;
    Buffer _buffer;
    std::vector<KvPages> _layers;
    std::vector<Sequence> _sequences;
    std::vector<int32_t> _freePages;
    RecurrentState _states;
};

}  // namespace sharpi
