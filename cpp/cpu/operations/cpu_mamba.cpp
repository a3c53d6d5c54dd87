// Mamba 2 on the CPU; see cpu_operations.h. core/rules/mamba.h has the order of operations.
#include "core/rules/mamba.h"
#include "cpu/operations/cpu_operations.h"
#include "cpu/operations/cpu_recurrence.h"

namespace sharpi {

namespace {

// Each head's dt becomes its step, and `decays` its decay.
void prepareSteps(CpuWork& work, const MambaCall& call, float* decays) {
    float* const steps = work.at(RowBuffer::MambaSteps);
    work.forRanges(work.rows() * call.heads, 64, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t head = i % call.heads;
            steps[i] = mambaStep(steps[i], call.stepBias[head]);
            decays[i] = mambaDecay(steps[i], call.rate[head]);
        }
    });
}

void scan(CpuWork& work, const MambaCall& call, const RecurrentLayer& state, const float* decays, float* out) {
    const int64_t width = call.width(), channels = call.channels(), perGroup = call.heads / call.groups;
    forHeads(work, {call.heads, call.stateDim, call.headDim}, state, [&](const HeadPart& part, void* scratch) {
        const float* const mixed = work.at(RowBuffer::MambaMixed) + part.firstRow * channels;
        const int64_t ofHead = part.firstRow * call.heads + part.head, column = int64_t{part.head} * call.headDim;
        cpu::ScanArgs args;
        args.x = mixed + column;
        args.b = mixed + width + part.head / perGroup * call.stateDim;
        args.c = args.b + int64_t{call.groups} * call.stateDim;
        args.rowStride = channels;
        args.decay = decays + ofHead;
        args.step = work.at(RowBuffer::MambaSteps) + ofHead;
        args.stepStride = call.heads;
        args.skip = call.skip[part.head];
        args.out = out + part.firstRow * width + column;
        args.outStride = width;
        args.rows = part.rows;
        args.stateDim = call.stateDim;
        args.headDim = call.headDim;
        args.from = part.from;
        args.to = part.to;
        work.kernels.scan(args, part.begin, part.end, scratch);
    });
}

// Each group of heads is normalized by its own part of the weights.
void normGroups(CpuWork& work, const MambaCall& call, float* x) {
    const int64_t size = call.width() / call.groups;
    work.forRanges(work.rows() * call.groups, std::max<int64_t>(1, CpuWork::kElementGrain / size),
                   [&](int64_t begin, int64_t end) {
                       for (int64_t i = begin; i < end; ++i) {
                           float* const group = x + i * size;
                           work.kernels.rmsNorm(group, call.norm + i % call.groups * size, call.eps, size, group);
                       }
                   });
}

}  // namespace

void CpuOperations::mamba(const MambaCall& call, const RecurrentLayer& state, const Weight&) {
    float *const scanned = _work.floats(_work.scratch().attended), *const gate = _work.at(RowBuffer::MambaGate),
                 *const decays = _work.at(RowBuffer::MambaDecays);
    convolve(_work, {RowBuffer::MambaMixed, call.channels(), call.convWidth, call.conv, call.convBias}, state);
    prepareSteps(_work, call, decays);
    scan(_work, call, state, decays, scanned);
    _work.gatedActivation({}, gate, scanned, _work.rows() * call.width());
    if (call.norm) normGroups(_work, call, gate);
    _attended = gate;
}

}  // namespace sharpi
