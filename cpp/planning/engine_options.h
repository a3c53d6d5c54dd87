// How a model runs: what an Engine is built with, and what its memory is planned with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "experts/expert_use.h"
#include "operations/device_kind.h"
#include "placement/homes.h"

namespace sharpi {

struct EngineOptions {
    explicit EngineOptions(const DeviceKind& kind) { device.kind = &kind; }

    int64_t mostCached() const { return std::max(context, cacheTokens); }

    int64_t context = 0;      // the most tokens of a sequence
    int64_t cacheTokens = 0;  // tokens that the KV cache has room for, of all sequences; fewer mean `context`
    int64_t batch = 512;      // rows that prefill takes at once, of any number of sequences
    int threads = 1;
    KvType kvType = KvType::BF16;
    PromptMode prompt = PromptMode::Fast;  // on the GPU; the CPU has one arithmetic
    // For a model with recurrent layers, the number of states, and for one whose layers do not see everything, how many
    // times it keeps what these see. Each sequence that holds tokens needs one; the others keep what sequences had
    // earlier, to roll back to.
    int32_t sequences = 4;
    Device device;
    size_t vram = 0;             // the most to take of the GPU's memory, in bytes; 0: all that is free
    Homes homes;                 // on the GPU: each tensor's home, which is on `device`; none: all are resident
    size_t expertSlotBytes = 0;  // of the device's memory, for slots of experts in Slots
    // On the GPU, of RAM: for slots of experts that VRAM does not hold, if RAM cannot hold all of them. The others are
    // read from the disk. 0: experts are used where the file is mapped.
    size_t expertRamBytes = 0;
    ExpertUse expertUse;
    // Loads even if the plan counts more memory than there is: it is the plan that needs least, and records of steps,
    // which are counted, can be done without.
    bool tight = false;
};

}  // namespace sharpi
