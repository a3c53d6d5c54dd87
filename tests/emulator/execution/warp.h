// A warp: 32 threads that execute an instruction at once, as far as their ways agree.
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "ptx/program.h"

namespace sharpi::emulator {

class Block;

// Lanes that wait: those that took the other way of a branch, and all that came to it, for the place where they meet.
struct Waiting {
    int at;
    uint32_t lanes;
    int join;  // where the way of these lanes ends
};

// Copies to shared memory that a thread has started (cp.async), of one instruction.
struct Copies {
    uint32_t lanes;
    int bytes;
    std::array<uint8_t*, kLanes> to;
    std::array<const uint8_t*, kLanes> from;
    std::array<uint32_t, kLanes> used;  // bytes that are copied; the rest becomes zero
    int group;
};

// The test of an mbarrier that ended a warp's turn.
struct FailedTest {
    const Instruction* instruction = nullptr;
    int lane = 0;
    size_t at = 0;  // in shared memory
};

class Warp {
public:
    enum class State { Ready, AtBarrier, Done };

    void start(Block& block, int number, uint32_t lanes);
    // Until a barrier, the end, a pause, a failed test of an mbarrier or `budget` instructions.
    void run(int64_t budget);

    template <typename T> T* at(Operand operand) const {
        return reinterpret_cast<T*>(bases[operand & 1] + (operand & ~1));
    }

    Block* block = nullptr;
    const Instruction* code = nullptr;
    uint8_t* bases[2] = {nullptr, nullptr};  // registers, constants
    int number = 0;
    State state = State::Ready;
    bool paused = false;  // waits for something that another block or the host does
    int64_t pc = 0;
    uint32_t lanes = 0;  // that it began with
    uint32_t exited = 0;
    uint32_t active = 0;  // on the way that it is on
    uint32_t exec = 0;    // that execute the instruction
    int join = -1;
    std::vector<Waiting> waiting;
    uint8_t* local = nullptr;
    std::vector<Copies> copies;
    int copyGroups = 0;  // that were closed

    // At an mbarrier, in this turn.
    FailedTest failedTest;
    bool arrived = false;  // or completed copies

    // At a barrier.
    int barrier = 0;
    const Instruction* barrierInstruction = nullptr;

    // The lanes on this way are done with it: goes on with others.
    void resume();
    void finishCopies(int pending);
    // All that these lanes have started.
    void finishCopiesOf(uint32_t those);

private:
    static void finish(const Copies& copy, uint32_t those);
    std::vector<uint8_t> _registers, _localMemory;
};

// The lanes in which a predicate is true.
uint32_t lanesOf(const uint32_t* predicate);

[[noreturn]] void fault(const Warp& warp, const Instruction& in, uint32_t lanes, const std::string& what);

}  // namespace sharpi::emulator
