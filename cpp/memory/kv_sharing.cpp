// See kv_sharing.h.
#include "memory/kv_sharing.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "core/error.h"
#include "memory/pages/window_sharing.h"

namespace sharpi {

namespace {

constexpr int64_t kPage = KvCache::kPageTokens;

// Of a page's keys in a layer; its values take the same.
size_t keyBytes(const KvPages& layer) {
    return size_t(layer.kvHeads) * layer.headDim * layer.rowsOfPage() * kvElementBytes(layer.type);
}

}  // namespace

void KvSharing::share(int32_t sequence, const SaltedText& text, const std::vector<int64_t>& likely) {
    if (text.count > _kv.length(sequence))
        throw Error(ErrorKind::Internal, "sequence " + std::to_string(sequence) + " shares tokens that it lacks");
    const int64_t pages = text.count / kPage;
    int64_t& common = _kv.at(sequence).common;
    common = std::max(common, _kv._pools[0].share(sequence, text) * kPage);
    const bool parts = common > 0 && common < pages * kPage;
    for (size_t list = 1; list < _kv._pools.size(); ++list) {
        WindowSharing windows(_kv._pools[list]);
        windows.share(sequence, pages, _kv._pools[0]);
        if (parts) windows.keep(sequence, common / kPage);
        for (const int64_t tokens : likely)
            if (tokens <= text.count) windows.keep(sequence, tokens / kPage);
    }
    if (parts) common = 0;
    for (const int64_t tokens : likely)
        if (tokens > 0 && tokens <= text.count) copyState(sequence, tokens);
}

void KvSharing::copyState(int32_t sequence, int64_t tokens) {
    const PageName& name = index().nameOf(_kv.pageTable(sequence)[tokens / kPage - 1]);
    if (!keepsStates() || _kv._store.hasState(name)) return;
    CopyVector state = _kv._states.copy(sequence, tokens);
    if (!state.empty()) _kv._store.addState(name, std::move(state));
}

// --- copies of pages -------------------------------------------------------------------------------------------------

// Calls body(address, bytes) for the parts of a page.
template <typename Body> void KvSharing::forParts(int32_t list, int32_t page, const Body& body) const {
    const uint8_t* last = nullptr;
    for (const KvPages& layer : _kv._layers) {
        const size_t bytes = keyBytes(layer);
        if (!bytes || layer.k <= last) continue;  // it keeps none, or has those of an earlier layer
        last = layer.k;
        if (layer.list != list) continue;
        body(layer.k + static_cast<size_t>(page) * bytes, bytes);
        if (layer.v) body(layer.v + static_cast<size_t>(page) * bytes, bytes);
    }
}

size_t KvSharing::pageBytes(int32_t list) const {
    size_t all = 0;
    forParts(list, 0, [&](const uint8_t*, size_t bytes) { all += bytes; });
    return all;
}

// Under which the store has a page of a list. Which layers a list has depends on the cache's room, so they are part of
// the name, unless the list has all.
PageName KvSharing::copyName(int32_t list, const PageName& name) const {
    if (_kv.lists() == 1) return name;
    Sha256 digest;
    digest.add(name.data(), name.size());
    for (int32_t layer = 0; layer < static_cast<int32_t>(_kv._layers.size()); ++layer)
        if (_kv._layers[static_cast<size_t>(layer)].list == list) digest.add(&layer, sizeof layer);
    return digest.end();
}

void KvSharing::makeRoom(int32_t list, int64_t pages) {
    PagePool& pool = _kv._pools[static_cast<size_t>(list)];
    pool.makeRoom(pages);
    spill(list, pool.pages().evictedBy(pages));
}

void KvSharing::spill(int32_t list, const std::vector<SharedPage>& pages) {
    const size_t bytes = pages.empty() ? 0 : pageBytes(list);
    if (!_kv._store.keepsPage(bytes)) return;
    try {
        for (const SharedPage& page : pages) {
            CopyVector copy(bytes, CopyAllocator<uint8_t>(_kv._copies));
            uint8_t* to = copy.data();
            forParts(list, page.page, [&](const uint8_t* from, size_t part) {
                _kv._memory->download(to, from, part);
                to += part;
            });
            _kv._store.addPage(copyName(list, page.name), std::move(copy));
        }
    } catch (const std::bad_alloc&) {
    }
}

void KvSharing::upload(int32_t list, int32_t page, const CopiedBytes& copy) const {
    const uint8_t* from = copy->data();
    forParts(list, page, [&](uint8_t* to, size_t bytes) {
        _kv._memory->upload(to, from, bytes);
        from += bytes;
    });
}

// --- what a text finds -----------------------------------------------------------------------------------------------

// The pages that follow what the sequence holds, of the list of layers that see everything: first those that are
// shared, then those that were spilled, as far as there is room for them. Pages without bytes are always there.
KvSharing::Following KvSharing::found(int32_t sequence, const SaltedText& text) const {
    const PagePool& pool = _kv._pools[0];
    const int64_t length = _kv.length(sequence), first = length / kPage;
    const int32_t before = first > 0 ? _kv.pageTable(sequence)[first - 1] : -1;
    Following following{sequence, first, {}};
    int64_t room = pool.freePages() + (length % kPage > 0);
    for (const int32_t page : pool.pages().following(before, first, text)) {
        following.names.push_back(index().nameOf(page));
        room -= pool.pages().uses(page) == 0;
    }
    const size_t bytes = pageBytes();
    if ((bytes > 0 && !_kv._store.keepsPage(bytes)) || (before >= 0 && !index().has(before))) return following;
    PageName name = before >= 0 ? index().nameOf(before) : nameOfBeginning(text.salt);
    if (!following.names.empty()) name = following.names.back();
    for (int64_t begin = following.pages() * kPage; begin + kPage <= text.count && room > 0; begin += kPage, --room) {
        name = nameAfter(name, text.tokens + begin, kPage);
        if (bytes > 0 && !_kv._store.hasPage(copyName(0, name))) break;
        following.names.push_back(name);
    }
    return following;
}

// Whether the sequence holds the page, or finds it. It holds all that its next token sees.
bool KvSharing::isFound(int32_t list, const Following& following, int64_t number) const {
    PagePool& pool = _kv._pools[static_cast<size_t>(list)];
    if (number < following.first) return pool.holds(following.sequence, number * kPage);
    const PageName& name = following.names[static_cast<size_t>(number - following.first)];
    return WindowSharing(pool).find(name) >= 0 ||
           (_kv._store.keepsPage(pageBytes(list)) && _kv._store.hasPage(copyName(list, name)));
}

// Leaves only names up to the last place where all windows are found. Behind a page that is missing no window has it.
void KvSharing::cutToWindows(Following& following) const {
    for (size_t before = 0; before != following.names.size();) {
        before = following.names.size();
        for (int32_t list = 1; list < _kv.lists(); ++list) {
            const WindowSharing windows(_kv._pools[static_cast<size_t>(list)]);
            for (int64_t number = following.pages() - 1; number >= windows.begin(following.pages());) {
                if (isFound(list, following, number)) {
                    --number;
                    continue;
                }
                following.names.resize(static_cast<size_t>(std::max<int64_t>(number - following.first, 0)));
                number = following.names.empty() ? -1 : following.pages() - 1;
            }
        }
    }
}

// Leaves only names up to the last place where a text can continue. Returns the state there, if layers have states.
CopiedBytes KvSharing::cutToWhole(Following& following) const {
    CopiedBytes state;
    cutToWindows(following);
    while (_kv._states.any() && !following.names.empty()) {
        state = _kv._store.findState(following.names.back(), _kv._states.stateBytes());
        if (state) break;
        following.names.pop_back();
        cutToWindows(following);
    }
    return state;
}

int64_t KvSharing::pagesInUse(const SaltedText& text) const {
    if (_kv._states.any()) return 0;
    const PageUses& uses = _kv._pools[0].pages();
    std::vector<int32_t> pages = uses.following(-1, 0, text);
    Following following{-1, 0, {}};
    for (const int32_t page : pages) following.names.push_back(index().nameOf(page));
    cutToWindows(following);
    pages.resize(following.names.size());
    return std::count_if(pages.begin(), pages.end(), [&](int32_t page) { return uses.uses(page) > 0; });
}

// --- taking it -------------------------------------------------------------------------------------------------------

int64_t KvSharing::adopt(int32_t sequence, const SaltedText& text, int64_t* common) {
    KvCache::Sequence& s = _kv.at(sequence);
    Following following = found(sequence, text);
    if (common) *common = following.pages() * kPage;
    const CopiedBytes state = cutToWhole(following);
    const SaltedText wanted{text.salt, text.tokens, following.pages() * kPage};
    if (following.names.empty()) return s.length;
    if (_kv._states.any() && !_kv._states.restore(sequence, wanted.count, *state)) return s.length;
    try {
        s.length = following.first * kPage;  // a page that is not full gives way
        for (PagePool& pool : _kv._pools) pool.cut(sequence, s.length);
        // No page that is found may give way to one that is brought back.
        for (size_t list = 1; list < _kv._pools.size(); ++list)
            WindowSharing(_kv._pools[list]).adopt(sequence, following.first, following.names);
        s.length = _kv._pools[0].adopt(sequence, s.length, wanted);
        const auto shared = following.names.begin() + (s.length / kPage - following.first);
        restorePages(sequence, wanted, {shared, following.names.end()});
        for (int32_t list = 1; list < _kv.lists(); ++list) restoreWindow(list, following);
    } catch (...) {
        _kv.truncate(sequence, s.length);
        throw;
    }
    // What could not be brought back leaves what comes after it of no use.
    s.common = _kv.truncate(sequence, s.length);
    return s.length;
}

void KvSharing::restorePages(int32_t sequence, const SaltedText& text, const std::vector<PageName>& names) {
    int64_t& length = _kv.at(sequence).length;
    PagePool& pool = _kv._pools[0];
    const size_t bytes = pageBytes();
    std::vector<PageName> restored;
    for (const PageName& name : names) {
        const CopiedBytes copy = bytes ? _kv._store.takePage(copyName(0, name), bytes) : nullptr;
        if (bytes && !copy) break;
        _kv.hold(sequence, length + kPage);
        if (copy) upload(0, pool.table(sequence)[length / kPage], copy);
        length += kPage;
        pool.share(sequence, {text.salt, text.tokens, length});
        if (copy) restored.push_back(copyName(0, name));
    }
    if (!restored.empty()) _kv._store.noteRestored(restored);
}

void KvSharing::restoreWindow(int32_t list, const Following& following) {
    PagePool& pool = _kv._pools[static_cast<size_t>(list)];
    WindowSharing windows(pool);
    std::vector<PageName> restored;
    const int64_t begin = std::max(windows.begin(following.pages()), following.first);
    for (int64_t number = begin; number < following.pages(); ++number) {
        if (pool.holds(following.sequence, number * kPage)) continue;
        const PageName& name = following.names[static_cast<size_t>(number - following.first)];
        if (pool.room(false) < 1) break;
        const CopiedBytes copy = _kv._store.takePage(copyName(list, name), pageBytes(list));
        if (!copy) break;
        makeRoom(list, 1);
        const int32_t page = windows.take();
        try {
            upload(list, page, copy);
            windows.add(following.sequence, number, page, name);
        } catch (...) {
            windows.release(page);
            throw;
        }
        restored.push_back(copyName(list, name));
    }
    if (!restored.empty()) _kv._store.noteRestored(restored);
}

void KvSharing::forget(uint64_t store) {
    try {
        if (_kv._store.beginClosing())
            for (int32_t list = 0; list < _kv.lists(); ++list) spill(list, _kv.pool(list).pages().idle());
    } catch (const std::exception&) {  // the device has failed, or there is no memory: these pages are lost
    }
    _kv._store.close(store);
    for (PagePool& pool : _kv._pools) pool.forgetShared();
}

}  // namespace sharpi
