// Copies in RAM of recurrent states, each after a beginning of a text that ends with a shared page: another text with
// this beginning continues from there. They are limited in bytes; the one that was used longest ago goes first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sharpi {

class SavedStates {
public:
    using Bytes = std::vector<uint8_t>;

    explicit SavedStates(size_t budget) : _budget(budget) {}

    size_t bytes() const { return _bytes; }
    void setBudget(size_t bytes);
    // Whether there could be room for a state of this size.
    bool takes(size_t bytes) const { return bytes <= _budget; }
    // The state that belongs to this key, which counts as used now; nullptr if there is none. Valid until the next
    // call.
    const Bytes* find(uint64_t key);
    void add(uint64_t key, Bytes state);
    void clear();

private:
    void shrink(size_t most);

    size_t _budget, _bytes = 0;
    std::list<std::pair<uint64_t, Bytes>> _states;  // the last used is the last
    std::unordered_map<uint64_t, std::list<std::pair<uint64_t, Bytes>>::iterator> _byKey;
};

}  // namespace sharpi
