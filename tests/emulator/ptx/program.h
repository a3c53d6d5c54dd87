// What a kernel becomes before it runs: instructions whose operands are places in a warp's register file.
//
// A register holds a value for each of the 32 lanes, side by side: of 32 bits (predicates, and everything of 8 or 16
// bits, too), or of 64 bits. A predicate's lane is 0 or all ones.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace sharpi::emulator {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// What the emulator cannot do, or what a kernel did wrong. The launch that ran into it ends.
class Fault : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&);

// An operand is the offset of a register in the register file, or of a constant: then the lowest bit is set, and the
// rest is its offset among the kernel's constants.
using Operand = int32_t;
constexpr Operand kNone = -1;

constexpr int kOperands = 6;

struct Instruction {
    Handler run = nullptr;
    Operand o[kOperands] = {kNone, kNone, kNone, kNone, kNone, kNone};  // results first
    Operand guard = kNone;                                              // a predicate
    bool negated = false;                                               // the guard
    bool control = false;                                               // decides itself what its guard means
    bool wide = false;                                                  // an address of 64 bits
    uint8_t count = 0;                                                  // operands in `list`
    const Operand* list = nullptr;
    int64_t immediate = 0;       // of an address: what is added. Of a branch: where it goes
    int32_t extra = 0;           // of a copy: what is added to the other address
    int32_t join = -1;           // of a branch: where its lanes meet again; -1: only at the end
    int32_t index = 0;           // its own place
    int32_t file = 0, line = 0;  // where it is from
};

// Registers that every warp has at the front of its file, filled when it starts.
enum class Special {
    TidX,
    TidY,
    TidZ,
    NtidX,
    NtidY,
    NtidZ,
    CtaidX,
    CtaidY,
    CtaidZ,
    NctaidX,
    NctaidY,
    NctaidZ,
    Lane,
    LanesBelowOrAt,
    LanesBelow,
    LanesAbove,
    LanesAboveOrAt,
    LaneBit,
    WarpNumber,
    Count
};
constexpr int kSpecials = static_cast<int>(Special::Count);
constexpr int kSlotBytes = kLanes * 4;

struct Parameter {
    size_t offset = 0, bytes = 0;
};

struct Kernel {
    std::string name;
    std::vector<Instruction> code;
    std::deque<std::vector<Operand>> lists;  // of the instructions
    std::vector<uint8_t> constants;
    size_t registerBytes = 0;
    std::vector<Parameter> parameters;
    size_t parameterBytes = 0;
    size_t sharedBytes = 0;  // of its variables; what a launch asks for comes after them
    size_t localBytes = 0;   // of each thread
    int maximumThreads = 1024;
    uint32_t specials = 0;  // those that it reads, as bits
    const std::vector<std::string>* files = nullptr;

    // As "file.cuh:12".
    std::string placeOf(const Instruction& instruction) const;
};

}  // namespace sharpi::emulator
