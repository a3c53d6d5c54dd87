// Rows of activations in memory that a device and the host share in the middle of a step: how they lie there, and the
// numbers that both sides agree on. The device's side is kernels/rows/crossing.h, the host's cpu/share/host_share.h.
#pragma once

#include <cstdint>

namespace sharpi {

// A counter with this value lets every kernel that waits for it go on, with whatever data it finds.
constexpr uint32_t kCrossingAborted = 0xffffffffu;

// Rows as the CPU's products read them (cpu/kernels.h, QuantizedRows), in pinned memory. Either form may be absent. q
// is 16-byte aligned, as the device's is. Row t lies at q + t * qStride, scale + t * (qStride / 32) and
// sums + t * (qStride / 16), or at floats + t * cols. Kernels do not write past the columns, where the CPU needs zeros.
struct HostRows {
    float* floats = nullptr;
    int8_t* q = nullptr;
    float* scale = nullptr;
    int16_t* sums = nullptr;  // two for each block of 32: of its first and of its last 16 elements
    int64_t qStride = 0;      // a multiple of 256
    int64_t cols = 0;         // of a whole row; a multiple of 32 if there is a quantized form
};

}  // namespace sharpi
