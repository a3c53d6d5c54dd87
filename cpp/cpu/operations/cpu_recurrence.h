// What the CPU's recurrent layers share: how a sequence's rows go through a convolution and through the matrices of
// heads, from state to state.
#pragma once

#include "cpu/cpu_work.h"

namespace sharpi {

// A convolution and its SiLU, in place.
struct ConvCall {
    RowBuffer rows;
    int64_t channels = 0;
    int32_t width = 0;
    const float* weight = nullptr;  // [width, channels]
    const float* bias = nullptr;    // [channels] or nullptr
};

void convolve(CpuWork& work, const ConvCall& call, const RecurrentLayer& state);

// The matrices of a layer's state, one behind the other.
struct HeadMatrices {
    int32_t heads = 0, rows = 0, cols = 0;
};

// Columns [begin, end) of a head's matrix, through `rows` rows of the batch from `firstRow` on.
struct HeadPart {
    int32_t head = 0, begin = 0, end = 0;
    int64_t firstRow = 0, rows = 0;
    const float* from = nullptr;  // the head's matrix before these rows; nullptr: zeros
    float* to = nullptr;          // and after them
};

// Calls body(part, scratch) for all columns of all heads and for all rows. Parts are shared among the threads; those of
// the same columns come in the order of the sequence's rows.
template <typename Body>
void forHeads(CpuWork& work, const HeadMatrices& matrices, const RecurrentLayer& state, const Body& body) {
    constexpr int32_t kColumnPiece = 64;
    const int64_t pieces = (matrices.cols + kColumnPiece - 1) / kColumnPiece, perSequence = matrices.heads * pieces;
    work.pool.run(perSequence * static_cast<int64_t>(work.sequences.size()), [&](int64_t i, int worker) {
        const SequenceRows& sequence = work.sequences[static_cast<size_t>(i / perSequence)];
        HeadPart part;
        part.head = static_cast<int32_t>(i % perSequence / pieces);
        part.begin = static_cast<int32_t>(i % pieces) * kColumnPiece;
        part.end = std::min(part.begin + kColumnPiece, matrices.cols);
        const int64_t matrix = int64_t{part.head} * matrices.rows * matrices.cols;
        for (const StateStep& step : sequence.steps) {
            part.firstRow = sequence.begin + step.begin;
            part.rows = step.end - step.begin;
            part.from = step.from < 0 ? nullptr : state.matrixOf(step.from) + matrix;
            part.to = state.matrixOf(step.to) + matrix;
            body(part, work.threadScratch(worker));
        }
    });
}

}  // namespace sharpi
