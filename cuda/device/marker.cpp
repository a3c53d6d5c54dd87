// See marker.h.
#include "device/marker.h"

#include "device/launch.cuh"

namespace sharpi::cuda {

Marker::Marker() {
    check(cudaEventCreateWithFlags(&_event, cudaEventBlockingSync | cudaEventDisableTiming), "making a marker");
}

Marker::~Marker() { cudaEventDestroy(_event); }

void Marker::set(Stream& stream) { check(cudaEventRecord(_event, stream.handle()), "marking a point in a stream"); }

void Marker::wait() { check(cudaEventSynchronize(_event), "waiting for the device"); }

}  // namespace sharpi::cuda
