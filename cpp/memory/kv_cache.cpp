// See kv_cache.h.
#include "memory/kv_cache.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "memory/kv_sharing.h"

namespace sharpi {

namespace {

// Keys and values.
size_t pageBytes(const KvLayerShape& layer, KvType type) {
    const int64_t rows = std::max(KvCache::kPageTokens / layer.rowTokens, 1);
    return static_cast<size_t>(layer.elementsPerRow() * rows) * kvElementBytes(layer.typeIn(type));
}

// What layers are given: pools of pages, and which of them each layer has.
struct Division {
    std::vector<AttentionReach> reaches;  // by list; the first sees everything
    std::vector<int64_t> pages;           // by list
    std::vector<int32_t> listOf;          // by layer

    Division(const std::vector<KvLayerShape>& layers, const KvRoom& room) {
        reaches.push_back({});
        pages.push_back(PagePool::pagesIn(room, {}));
        for (size_t i = 0; i < layers.size(); ++i) {
            const int32_t source = layers[i].source;
            listOf.push_back(source < 0 ? find(reachOf(layers, i), room) : listOf[static_cast<size_t>(source)]);
        }
    }

private:
    // How far back a layer's keys are read. A layer that is read differently by others keeps everything.
    static AttentionReach reachOf(const std::vector<KvLayerShape>& layers, size_t index) {
        for (const KvLayerShape& reader : layers) {
            if (reader.source == static_cast<int32_t>(index) && reader.reach != layers[index].reach) return {};
        }
        return layers[index].reach;
    }

    // Layers whose pool would hold all tokens see everything as far as the cache is concerned.
    int32_t find(AttentionReach reach, const KvRoom& room) {
        const int64_t wanted = PagePool::pagesIn(room, reach);
        if (wanted == pages[0]) return 0;
        const auto found = std::find(reaches.begin(), reaches.end(), reach);
        const auto list = static_cast<int32_t>(found - reaches.begin());
        if (found == reaches.end()) {
            reaches.push_back(reach);
            pages.push_back(wanted);
        }
        return list;
    }
};

size_t bytesOf(const std::vector<KvLayerShape>& layers, KvType type, const Division& division) {
    size_t bytes = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        const int64_t pages = division.pages[static_cast<size_t>(division.listOf[i])];
        if (layers[i].source < 0) bytes += pageBytes(layers[i], type) * static_cast<size_t>(pages);
    }
    return bytes;
}

}  // namespace

size_t KvCache::bytesFor(const std::vector<KvLayerShape>& layers, KvType type, const KvRoom& room) {
    return bytesOf(layers, type, Division(layers, room));
}

KvCache::KvCache(Allocator& allocator, const std::vector<KvLayerShape>& layers, KvType type, const KvRoom& room,
                 RecurrentState states)
    : _memory(&allocator.memory()),
      _copies(std::make_shared<CopyBuffers>(_memory->hostPages())),
      _buffer(allocator, bytesFor(layers, type, room), "KV cache"),
      _states(std::move(states)) {
    const Division division(layers, room);
    for (size_t list = 0; list < division.pages.size(); ++list)
        _pools.emplace_back(division.reaches[list], division.pages[list]);
    auto* next = _buffer.as<uint8_t>();
    for (size_t i = 0; i < layers.size(); ++i) {
        const KvLayerShape& layer = layers[i];
        if (layer.source >= 0) {
            _layers.push_back(_layers[static_cast<size_t>(layer.source)]);
            continue;
        }
        const int32_t list = division.listOf[i];
        const size_t bytes = pageBytes(layer, type) * static_cast<size_t>(division.pages[static_cast<size_t>(list)]);
        uint8_t* const values = layer.valuePrefix > 0 ? nullptr : next + bytes / 2;
        _layers.push_back({layer.typeIn(type), layer.kvHeads, layer.headDim, kPageTokens, next, values, list,
                           layer.valuePrefix, layer.rowTokens});
        next += bytes;
    }
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

// Throws if the sequence cannot have pages for this many tokens.
void KvCache::requirePages(int32_t sequence, int64_t tokens) const {
    const std::string close = "close other sessions or load with ";
    if (!_pools[0].canHold(sequence, tokens, true)) {
        throw Error(ErrorKind::OutOfMemory, "the KV cache is full: the sequence needs room for " +
                                                std::to_string(tokens) + " tokens, and only " +
                                                std::to_string(freePages() * kPageTokens) + " are free; " + close +
                                                "a larger context");
    }
    for (const PagePool& pool : _pools) {
        if (pool.canHold(sequence, tokens, true)) continue;
        const AttentionReach& reach = pool.reach();
        throw Error(ErrorKind::OutOfMemory, "the KV cache has no room for another sequence in layers that see a " +
                                                std::string(reach.window ? "window" : "chunk") + " of " +
                                                std::to_string(std::max(reach.window, reach.chunk)) + " tokens; " +
                                                close + "room for more sequences");
    }
}

void KvCache::extend(int32_t sequence, int64_t tokens, const std::vector<int64_t>& marks, int32_t leave) {
    Sequence& s = at(sequence);
    requirePages(sequence, s.length + tokens);
    _states.extend(sequence, s.length, s.length + tokens, marks, leave);
    s.length += tokens;
    hold(sequence, s.length);
}

// There must be room. Shared pages that give way are copied first.
void KvCache::hold(int32_t sequence, int64_t tokens) {
    for (int32_t list = 0; list < lists(); ++list)
        KvSharing(*this).makeRoom(list, pool(list).lacking(sequence, tokens));
    for (PagePool& pool : _pools) pool.hold(sequence, tokens);
}

bool KvCache::reserve(int32_t sequence, int64_t tokens) {
    const int64_t length = at(sequence).length + tokens;
    for (const PagePool& pool : _pools)
        if (!pool.canHold(sequence, length, false)) return false;
    hold(sequence, length);
    return true;
}

void KvCache::commit(int32_t sequence) {
    _states.commit(sequence);
    for (PagePool& pool : _pools) pool.settle(sequence, at(sequence).length);
}

int64_t KvCache::truncate(int32_t sequence, int64_t tokens) {
    Sequence& s = at(sequence);
    if (tokens < 0 || tokens > s.length) {
        throw Error(ErrorKind::InvalidArgument,
                    "cannot keep " + std::to_string(tokens) + " of " + std::to_string(s.length) + " tokens");
    }
    // What one of them has lost, the others have to give up.
    do {
        s.length = tokens;
        for (const PagePool& pool : _pools) tokens = pool.whole(sequence, tokens);
        tokens = _states.truncate(sequence, tokens);
    } while (tokens != s.length);
    s.common = std::min(s.common, tokens / kPageTokens * kPageTokens);
    for (PagePool& pool : _pools) {
        pool.cut(sequence, tokens);
        pool.settle(sequence, tokens);
    }
    return tokens;
}

void KvCache::keepState(int32_t sequence, int64_t tokens) {
    if (tokens > at(sequence).length || (_states.any() && !_states.keep(sequence, tokens))) return;
    for (const PagePool& pool : _pools)
        if (pool.whole(sequence, tokens) != tokens) return;
    for (PagePool& pool : _pools) pool.keep(sequence, tokens);
}

const int32_t* KvCache::pageTable(int32_t sequence, int32_t list) const {
    at(sequence);  // throws for one that is not held
    return pool(list).table(sequence);
}

}  // namespace sharpi
