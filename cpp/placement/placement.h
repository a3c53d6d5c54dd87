// What each tensor is used for, for planning; and where it is, for people.
#pragma once

#include <string>
#include <vector>

#include "model/model_spec.h"
#include "placement/homes.h"

namespace sharpi {

// One use of a tensor.
struct TensorUse {
    int32_t tensor = -1;
    WeightRole role = WeightRole::Vector;
    int32_t layer = -1;
    uint64_t bytesPerToken = 0;  // what a token reads of it
    int64_t rows = 0, cols = 0;  // of the matrix, or of one of a stack
};
// In the order in which a token meets them. A prediction layer that is loaded has the number after the last layer's;
// its projection counts as attention, since a draft reads both in full.
std::vector<TensorUse> tensorUses(const ModelSpec& spec, const TensorTable& tensors);

// Makes homes agree for matrices that are used together: a layer's gate and up are Direct if one is,
// and gate's rows count; all experts of the model are in Slots if one of their stacks is not resident. Nothing else can
// be in Slots.
Homes normalized(const ModelSpec& spec, Homes homes);
// Whether experts are in Slots. homes: normalized, or empty.
bool expertsAway(const ModelSpec& spec, const Homes& homes);

// Bytes of the file by where they are read. All of a tensor is in its home.
struct Placement {
    struct Range {
        int32_t file = 0;
        uint64_t begin = 0, end = 0;
        Home home = Home::Vram;
    };
    uint64_t vram = 0, ram = 0;  // each byte is in one of these
    uint64_t direct = 0;         // of ram: brought to the device each time
    uint64_t slots = 0;          // of ram: experts of which single ones are in the device's memory
    uint64_t cpu = 0;            // of ram: what the CPU computes with: all on the CPU, else some of direct in steps
    // Tensors that a plan may leave in the file (on a GPU all but vectors), and those of them that are kept in the
    // device's memory.
    int32_t candidates = 0, kept = 0;
    uint64_t candidateBytes = 0, keptBytes = 0;
    std::vector<Range> ranges;  // in order, neighbours of one home joined
};
Placement placementOf(const ModelSpec& spec, const TensorTable& tensors, const Homes& homes);
// The same for a model that the CPU runs.
Placement placementOnCpu(const ModelSpec& spec, const TensorTable& tensors);

}  // namespace sharpi
