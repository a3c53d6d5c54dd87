// A point in a stream's work that a thread can wait for asleep: waiting for a whole stream keeps a core busy, which
// matters where the CPU computes at the same time. No CUDA header.
#pragma once

#include "device/stream.h"

struct CUevent_st;

namespace sharpi::cuda {

// Every call throws Error(Internal) with CUDA's message when the device refuses.
class Marker {
public:
    Marker();
    ~Marker();
    Marker(const Marker&) = delete;
    Marker& operator=(const Marker&) = delete;

    // After all that was given to the stream so far. May be set again.
    void set(Stream& stream);
    // Sleeps until the work before it is done; at once if it was never set.
    void wait();

private:
    CUevent_st* _event = nullptr;
};

}  // namespace sharpi::cuda
