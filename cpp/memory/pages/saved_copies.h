// Copies in RAM of what belongs to beginnings of texts that end with a shared page: of the page, or of the recurrent
// state after it. They are limited in bytes; the one that was used longest ago goes first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/copy_buffers.h"
#include "memory/pages/prefix_index.h"

namespace sharpi {

using CopiedBytes = std::shared_ptr<const CopyVector>;

class SavedCopies {
public:
    using Entries = std::vector<std::pair<PageName, CopiedBytes>>;

    explicit SavedCopies(size_t budget) : _budget(budget) {}

    size_t bytes() const { return _bytes; }
    bool has(const PageName& name) const { return _byName.count(name) > 0; }
    // Whether there could be room for a copy of this size.
    bool takes(size_t bytes) const { return bytes <= _budget; }
    // Nothing if there is none. It counts as used now.
    CopiedBytes find(const PageName& name);
    // The same, and it is no longer here.
    CopiedBytes take(const PageName& name);
    // Returns what no longer has room, in the order in which it was used: the copy itself if it never has. What is here
    // already counts as used now, and stays as it is.
    Entries add(const PageName& name, CopiedBytes copy);
    Entries setBudget(size_t bytes);
    // Empties it, and returns what was here.
    Entries clear() { return shrink(0); }

private:
    Entries shrink(size_t most);

    size_t _budget, _bytes = 0;
    std::list<Entries::value_type> _copies;  // the last used is the last
    std::unordered_map<PageName, std::list<Entries::value_type>::iterator, DigestHash> _byName;
};

}  // namespace sharpi
