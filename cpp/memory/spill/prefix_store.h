// Copies of shared pages that the device had to give up, and of recurrent states: in RAM, and behind that in a
// directory. What has no room in RAM goes to the directory, if there is one.
#pragma once

#include <memory>

#include "memory/spill/segment_writer.h"

namespace sharpi {

struct SpillOptions {
    size_t pagesBytes = 0, statesBytes = 0;  // of RAM
    CacheDirectoryOptions directory = {};
    size_t queueBytes = size_t{256} << 20;  // of RAM too, for copies on their way to the directory
};

// What a store has done since it was opened, and what it holds.
struct SpillCounts {
    int64_t spilledPages = 0, restoredPages = 0;  // copied from the device, and back to it
    int64_t writtenCopies = 0, loadedCopies = 0;  // of pages and states, to the directory and from it
    size_t pagesBytes = 0, statesBytes = 0;       // now, in RAM
};

class PrefixStore {
public:
    // Keeps nothing until it is opened.
    PrefixStore() = default;
    // Takes the place of an earlier opening, whose copies in RAM stay as far as there is room. Returns a number for
    // close(). Throws Error(InvalidArgument) if the directory cannot be used; nothing has changed then.
    uint64_t open(const SpillOptions& options);
    // From now on no copy is left out because the directory's writer is behind. Returns whether there is a directory.
    bool beginClosing();
    // Returns once all of the RAM's copies are in the directory, as far as they can be written. Never throws. The store
    // is then as it was before it was opened. If it was opened again since, it stays as it is.
    void close(uint64_t opening);

    // Whether it is worth making a copy of this size.
    bool keepsPage(size_t bytes) const { return bytes > 0 && (_pages.takes(bytes) || _writer); }
    bool keepsState(size_t bytes) const { return _states.takes(bytes) || _writer; }
    bool hasPage(const PageName& name) const { return has(_pages, {SegmentKind::Page, name}); }
    bool hasState(const PageName& name) const { return has(_states, {SegmentKind::State, name}); }

    void addPage(const PageName& name, CopyVector copy);
    // The copy, which goes to the device: RAM need not keep it any more. Nothing if there is none of this size.
    CopiedBytes takePage(const PageName& name, size_t bytes);
    // These pages went to the device, in the order of the text.
    void noteRestored(const std::vector<PageName>& names);

    void addState(const PageName& name, CopyVector copy);
    CopiedBytes findState(const PageName& name, size_t bytes);

    SpillCounts counts() const;

private:
    void leave(SegmentKind kind, SavedCopies::Entries copies);
    bool has(const SavedCopies& copies, const SegmentKey& key) const;
    CopiedBytes load(const SegmentKey& key, size_t bytes);

    SavedCopies _pages{0}, _states{0};
    std::unique_ptr<SegmentWriter> _writer;
    uint64_t _openings = 0;
    bool _isClosing = false;
    SpillCounts _counts;
};

}  // namespace sharpi
