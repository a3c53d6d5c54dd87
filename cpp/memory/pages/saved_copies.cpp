// See saved_copies.h.
#include "memory/pages/saved_copies.h"

#include <iterator>

namespace sharpi {

CopiedBytes SavedCopies::find(const PageName& name) {
    const auto found = _byName.find(name);
    if (found == _byName.end()) return nullptr;
    _copies.splice(_copies.end(), _copies, found->second);
    return found->second->second;
}

CopiedBytes SavedCopies::take(const PageName& name) {
    const auto found = _byName.find(name);
    if (found == _byName.end()) return nullptr;
    CopiedBytes copy = std::move(found->second->second);
    _bytes -= copy->size();
    _copies.erase(found->second);
    _byName.erase(found);
    return copy;
}

SavedCopies::Entries SavedCopies::add(const PageName& name, CopiedBytes copy) {
    if (find(name)) return {};
    if (!takes(copy->size())) return {{name, std::move(copy)}};
    Entries left = shrink(_budget - copy->size());
    _copies.emplace_back(name, std::move(copy));
    const auto added = std::prev(_copies.end());
    try {
        _byName.emplace(name, added);
    } catch (...) {
        _copies.erase(added);
        throw;
    }
    _bytes += added->second->size();
    return left;
}

SavedCopies::Entries SavedCopies::setBudget(size_t bytes) {
    _budget = bytes;
    return shrink(bytes);
}

SavedCopies::Entries SavedCopies::shrink(size_t most) {
    Entries left;
    while (_bytes > most) {
        left.push_back(_copies.front());
        _bytes -= left.back().second->size();
        _byName.erase(left.back().first);
        _copies.pop_front();
    }
    return left;
}

}  // namespace sharpi
