// In which order a wide tile takes the blocks of a row: a list in shared memory, made when a thread block begins.
#pragma once

#include "kernels/matvec/mma/wide_layout.cuh"

namespace sharpi::cuda {

template <typename Layout> class WideOrder {
public:
    static constexpr uint32_t kEmpty = 1 << 16;  // block 0, with factors of 0

    // at: shared memory for kRuns + 1 words of each stage.
    __device__ __forceinline__ WideOrder(uint32_t at, int units)
        : _at(at), _ends(at + Layout::stages(units) * Layout::kRuns * 4) {}

    // Writes the first block of each run, and for each stage a word with a byte for each run: whether a turn ends with
    // it. Called by one warp: lane t has turn t. Where a row has no block for a turn, the turn has a run all the same,
    // whose factors are 0: it leaves the accumulator 0, but the tree has it.
    __device__ __forceinline__ void write(int units) const {
        const int steps = (units + kContractAccumulators - 1) / kContractAccumulators,
                  tail = units - (steps - 1) * kContractAccumulators;
        const auto count = [&](int turn) { return max(steps - (Layout::blockOf(turn) >= tail), 1); };
        // A stage has all of its runs. Those past the row's end come after the last turn.
        const int turn = Layout::lane();
        for (int run = Layout::runs(units) + turn; run < Layout::stages(units) * Layout::kRuns; run += 32)
            writeRun(run, kEmpty, false);
        if (turn >= Layout::kTurns) return;
        int first = 0;
        for (int before = 0; before < turn; ++before) first += count(before);
        for (int step = 0; step < count(turn); ++step) {
            const int block = step * kContractAccumulators + Layout::blockOf(turn);
            writeRun(first + step, block < units ? block : kEmpty, step + 1 == count(turn));
        }
    }
    // The first block of a run, or kEmpty.
    __device__ __forceinline__ uint32_t block(int stage, int run) const {
        return readWord(_at + (stage * Layout::kRuns + run) * 4);
    }
    // Those of all runs of a stage.
    __device__ __forceinline__ void blocks(int stage, uint32_t (&block)[Layout::kRuns]) const {
        float bits[Layout::kRuns];
        readShared(_at + stage * Layout::kRuns * 4, bits);
#pragma unroll
        for (int run = 0; run < Layout::kRuns; ++run) block[run] = __float_as_uint(bits[run]);
    }
    // Bit 8 * run: whether a turn ends with this run of the stage.
    __device__ __forceinline__ uint32_t ends(int stage) const { return readWord(_ends + stage * 4); }

private:
    __device__ __forceinline__ void writeRun(int run, uint32_t block, bool ends) const {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(_at + run * 4), "r"(block) : "memory");
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(_ends + run / Layout::kRuns * 4 + run % Layout::kRuns),
                     "r"(static_cast<int>(ends))
                     : "memory");
    }
    static __device__ __forceinline__ uint32_t readWord(uint32_t at) {
        uint32_t word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
        return word;
    }

    uint32_t _at, _ends;
};

}  // namespace sharpi::cuda
