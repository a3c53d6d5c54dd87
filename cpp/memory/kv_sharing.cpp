// See kv_sharing.h.
#include "memory/kv_sharing.h"

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

namespace {

constexpr int64_t kPage = KvCache::kPageTokens;

// Of a page's keys in a layer; its values take the same.
size_t keyBytes(const KvPages& layer) {
    return size_t(layer.kvHeads) * layer.headDim * layer.rowsOfPage() * kvElementBytes(layer.type);
}

}  // namespace

void KvSharing::share(int32_t sequence, const SaltedText& text, const std::vector<int64_t>& states) {
    if (text.count > _kv.length(sequence))
        throw Error(ErrorKind::Internal, "sequence " + std::to_string(sequence) + " shares tokens that it lacks");
    if (!isPossible()) return;
    _kv._pools[0].share(sequence, text);
    for (const int64_t tokens : states)
        if (tokens > 0 && tokens <= text.count) copyState(sequence, tokens);
}

void KvSharing::copyState(int32_t sequence, int64_t tokens) {
    const PageName& name = index().nameOf(_kv.pageTable(sequence)[tokens / kPage - 1]);
    PrefixStore& store = _kv._store;
    if (!_kv._states.any() || !store.keepsState(_kv._states.stateBytes()) || store.hasState(name)) return;
    std::vector<uint8_t> state = _kv._states.copy(sequence, tokens);
    if (!state.empty()) store.addState(name, std::move(state));
}

// Calls body(address, bytes) for the parts of a page.
template <typename Body> void KvSharing::forParts(int32_t page, const Body& body) const {
    const uint8_t* last = nullptr;
    for (const KvPages& layer : _kv._layers) {
        const size_t bytes = keyBytes(layer);
        if (!bytes || layer.k <= last) continue;  // it keeps none, or has those of an earlier layer
        last = layer.k;
        body(layer.k + static_cast<size_t>(page) * bytes, bytes);
        if (layer.v) body(layer.v + static_cast<size_t>(page) * bytes, bytes);
    }
}

size_t KvSharing::pageBytes() const {
    size_t all = 0;
    forParts(0, [&](const uint8_t*, size_t bytes) { all += bytes; });
    return all;
}

void KvSharing::spill(const std::vector<SharedPage>& pages) {
    if (pages.empty() || !_kv._store.keepsPage(pageBytes())) return;
    try {
        for (const SharedPage& page : pages) {
            std::vector<uint8_t> copy(pageBytes());
            uint8_t* to = copy.data();
            forParts(page.page, [&](const uint8_t* from, size_t bytes) {
                _kv._memory->download(to, from, bytes);
                to += bytes;
            });
            _kv._store.addPage(page.name, std::move(copy));
        }
    } catch (const std::bad_alloc&) {
    }
}

// The names of the pages that follow what the sequence holds: first those that are shared, then those that were
// spilled.
std::vector<PageName> KvSharing::found(int32_t sequence, const SaltedText& text) const {
    const PagePool& pool = _kv._pools[0];
    const int64_t first = _kv.length(sequence) / kPage;
    const int32_t before = first > 0 ? _kv.pageTable(sequence)[first - 1] : -1;
    std::vector<PageName> names = pool.adoptable(sequence, _kv.length(sequence), text);
    if (!_kv._store.keepsPage(pageBytes()) || (before >= 0 && !index().has(before))) return names;
    PageName name = before >= 0 ? index().nameOf(before) : nameOfBeginning(text.salt);
    if (!names.empty()) name = names.back();
    const int64_t next = first + static_cast<int64_t>(names.size());
    for (int64_t begin = next * kPage; begin + kPage <= text.count; begin += kPage) {
        name = nameAfter(name, text.tokens + begin, kPage);
        if (!_kv._store.hasPage(name)) break;
        names.push_back(name);
    }
    return names;
}

// Restores the last state that is after one of these pages, and leaves no name behind that page. Returns whether there
// is such a state and room for it.
bool KvSharing::restoreState(int32_t sequence, int64_t held, std::vector<PageName>& names) {
    const size_t bytes = _kv._states.stateBytes();
    CopiedBytes state;
    while (!names.empty() && !(state = _kv._store.findState(names.back(), bytes))) names.pop_back();
    const int64_t tokens = (held / kPage + static_cast<int64_t>(names.size())) * kPage;
    return state && _kv._states.restore(sequence, tokens, *state);
}

int64_t KvSharing::adopt(int32_t sequence, const SaltedText& text) {
    int64_t& length = _kv.at(sequence).length;
    if (!isPossible()) return length;
    PagePool& pool = _kv._pools[0];
    const int64_t held = length;
    std::vector<PageName> names = found(sequence, text);
    if (names.empty() || (_kv._states.any() && !restoreState(sequence, held, names))) return length;
    const SaltedText wanted{text.salt, text.tokens, (held / kPage + static_cast<int64_t>(names.size())) * kPage};
    try {
        length = pool.adopt(sequence, held, wanted);
        names.erase(names.begin(), names.begin() + (length / kPage - held / kPage));
        restorePages(sequence, wanted, names);
    } catch (...) {
        _kv._states.truncate(sequence, length);
        throw;
    }
    // A page that could not be restored leaves the state after it of no use.
    if (length < wanted.count) _kv.truncate(sequence, length);
    pool.settle(sequence, length);
    return length;
}

void KvSharing::restorePages(int32_t sequence, const SaltedText& text, const std::vector<PageName>& names) {
    int64_t& length = _kv.at(sequence).length;
    PagePool& pool = _kv._pools[0];
    std::vector<PageName> restored;
    for (const PageName& name : names) {
        const int64_t tokens = (length / kPage + 1) * kPage;
        if (!pool.canHold(sequence, tokens, false)) break;
        const CopiedBytes copy = _kv._store.takePage(name, pageBytes());
        if (!copy) break;
        length = tokens - kPage;  // a page that is not full is overwritten
        _kv.hold(sequence, tokens);
        const uint8_t* from = copy->data();
        forParts(pool.table(sequence)[length / kPage], [&](uint8_t* to, size_t bytes) {
            _kv._memory->upload(to, from, bytes);
            from += bytes;
        });
        length = tokens;
        pool.share(sequence, {text.salt, text.tokens, tokens});
        restored.push_back(name);
    }
    if (!restored.empty()) _kv._store.noteRestored(restored);
}

int64_t KvSharing::pagesInUse(const SaltedText& text) const {
    return isPossible() && !_kv._states.any() ? _kv._pools[0].inUse(text) : 0;
}

void KvSharing::forget(uint64_t store) {
    PagePool& pool = _kv._pools[0];
    try {
        if (isPossible() && _kv._store.beginClosing()) spill(pool.pages().idle());
    } catch (const std::exception&) {  // the device has failed, or there is no memory: these pages are lost
    }
    _kv._store.close(store);
    pool.forgetShared();
}

}  // namespace sharpi
