// Where a plan wants each tensor's bytes to be.
#pragma once

#include <cstdint>
#include <vector>

namespace sharpi {

enum class Home {
    Vram,    // resident in the device's memory
    Direct,  // in the mapped file; brought across the bus each time it is used
    Slots,   // experts: in the mapped file, with a cache of single ones in the device's memory (experts/expert_slots.h)
    Ram,     // in the mapped file of a model that the CPU runs. No plan says so, and no tensor of a model on a GPU has
             // this home
};

inline const char* homeName(Home home) {
    return home == Home::Vram ? "vram" : home == Home::Direct ? "direct" : home == Home::Slots ? "slots" : "ram";
}

struct TensorHome {
    Home home = Home::Vram;
    // For a feed-forward matrix or output head that is Direct: how many of its last rows (a multiple of 32) the CPU
    // computes in steps. Gate and up of a layer have the same number. In other batches all rows are brought to the
    // device.
    int64_t cpuRows = 0;
};

// By tensor, in the order of the file's table; empty: everything is resident. The stacks of experts of all layers are
// resident together or in Slots together: all are in Slots if one is not resident.
using Homes = std::vector<TensorHome>;

}  // namespace sharpi
