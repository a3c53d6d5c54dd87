// Copies of experts into slots that run while the device computes.
#pragma once

#include <array>
#include <cstdint>

#include "memory/stream/transfers.h"

namespace sharpi {

class ExpertLoads {
public:
    virtual ~ExpertLoads() = default;
    // How many loads may be on their way at once; at least 1.
    virtual int depth() const = 0;
    // Starts to copy the three matrices from the file to their room on the device. Returns the load's number; numbers
    // rise by one, and the first is 1. May throw: nothing runs then, but the room may have been overwritten.
    virtual uint64_t start(const std::array<StreamPart, 3>& parts) = 0;
    // The number up to which all loads have arrived. Does not wait. Throws if the device has failed.
    virtual uint64_t finished() = 0;
    // Waits for all loads.
    virtual void settle() = 0;
};

}  // namespace sharpi
