// Keys and values of all layers, in pages of a fixed number of tokens. A sequence has a list of pages for each reach
// that layers have; page p of the list holds its tokens from p * pageTokens on, in every layer of that reach. Pages
// that no later token sees are given back (page_pool.h). The same handles also reach the states of layers that keep no
// keys and values (recurrent_state.h), and kv_sharing.h lets sequences have pages in common.
#pragma once

#include <vector>

#include "memory/allocator.h"
#include "memory/kv_pages.h"
#include "memory/pages/page_pool.h"
#include "memory/recurrent_state.h"
#include "memory/spill/prefix_store.h"

namespace sharpi {

// No heads: the layer keeps no keys and values.
struct KvLayerShape {
    int32_t kvHeads = 0, headDim = 0;
    AttentionReach reach = {};
    int32_t source = -1;      // the earlier layer whose keys and values it reads; -1: it keeps its own
    int32_t valuePrefix = 0;  // see KvPages
    int32_t rowTokens = 1;    // see KvPages; divides a page's tokens or is a multiple of them
    bool floats = false;      // always F32
    int64_t elementsPerRow() const { return int64_t{kvHeads} * headDim * (valuePrefix > 0 ? 1 : 2); }
    KvType typeIn(KvType cache) const { return floats ? KvType::F32 : cache; }
};

class KvCache {
public:
    static constexpr int32_t kPageTokens = PagePool::kPageTokens;

    // Room in whole pages. Throws Error(OutOfMemory).
    KvCache(Allocator& allocator, const std::vector<KvLayerShape>& layers, KvType type, const KvRoom& room,
            RecurrentState states = {});
    static size_t bytesFor(const std::vector<KvLayerShape>& layers, KvType type, const KvRoom& room);

    int32_t createSequence();
    void releaseSequence(int32_t sequence);
    int64_t length(int32_t sequence) const { return at(sequence).length; }
    // Makes room for `tokens` more tokens, which the next step computes. marks: lengths of the sequence after which the
    // state is kept, if there is room, so that rolling back to them costs nothing. leave: steps of other sequences that
    // are to begin with this one (RecurrentState::extend). Throws
    // Error(OutOfMemory) if no page or no entry for the state is free; the sequence is then unchanged.
    void extend(int32_t sequence, int64_t tokens, const std::vector<int64_t>& marks = {}, int32_t leave = 0);
    // The number of marks that can be kept at no cost (RecurrentState::snapshotRoom).
    int32_t snapshotRoom(int32_t sequence) const { return _states.snapshotRoom(sequence); }
    // Takes pages for `tokens` more tokens, without changing the sequence's length; truncate() gives back the unused
    // ones. Returns false, and changes nothing, if there are too few without those that keepState() protects.
    bool reserve(int32_t sequence, int64_t tokens);
    // The tokens that extend() made room for have been computed.
    void commit(int32_t sequence);
    // Rolls back to the first `tokens` tokens, or to fewer if the state after these, or a page that the next token
    // sees, is no longer there. Returns the number that it kept; the others have to be computed again. Throws
    // Error(InvalidArgument) if the sequence has fewer than `tokens`.
    int64_t truncate(int32_t sequence, int64_t tokens);
    // Protects the state after `tokens` tokens and the pages that the next token sees, so that rolling back to it stays
    // possible as long as there is room. It replaces what an earlier call protected.
    void keepState(int32_t sequence, int64_t tokens);

    // A sequence's list of pages for layers with this KvPages::list.
    const int32_t* pageTable(int32_t sequence, int32_t list = 0) const;
    int32_t lists() const { return static_cast<int32_t>(_pools.size()); }
    const PagePool& pool(int32_t list) const { return _pools[static_cast<size_t>(list)]; }
    size_t layers() const { return _layers.size(); }
    const KvPages& layer(size_t index) const { return _layers[index]; }
    const RecurrentState& states() const { return _states; }
    size_t bytes() const { return _buffer.bytes(); }
    int64_t freePages() const { return _pools[0].freePages(); }  // shared ones that no sequence has are free

private:
    friend class KvSharing;
    struct Sequence {
        bool live = false;
        int64_t length = 0;
        // Tokens, in whole pages, with which others have begun too: here texts part, as far as is known. 0: nothing is
        // known, or the window here is kept already (KvSharing::share).
        int64_t common = 0;
    };
    const Sequence& at(int32_t sequence) const;
    Sequence& at(int32_t sequence) { return const_cast<Sequence&>(static_cast<const KvCache*>(this)->at(sequence)); }
    void requirePages(int32_t sequence, int64_t tokens) const;
    void hold(int32_t sequence, int64_t tokens);

    DeviceMemory* _memory;
    std::shared_ptr<CopyBuffers> _copies;  // of pages
    Buffer _buffer;
    std::vector<KvPages> _layers;
    std::vector<Sequence> _sequences;
    // By KvPages::list. The first is that of layers that see everything, if there are any: in it a sequence has pages
    // for all its tokens.
    std::vector<PagePool> _pools;
    RecurrentState _states;
    PrefixStore _store;  // see KvSharing
};

}  // namespace sharpi
