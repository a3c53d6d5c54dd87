// What the CPU's gated and recurrent blocks are made of, shared among threads: the queries' gates, the operations of
// Gated DeltaNet, the shared expert.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/portable.h"
#include "cpu/cpu_backend.h"

namespace sharpi {

namespace {

constexpr int64_t kChannelPiece = 512;  // of the convolution
constexpr int32_t kColumnPiece = 64;    // of a head's matrix

}  // namespace

void CpuBackend::splitGatedQueries(const AttentionWeights& w, int32_t headDim) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(headDim);
    forRanges(rows() * w.heads, std::max<int64_t>(1, kElementGrain / headDim), [&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) {
            std::memcpy(_q + head * headDim, _gatedQueries + 2 * head * headDim, bytes);
            std::memcpy(_queryGate + head * headDim, _gatedQueries + (2 * head + 1) * headDim, bytes);
        }
    });
}

// Each piece of channels goes through a sequence's rows in order, from state to state.
void CpuBackend::convolve(const GatedDeltaWeights& w, const RecurrentLayer& state) {
    const int64_t channels = w.qkv.rows, pieces = (channels + kChannelPiece - 1) / kChannelPiece;
    _pool.run(pieces * static_cast<int64_t>(_sequences.size()), [&](int64_t i, int) {
        const SequenceRows& sequence = _sequences[static_cast<size_t>(i / pieces)];
        const int64_t begin = i % pieces * kChannelPiece;
        for (const StateStep& step : sequence.steps) {
            cpu::ConvArgs args;
            args.x = _deltaMixed + (sequence.begin + step.begin) * channels;
            args.rows = step.end - step.begin;
            args.channels = channels;
            args.weight = w.conv;
            args.width = w.convWidth;
            args.from = step.from < 0 ? nullptr : state.convOf(step.from);
            args.to = state.convOf(step.to);
            _kernels.convSilu(args, begin, std::min(begin + kChannelPiece, channels));
        }
    });
}

// Queries and keys to length 1, queries then by 1 / sqrt(dim); alpha becomes the decay exp(decay * softplus(alpha +
// bias)), beta its sigmoid.
void CpuBackend::prepareDelta(const GatedDeltaWeights& w, float eps) {
    const int64_t channels = w.qkv.rows;
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(w.headDim)));
    forRanges(rows(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            for (int32_t h = 0; h < 2 * w.keyHeads; ++h) {
                _kernels.l2Norm(_deltaMixed + t * channels + int64_t{h} * w.headDim, eps, h < w.keyHeads ? scale : 1.0f,
                                w.headDim);
            }
            for (int32_t h = 0; h < w.valueHeads; ++h) {
                float &alpha = _deltaAlpha[t * w.valueHeads + h], &beta = _deltaBeta[t * w.valueHeads + h];
                alpha = portableExp(w.decay[h] * portableSoftplus(alpha + w.stepBias[h]));
                beta = portableSigmoid(beta);
            }
        }
    });
}

void CpuBackend::deltaRule(const GatedDeltaWeights& w, const RecurrentLayer& state) {
    const int64_t channels = w.qkv.rows, keyWidth = int64_t{w.keyHeads} * w.headDim,
                  width = int64_t{w.valueHeads} * w.headDim;
    const int64_t pieces = (w.headDim + kColumnPiece - 1) / kColumnPiece, perSequence = w.valueHeads * pieces;
    _pool.run(perSequence * static_cast<int64_t>(_sequences.size()), [&](int64_t i, int worker) {
        const SequenceRows& sequence = _sequences[static_cast<size_t>(i / perSequence)];
        const auto head = static_cast<int32_t>(i % perSequence / pieces);
        const auto begin = static_cast<int32_t>(i % pieces) * kColumnPiece;
        const int64_t matrix = int64_t{head} * w.headDim * w.headDim;
        for (const StateStep& step : sequence.steps) {
            const int64_t row = sequence.begin + step.begin;
            const float* mixed = _deltaMixed + row * channels;
            cpu::DeltaArgs args;
            args.q = mixed + int64_t{head % w.keyHeads} * w.headDim;
            args.k = args.q + keyWidth;
            args.v = mixed + 2 * keyWidth + int64_t{head} * w.headDim;
            args.rowStride = channels;
            args.decay = _deltaAlpha + row * w.valueHeads + head;
            args.step = _deltaBeta + row * w.valueHeads + head;
            args.stepStride = w.valueHeads;
            args.out = _attended + row * width + int64_t{head} * w.headDim;
            args.outStride = width;
            args.rows = step.end - step.begin;
            args.dim = w.headDim;
            args.from = step.from < 0 ? nullptr : state.matrixOf(step.from) + matrix;
            args.to = state.matrixOf(step.to) + matrix;
            _kernels.deltaRule(args, begin, std::min(begin + kColumnPiece, w.headDim),
                               _threadScratch + worker * _threadScratchStride);
        }
    });
}

void CpuBackend::sigmoidMul(float* x, const float* gate, int64_t n) {
    forRanges(n, kElementGrain,
              [&](int64_t begin, int64_t end) { _kernels.sigmoidMul(x + begin, gate + begin, end - begin); });
}

// To what the chosen experts gave: += sigmoid(scale . n) * down(silu(gate n) * up n), one fma an element.
void CpuBackend::addSharedExpert(const SharedExpertWeights& w) {
    const int64_t width = _limits.embedding;
    Weight scale;
    scale.rows = 1;
    scale.cols = width;
    scale.data = reinterpret_cast<const uint8_t*>(w.scale);
    linear(_normed, rows(), {{w.gate, nullptr, _gate}, {w.up, nullptr, _up}, {scale, nullptr, _sharedScale}});
    siluMul(_gate, _up, rows() * w.gate.rows);
    linear(_gate, rows(), {{w.down, nullptr, _normed}});
    forRanges(rows(), std::max<int64_t>(1, kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            _kernels.addScaled(_block + t * width, _normed + t * width, portableSigmoid(_sharedScale[t]), width);
        }
    });
}

}  // namespace sharpi
