// Gated DeltaNet on the CPU; see cpu_operations.h.
#include <cmath>

#include "core/portable.h"
#include "cpu/operations/cpu_operations.h"

namespace sharpi {

namespace {

constexpr int64_t kChannelPiece = 512;  // of the convolution
constexpr int32_t kColumnPiece = 64;    // of a head's matrix

// Each piece of channels goes through a sequence's rows in order, from state to state.
void convolve(CpuWork& work, const DeltaCall& call, const RecurrentLayer& state) {
    const int64_t channels = call.channels(), pieces = (channels + kChannelPiece - 1) / kChannelPiece;
    work.pool.run(pieces * static_cast<int64_t>(work.sequences.size()), [&](int64_t i, int) {
        const SequenceRows& sequence = work.sequences[static_cast<size_t>(i / pieces)];
        const int64_t begin = i % pieces * kChannelPiece;
        for (const StateStep& step : sequence.steps) {
            cpu::ConvArgs args;
            args.x = work.at(RowBuffer::DeltaMixed) + (sequence.begin + step.begin) * channels;
            args.rows = step.end - step.begin;
            args.channels = channels;
            args.weight = call.conv;
            args.width = call.convWidth;
            args.from = step.from < 0 ? nullptr : state.convOf(step.from);
            args.to = state.convOf(step.to);
            work.kernels.convSilu(args, begin, std::min(begin + kChannelPiece, channels));
        }
    });
}

void splitSteps(CpuWork& work, const DeltaCall& call) {
    const int64_t heads = call.valueHeads, group = heads / call.keyHeads;
    const float* const steps = work.at(RowBuffer::DeltaSteps);
    float *const alphas = work.at(RowBuffer::DeltaAlpha), *const betas = work.at(RowBuffer::DeltaBeta);
    for (int64_t i = 0; i < work.rows() * heads; ++i) {
        const int64_t row = i / heads, head = i % heads;
        const float* const own = steps + 2 * row * heads + 2 * (head / group) * group + head % group;
        betas[i] = own[0];
        alphas[i] = own[group];
    }
}

// Queries and keys to length 1, queries then by 1 / sqrt(dim); alpha becomes the decay exp(decay * softplus(alpha +
// bias)), beta its sigmoid.
void prepareDelta(CpuWork& work, const DeltaCall& call) {
    const int64_t channels = call.channels();
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(call.headDim)));
    work.forRanges(work.rows(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            for (int32_t h = 0; h < 2 * call.keyHeads; ++h) {
                work.kernels.l2Norm(work.at(RowBuffer::DeltaMixed) + t * channels + int64_t{h} * call.headDim, call.eps,
                                    h < call.keyHeads ? scale : 1.0f, call.headDim);
            }
            for (int32_t h = 0; h < call.valueHeads; ++h) {
                float &alpha = work.at(RowBuffer::DeltaAlpha)[t * call.valueHeads + h],
                      &beta = work.at(RowBuffer::DeltaBeta)[t * call.valueHeads + h];
                alpha = portableExp(call.decay[h] * portableSoftplus(alpha + call.stepBias[h]));
                beta = portableSigmoid(beta);
            }
        }
    });
}

void updateStates(CpuWork& work, const DeltaCall& call, const RecurrentLayer& state) {
    const int64_t channels = call.channels(), keyWidth = int64_t{call.keyHeads} * call.headDim,
                  width = int64_t{call.valueHeads} * call.headDim;
    const int64_t pieces = (call.headDim + kColumnPiece - 1) / kColumnPiece, perSequence = call.valueHeads * pieces;
    work.pool.run(perSequence * static_cast<int64_t>(work.sequences.size()), [&](int64_t i, int worker) {
        const SequenceRows& sequence = work.sequences[static_cast<size_t>(i / perSequence)];
        const auto head = static_cast<int32_t>(i % perSequence / pieces);
        const auto begin = static_cast<int32_t>(i % pieces) * kColumnPiece;
        const int64_t matrix = int64_t{head} * call.headDim * call.headDim;
        for (const StateStep& step : sequence.steps) {
            const int64_t row = sequence.begin + step.begin;
            const float* mixed = work.at(RowBuffer::DeltaMixed) + row * channels;
            cpu::DeltaArgs args;
            args.q = mixed + int64_t{call.keyHeadOf(head)} * call.headDim;
            args.k = args.q + keyWidth;
            args.v = mixed + 2 * keyWidth + int64_t{head} * call.headDim;
            args.rowStride = channels;
            args.decay = work.at(RowBuffer::DeltaAlpha) + row * call.valueHeads + head;
            args.step = work.at(RowBuffer::DeltaBeta) + row * call.valueHeads + head;
            args.stepStride = call.valueHeads;
            args.out = work.floats(work.scratch().attended) + row * width + int64_t{head} * call.headDim;
            args.outStride = width;
            args.rows = step.end - step.begin;
            args.dim = call.headDim;
            args.from = step.from < 0 ? nullptr : state.matrixOf(step.from) + matrix;
            args.to = state.matrixOf(step.to) + matrix;
            work.kernels.deltaRule(args, begin, std::min(begin + kColumnPiece, call.headDim),
                                   work.threadScratch(worker));
        }
    });
}

}  // namespace

void CpuOperations::deltaRule(const DeltaCall& call, const RecurrentLayer& state, const Weight&) {
    float *const attended = _work.floats(_work.scratch().attended), *const gate = _work.at(RowBuffer::DeltaGate);
    convolve(_work, call, state);
    if (call.fusedSteps) splitSteps(_work, call);
    prepareDelta(_work, call);
    updateStates(_work, call, state);
    _work.norm(attended, call.headNorm, call.eps, _work.rows() * call.valueHeads, call.headDim, attended);
    _work.gatedActivation({}, gate, attended, _work.rows() * call.valueWidth());
    _attended = gate;
}

}  // namespace sharpi
