// See kv_cache.h.
#include "memory/kv_cache.h"

#include <string>

#include "core/error.h"

namespace sharpi {

namespace {

int64_t pagesFor(int64_t tokens) { return (tokens + KvCache::kPageTokens - 1) / KvCache::kPageTokens; }

size_t pageBytes(const KvLayerShape& layer, KvType type) {
    return size_t(layer.kvHeads) * layer.headDim * KvCache::kPageTokens * kvElementBytes(type);
}

}  // namespace

size_t KvCache::bytesFor(const std::vector<KvLayerShape>& layers, KvType type, int64_t tokens) {
    size_t bytes = 0;
    for (const KvLayerShape& layer : layers) bytes += 2 * pageBytes(layer, type) * size_t(pagesFor(tokens));
    return bytes;
}

KvCache::KvCache(Allocator& allocator, const std::vector<KvLayerShape>& layers, KvType type, int64_t tokens,
                 RecurrentState states)
    : _buffer(allocator, bytesFor(layers, type, tokens), "KV cache"), _states(std::move(states)) {
    const int64_t pages = pagesFor(tokens);
    auto* next = _buffer.as<uint8_t>();
    for (const KvLayerShape& layer : layers) {
        const size_t bytes = pageBytes(layer, type) * size_t(pages);
        _layers.push_back({type, layer.kvHeads, layer.headDim, kPageTokens, next, next + bytes});
        next += 2 * bytes;
    }
    for (int64_t page = pages - 1; page >= 0; --page) _freePages.push_back(static_cast<int32_t>(page));
}

const KvCache::Sequence& KvCache::at(int32_t sequence) const {
    if (sequence < 0 || size_t(sequence) >= _sequences.size() || !_sequences[sequence].live) {
        throw Error(ErrorKind::Internal, "sequence " + std::to_string(sequence) + " is not held by the KV cache");
    }
    return _sequences[sequence];
}

int32_t KvCache::createSequence() {
    size_t index = 0;
    while (index < _sequences.size() && _sequences[index].live) ++index;
    if (index == _sequences.size()) _sequences.emplace_back();
    _sequences[index].live = true;
    return static_cast<int32_t>(index);
}

void KvCache::releaseSequence(int32_t sequence) {
    truncate(sequence, 0);
    at(sequence).live = false;
}

void KvCache::extend(int32_t sequence, int64_t tokens, const std::vector<int64_t>& marks) {
    Sequence& s = at(sequence);
    const int64_t more = pagesFor(s.length + tokens) - static_cast<int64_t>(s.pages.size());
    if (more > freePages()) {
        throw Error(ErrorKind::OutOfMemory, "the KV cache is full: the sequence needs room for " +
                                                std::to_string(s.length + tokens) + " tokens, and only " +
                                                std::to_string(freePages() * kPageTokens) +
                                                " are free; close other sessions or load with a larger context");
    }
    _states.extend(sequence, s.length, s.length + tokens, marks);
    for (int64_t i = 0; i < more; ++i) {
        s.pages.push_back(_freePages.back());
        _freePages.pop_back();
    }
    s.length += tokens;
}

bool KvCache::reserve(int32_t sequence, int64_t tokens) {
    Sequence& s = at(sequence);
    const int64_t pages = pagesFor(s.length + tokens);
    if (pages - static_cast<int64_t>(s.pages.size()) > freePages()) return false;
    s.pages.reserve(static_cast<size_t>(pages));
    while (static_cast<int64_t>(s.pages.size()) < pages) {
        s.pages.push_back(_freePages.back());
        _freePages.pop_back();
    }
    return true;
}

int64_t KvCache::truncate(int32_t sequence, int64_t tokens) {
    Sequence& s = at(sequence);
    if (tokens < 0 || tokens > s.length) {
        throw Error(ErrorKind::InvalidArgument,
                    "cannot keep " + std::to_string(tokens) + " of " + std::to_string(s.length) + " tokens");
    }
    s.length = _states.truncate(sequence, tokens);
    while (static_cast<int64_t>(s.pages.size()) > pagesFor(s.length)) {
        _freePages.push_back(s.pages.back());
        s.pages.pop_back();
    }
    return s.length;
}

}  // namespace sharpi
