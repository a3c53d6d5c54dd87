// Rows of activations on their way between the GPU and the CPU in the middle of a step: through pinned host memory that
// both read and write, with a counter for each direction instead of a wait for the whole device. So a step can be
// captured and replayed while a CPU takes part in it.
//
// Each direction's counter starts a step at 0 and rises: a kernel that sends sets `sent` to its ticket when its data is
// there; a kernel that receives waits until `returned` has reached its ticket. The CPU does the reverse
// (engine/host_share.h). A `returned` of kCrossingAborted lets every waiting kernel go on, with whatever it finds.
#pragma once

#include <cstdint>

#include "kernels/rows/rows.h"

namespace sharpi::cuda {

constexpr uint32_t kCrossingAborted = 0xffffffffu;

// Rows as the CPU's products read them (cpu/kernels.h, QuantizedRows), in pinned memory; either form may be absent. q
// is 16-byte aligned, as is the device's. What is past the columns (the CPU wants zeros there) is written by neither
// side's kernels. Row t: q + t * qStride, scale + t * (qStride / 32), sums + t * (qStride / 16); floats + t * cols.
struct HostRows {
    float* floats = nullptr;
    int8_t* q = nullptr;
    float* scale = nullptr;
    int16_t* sums = nullptr;  // two of each block of 32: of its first and of its last 16 elements
    int64_t qStride = 0;      // a multiple of 256
    int64_t cols = 0;         // of a whole row; a multiple of 32 where there is a quantized form
};

// Copies columns [begin, end) of `rows` rows (both multiples of 32, or end = to.cols) in the forms that both sides
// have, then sets *sent = ticket for the CPU to see. from.half is ignored; from's rows have to.cols columns.
void sendRows(Stream& stream, const RowOutputs& from, int64_t rows, int64_t begin, int64_t end, const HostRows& to,
              uint32_t* sent, uint32_t ticket);

// Waits until *returned >= ticket, then copies the same way from the CPU. to's rows have from.cols columns.
void receiveRows(Stream& stream, const HostRows& from, int64_t rows, int64_t begin, int64_t end,
                 const uint32_t* returned, uint32_t ticket, const RowOutputs& to);

// Waits until *returned >= ticket, then x[t, begin + i] += from[t * count + i] for i < count; x: [rows, cols].
void receiveAdd(Stream& stream, const float* from, int64_t rows, int64_t begin, int64_t count, const uint32_t* returned,
                uint32_t ticket, float* x, int64_t cols);

}  // namespace sharpi::cuda
