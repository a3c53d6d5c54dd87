// See cpu_recurrence.h.
#include "cpu/operations/cpu_recurrence.h"

namespace sharpi {

namespace {

constexpr int64_t kChannelPiece = 512;

}  // namespace

// Each piece of channels goes through a sequence's rows in order.
void convolve(CpuWork& work, const ConvCall& call, const RecurrentLayer& state) {
    const int64_t channels = call.channels, pieces = (channels + kChannelPiece - 1) / kChannelPiece;
    work.pool.run(pieces * static_cast<int64_t>(work.sequences.size()), [&](int64_t i, int) {
        const SequenceRows& sequence = work.sequences[static_cast<size_t>(i / pieces)];
        const int64_t begin = i % pieces * kChannelPiece;
        for (const StateStep& step : sequence.steps) {
            cpu::ConvArgs args;
            args.x = work.at(call.rows) + (sequence.begin + step.begin) * channels;
            args.rows = step.end - step.begin;
            args.channels = channels;
            args.weight = call.weight;
            args.bias = call.bias;
            args.width = call.width;
            args.from = step.from < 0 ? nullptr : state.convOf(step.from);
            args.to = state.convOf(step.to);
            work.kernels.convSilu(args, begin, std::min(begin + kChannelPiece, channels));
        }
    });
}

}  // namespace sharpi
