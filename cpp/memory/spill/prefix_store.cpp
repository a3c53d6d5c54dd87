// See prefix_store.h.
#include "memory/spill/prefix_store.h"

#include <new>
#include <utility>

namespace sharpi {

namespace {

CopiedBytes shared(CopyVector copy) { return std::make_shared<const CopyVector>(std::move(copy)); }

}  // namespace

uint64_t PrefixStore::open(const SpillOptions& options) {
    std::unique_ptr<SegmentWriter> writer;
    if (!options.directory.path.empty())
        writer = std::make_unique<SegmentWriter>(options.directory, options.queueBytes);
    _writer = std::move(writer);
    _counts = {};
    leave(SegmentKind::Page, _pages.setBudget(options.pagesBytes));
    leave(SegmentKind::State, _states.setBudget(options.statesBytes));
    return ++_openings;
}

bool PrefixStore::beginClosing() {
    _isClosing = true;
    return _writer != nullptr;
}

void PrefixStore::close(uint64_t opening) {
    if (opening == _openings) {
        beginClosing();
        try {
            leave(SegmentKind::State, _states.setBudget(0));
            leave(SegmentKind::Page, _pages.setBudget(0));
        } catch (const std::bad_alloc&) {  // these copies are lost
            _states = SavedCopies(0);
            _pages = SavedCopies(0);
        }
        _writer.reset();
    }
    _isClosing = false;
}

bool PrefixStore::has(const SavedCopies& copies, const SegmentKey& key) const {
    return copies.has(key.name) || (_writer && (_writer->find(key) || _writer->directory().has(key)));
}

void PrefixStore::addPage(const PageName& name, CopyVector copy) {
    ++_counts.spilledPages;
    leave(SegmentKind::Page, _pages.add(name, shared(std::move(copy))));
}

void PrefixStore::addState(const PageName& name, CopyVector copy) {
    leave(SegmentKind::State, _states.add(name, shared(std::move(copy))));
}

CopiedBytes PrefixStore::takePage(const PageName& name, size_t bytes) {
    CopiedBytes copy = _pages.take(name);
    return copy ? copy : load({SegmentKind::Page, name}, bytes);
}

CopiedBytes PrefixStore::findState(const PageName& name, size_t bytes) {
    CopiedBytes copy = _states.find(name);
    if (copy) return copy;
    copy = load({SegmentKind::State, name}, bytes);
    if (copy && _states.takes(bytes)) leave(SegmentKind::State, _states.add(name, copy));
    if (copy && _writer) _writer->directory().use({{SegmentKind::State, name}});
    return copy;
}

CopiedBytes PrefixStore::load(const SegmentKey& key, size_t bytes) {
    if (!_writer) return nullptr;
    if (CopiedBytes copy = _writer->find(key)) return copy;
    CopiedBytes copy = _writer->directory().read(key, bytes);
    if (copy) ++_counts.loadedCopies;
    return copy;
}

// The beginning of a text must not go before what follows it, so it counts as used later.
void PrefixStore::noteRestored(const std::vector<PageName>& names) {
    _counts.restoredPages += static_cast<int64_t>(names.size());
    if (!_writer) return;
    std::vector<SegmentKey> keys;
    for (const PageName& name : names) keys.push_back({SegmentKind::Page, name});
    _writer->directory().use(keys);
}

void PrefixStore::leave(SegmentKind kind, SavedCopies::Entries copies) {
    if (!_writer) return;
    for (auto& [name, copy] : copies) {
        if (_isClosing) _writer->addWaiting({kind, name}, std::move(copy));
        else _writer->add({kind, name}, std::move(copy));
    }
}

SpillCounts PrefixStore::counts() const {
    SpillCounts counts = _counts;
    counts.pagesBytes = _pages.bytes();
    counts.statesBytes = _states.bytes();
    if (_writer) counts.writtenCopies = _writer->written();
    return counts;
}

}  // namespace sharpi
