// Instructions that decide which lanes execute what, and when.
#include <thread>

#include "execution/block.h"
#include "execution/lanes.h"
#include "execution/operations.h"
#include "ptx/draft.h"

namespace sharpi::emulator {

void branchHandler(Warp& warp, const Instruction& in) {
    const uint32_t chosen = lanesOf(warp.at<uint32_t>(in.guard));
    const uint32_t taken = warp.active & (in.negated ? ~chosen : chosen);
    if (!taken) return;
    if (taken == warp.active) {
        warp.pc = in.immediate;
        return;
    }
    const uint32_t others = warp.active & ~taken;
    // All meet again at the join and go on there as they would have gone together.
    if (in.join >= 0) warp.waiting.push_back({in.join, warp.active, warp.join});
    warp.waiting.push_back({static_cast<int>(warp.pc), others, in.join >= 0 ? in.join : warp.join});
    if (in.join >= 0) warp.join = in.join;
    warp.active = taken;
    warp.pc = in.immediate;
}

void jumpHandler(Warp& warp, const Instruction& in) { warp.pc = in.immediate; }

void exitHandler(Warp& warp, const Instruction&) {
    warp.exited |= warp.exec;
    warp.active &= ~warp.exec;
    warp.resume();
}

void joinHandler(Warp& warp, const Instruction& in) {
    if (warp.join != in.index) return;
    warp.active = 0;
    warp.resume();
}

void barrierHandler(Warp& warp, const Instruction& in) {
    warp.barrierInstruction = &in;
    const auto uniform = [&](Operand operand, const char* what) {
        const auto* values = warp.at<const uint32_t>(operand);
        const int first = __builtin_ctz(warp.exec);
        forLanes(warp.exec, [&](int l) {
            if (values[l] != values[first]) fault(warp, in, warp.exec, what);
        });
        return static_cast<int>(values[first]);
    };
    const int number = uniform(in.o[1], "lanes that come to different barriers");
    const int threads = in.o[3] == kNone ? 0 : uniform(in.o[3], "lanes that come to a barrier with different numbers");
    warp.block->arrive(warp, number, threads);
}

void pauseHandler(Warp& warp, const Instruction&) {
    warp.paused = true;
    std::this_thread::yield();
}

void nothingHandler(Warp&, const Instruction&) {}

void trapHandler(Warp& warp, const Instruction& in) { fault(warp, in, warp.exec, "a trap"); }

}  // namespace sharpi::emulator
