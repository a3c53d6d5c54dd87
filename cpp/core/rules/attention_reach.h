// Which keys a query sees, besides that none comes after it.
#pragma once

#include <cstdint>

#include "core/portable.h"

namespace sharpi {

// At most one of the two is set. Token i sees token j <= i if i - j < window, or if i / chunk = j / chunk.
struct AttentionReach {
    int32_t window = 0;  // 0: no window
    int32_t chunk = 0;   // 0: no chunks

    bool limited() const { return window > 0 || chunk > 0; }
    // The first position that a query at `position` sees.
    SHARPI_PORTABLE int32_t first(int32_t position) const {
        if (window > 0) return position >= window ? position - window + 1 : 0;
        return chunk > 0 ? position / chunk * chunk : 0;
    }
    bool operator==(const AttentionReach& other) const { return window == other.window && chunk == other.chunk; }
    bool operator!=(const AttentionReach& other) const { return !(*this == other); }
};

}  // namespace sharpi
