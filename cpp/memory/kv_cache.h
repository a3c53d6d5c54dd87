// Keys and values of all layers, in pages of a fixed number of tokens. A sequence holds a list of pages; page p of
// a sequence's list holds its tokens p * pageTokens onwards, in every layer.
#pragma once

#include <vector>

#include "memory/allocator.h"
#include "memory/kv_pages.h"

namespace sharpi {

struct KvLayerShape {
    int32_t kvHeads = 0, headDim = 0;
};

class KvCache {
public:
    static constexpr int32_t kPageTokens = 64;

    // Room for `tokens` tokens in all, rounded up to whole pages. Throws Error(OutOfMemory).
    KvCache(Allocator& allocator, const std::vector<KvLayerShape>& layers, KvType type, int64_t tokens);
    static size_t bytesFor(const std::vector<KvLayerShape>& layers, KvType type, int64_t tokens);

    int32_t createSequence();
    void releaseSequence(int32_t sequence);
    int64_t length(int32_t sequence) const { return at(sequence).length; }
    // Makes room for `tokens` more. Throws Error(OutOfMemory) when no page is free; the sequence is then unchanged.
    void extend(int32_t sequence, int64_t tokens);
    // Keeps the first `tokens`; throws Error(InvalidArgument) when there are fewer.
    void truncate(int32_t sequence, int64_t tokens);

    const int32_t* pageTable(int32_t sequence) const { return at(sequence).pages.data(); }
    const KvPages& layer(size_t index) const { return _layers[index]; }
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
};

}  // namespace sharpi
