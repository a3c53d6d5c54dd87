// A point in a stream's work that a thread can wait for while it sleeps. Waiting for a whole stream keeps a core busy,
// which costs time if the CPU computes meanwhile. No CUDA header.
#pragma once

#include "device/stream.h"

struct CUevent_st;

namespace sharpi::cuda {

// Every call throws Error(Internal) with CUDA's message if the device refuses.
class Marker {
public:
    Marker();
    ~Marker();
    Marker(const Marker&) = delete;
    Marker& operator=(const Marker&) = delete;

    // Sets the marker after everything that was given to the stream so far. May be called again.
    void set(Stream& stream);
    // Sleeps until the work before the marker is done. Returns at once if it was never set.
    void wait();

private:
    CUevent_st* _event = nullptr;
};

}  // namespace sharpi::cuda
