// A kernel between its text and its code: operands are numbers of registers, of which there is no end.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ptx/program.h"

namespace sharpi::emulator {

struct Register {
    int bytes = 4;      // 4 or 8: what a lane takes in the register file
    int typeBytes = 4;  // as declared; 0: a predicate
};

// In a draft, the operand of register r is 2 r. Those of constants are as in Instruction.
inline Operand draftOperand(int reg) { return 2 * reg; }

struct Draft {
    std::unique_ptr<Kernel> kernel = std::make_unique<Kernel>();
    std::vector<Register> registers;
    struct Uses {
        std::vector<int> results, sources;
    };
    std::vector<Uses> uses;  // of each instruction
    std::vector<bool> used;  // special registers
};

// A run of instructions that only its last one leaves.
struct BasicBlock {
    int begin = 0, end = 0;
    std::vector<int> next, previous;
};

// Branches have the numbers of instructions as their targets, and every instruction before a target or after a branch
// ends a block.
std::vector<BasicBlock> basicBlocks(const Kernel& kernel);
// For each block the one that all its ways to the end go through first after it, or -1.
std::vector<int> postDominators(const std::vector<BasicBlock>& blocks);
// Gives branches the place where their lanes meet again, and puts an instruction there that waits for the others.
void addJoins(Draft& draft, Handler join);
// Registers that are never alive at the same time share a place.
void placeRegisters(Draft& draft);

void branchHandler(Warp& warp, const Instruction& in);  // execution/control.cpp; flow needs to know them
void jumpHandler(Warp& warp, const Instruction& in);
void exitHandler(Warp& warp, const Instruction& in);
void joinHandler(Warp& warp, const Instruction& in);

}  // namespace sharpi::emulator
