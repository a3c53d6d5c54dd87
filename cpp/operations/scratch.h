// One allocation for all of a backend's working memory: a list of parts that is laid out the same way for planning
// and for running.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory/allocator.h"

namespace sharpi {

class ScratchLayout {
public:
    // The offset of a part of that many bytes.
    size_t take(size_t bytes) {
        const size_t at = _bytes;
        _bytes += Allocator::aligned(bytes);
        return at;
    }
    size_t floats(int64_t count) { return take(sizeof(float) * static_cast<size_t>(count)); }
    // Grows to the size of a layout with the same beginning. What follows that beginning overlaps, so the two must be
    // in use at different times.
    void cover(const ScratchLayout& other) { _bytes = _bytes > other._bytes ? _bytes : other._bytes; }
    size_t bytes() const { return _bytes; }

private:
    size_t _bytes = 0;
};

}  // namespace sharpi
