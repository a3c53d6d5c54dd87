// The instructions that are emulated, by name, and how the translator finds them.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "ptx/program.h"

namespace sharpi::emulator {

// An instruction whose operands are registers and constants alone.
struct Operation {
    Handler run = nullptr;
    int results = 1;
    int count = 0;                             // of operands, with the results
    std::array<int8_t, kOperands> bytes = {};  // what an operand's lanes take: 4 or 8
    int64_t immediate = 0;
};

// Null if it is not emulated.
const Operation* findOperation(std::string_view name);

enum class Space { Generic, Global, Shared, Local, Parameter };

// Of `type`, which has `bytes` bytes, as many as `count` of them, to or from registers of registerBytes.
Handler loadHandler(Space space, int bytes, bool isSigned, int registerBytes);
Handler storeHandler(Space space, int bytes, int registerBytes);
// add.u32 and so on; null if it is not emulated.
Handler atomicHandler(std::string_view operation, std::string_view type, Space space);
Handler addressHandler(Space space, bool toGeneric);
void copyAsyncHandler(Warp& warp, const Instruction& in);  // o: to, from, bytes that are used; immediate: bytes
void closeCopiesHandler(Warp& warp, const Instruction& in);
void waitForCopiesHandler(Warp& warp,
                          const Instruction& in);  // immediate: how many groups may remain; -1: all and open ones
// Of an mbarrier in shared memory. o: address, result (or none), operand: a count, a parity, or bytes to expect.
void initMbarrierHandler(Warp& warp, const Instruction& in);
void arriveHandler(Warp& warp, const Instruction& in);
void arriveAfterCopiesHandler(Warp& warp, const Instruction& in);
void testMbarrierHandler(Warp& warp, const Instruction& in);
// o: to, from, bytes, mbarrier, what is added to the mbarrier's address.
void copyBulkHandler(Warp& warp, const Instruction& in);
void loadMatricesHandler(Warp& warp, const Instruction& in);  // o[0]: address; list: results; negated: transposed
void packHandler16(Warp& warp, const Instruction& in);        // o[0] = {list}
void packHandler32(Warp& warp, const Instruction& in);
void unpackHandler16(Warp& warp, const Instruction& in);  // {list} = o[0]
void unpackHandler32(Warp& warp, const Instruction& in);
// list: results, a, b, c. Null if it is not emulated.
Handler matrixProductHandler(std::string_view name);
void barrierHandler(Warp& warp, const Instruction& in);  // o: result, number, predicate, threads
void pauseHandler(Warp& warp, const Instruction& in);
void nothingHandler(Warp& warp, const Instruction& in);
void trapHandler(Warp& warp, const Instruction& in);

}  // namespace sharpi::emulator
