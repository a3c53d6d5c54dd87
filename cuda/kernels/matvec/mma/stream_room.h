// How a launch divides the shared memory of its tiles (stream_tile.cuh).
#pragma once

#include <cstdint>

namespace sharpi::cuda {

struct StreamRoom {
    int32_t stages = 0;  // of columns; as many as steps if all fit
    int32_t slots = 0;   // of weights
};

}  // namespace sharpi::cuda
