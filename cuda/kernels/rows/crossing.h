// Moves rows of activations between the GPU and the CPU in the middle of a step, through pinned host memory that both
// read and write. Each direction has a counter, so that nothing waits for the whole device. That way a step in which
// the CPU takes part can be captured and replayed.
//
// Each counter is 0 when a step starts, and rises. A kernel that sends sets `sent` to its ticket when its data is
// complete. A kernel that receives waits until `returned` has reached its ticket. The CPU does the reverse
// (cpu/share/host_share.h). If `returned` becomes kCrossingAborted, every waiting kernel goes on with whatever data it
// finds.
#pragma once

#include <cstdint>

#include "core/host_rows.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// Copies columns [begin, end) of `rows` rows in the forms that both sides have, then sets *sent = ticket for the CPU.
// begin and end are multiples of 32, but end may also be to.cols. from.half is ignored. from's rows have to.cols
// columns.
void sendRows(Stream& stream, const RowOutputs& from, int64_t rows, int64_t begin, int64_t end, const HostRows& to,
              uint32_t* sent, uint32_t ticket);

// Waits until *returned >= ticket, then copies from the CPU in the same way. to's rows have from.cols columns.
void receiveRows(Stream& stream, const HostRows& from, int64_t rows, int64_t begin, int64_t end,
                 const uint32_t* returned, uint32_t ticket, const RowOutputs& to);

// Waits until *returned >= ticket, then x[t, begin + i] += from[t * count + i] + bias[begin + i] for i < count; x:
// [rows, cols]. bias: [cols], or null. adds: else x is overwritten.
void receiveProduct(Stream& stream, const float* from, int64_t rows, int64_t begin, int64_t count,
                    const uint32_t* returned, uint32_t ticket, float* x, int64_t cols, const float* bias = nullptr,
                    bool adds = true);

}  // namespace sharpi::cuda
