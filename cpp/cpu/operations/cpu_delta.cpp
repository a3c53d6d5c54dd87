// Gated DeltaNet on the CPU; see cpu_operations.h.
#include <cmath>

#include "core/portable.h"
#include "cpu/operations/cpu_operations.h"
#include "cpu/operations/cpu_recurrence.h"

namespace sharpi {

namespace {

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
    const int64_t channels = call.channels(), width = call.valueWidth(), heads = call.valueHeads;
    forHeads(work, {call.valueHeads, call.headDim, call.headDim}, state, [&](const HeadPart& part, void* scratch) {
        const float* const mixed = work.at(RowBuffer::DeltaMixed) + part.firstRow * channels;
        const int64_t ofHead = part.firstRow * heads + part.head, column = int64_t{part.head} * call.headDim;
        cpu::DeltaArgs args;
        args.q = mixed + int64_t{call.keyHeadOf(part.head)} * call.headDim;
        args.k = args.q + call.keyWidth();
        args.v = mixed + 2 * call.keyWidth() + column;
        args.rowStride = channels;
        args.decay = work.at(RowBuffer::DeltaAlpha) + ofHead;
        args.step = work.at(RowBuffer::DeltaBeta) + ofHead;
        args.stepStride = heads;
        args.out = work.floats(work.scratch().attended) + part.firstRow * width + column;
        args.outStride = width;
        args.rows = part.rows;
        args.dim = call.headDim;
        args.from = part.from;
        args.to = part.to;
        work.kernels.deltaRule(args, part.begin, part.end, scratch);
    });
}

}  // namespace

void CpuOperations::deltaRule(const DeltaCall& call, const RecurrentLayer& state, const Weight&) {
    float *const attended = _work.floats(_work.scratch().attended), *const gate = _work.at(RowBuffer::DeltaGate);
    convolve(_work, {RowBuffer::DeltaMixed, call.channels(), call.convWidth, call.conv}, state);
    if (call.fusedSteps) splitSteps(_work, call);
    prepareDelta(_work, call);
    updateStates(_work, call, state);
    _work.norm(attended, call.headNorm, call.eps, _work.rows() * call.valueHeads, call.headDim, attended);
    _work.gatedActivation({}, gate, attended, _work.rows() * call.valueWidth());
    _attended = gate;
}

}  // namespace sharpi
