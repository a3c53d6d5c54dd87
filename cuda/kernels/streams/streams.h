// Hyper-connections on the GPU, with the bits of the CPU (core/rules/streams.h).
#pragma once

#include "core/rules/streams.h"
#include "kernels/rows/rows.h"

namespace sharpi::cuda {

// What StreamMixSpec says, and the sizes of rows: `count` streams of `width` floats, width a multiple of 4.
struct StreamRule {
    int32_t count = 0, iterations = 0;
    float epsilon = 0;
    const float *base = nullptr, *scale = nullptr;
    int64_t width = 0;
};

// Each of a row's streams = x. streams: [rows, count * width].
void beginStreams(Stream& stream, const StreamRule& rule, const float* x, int64_t rows, float* streams);
// mix: [rows, count * (2 + count)], the products of StreamMixSpec::fn. x = the part's input. mix then holds what
// leaveStreams() needs.
void enterStreams(Stream& stream, const StreamRule& rule, const float* streams, float* mix, int64_t rows, float* x);
// Mixes the streams and adds the part to each.
void leaveStreams(Stream& stream, const StreamRule& rule, const float* mix, const float* part, int64_t rows,
                  float* streams);
// mix: [rows, count], the products of the model's end. x = the weighted sum of the streams.
void endStreams(Stream& stream, const StreamRule& rule, const float* streams, const float* mix, int64_t rows, float* x);

}  // namespace sharpi::cuda
