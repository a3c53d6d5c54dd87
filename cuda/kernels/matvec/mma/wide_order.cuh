// In which order a wide tile takes the blocks of a row: a list in shared memory, made when a thread block begins.
#pragma once

#include "kernels/matvec/mma/wide_layout.cuh"

namespace sharpi::cuda {

template <typename Layout> class WideOrder {
public:
    static constexpr uint32_t kEmpty = 1 << 16;  // block 0, with factors of 0

    // A stage's record: its runs, a word with a byte for each run, and room up to whole pieces of 16 bytes.
    static constexpr int kRecordBytes = Layout::kOrderBytes;

    // at: shared memory for the records of all stages.
    __device__ __forceinline__ WideOrder(uint32_t at, int units)
        : _begin(at), _end(at + Layout::stages(units) * kRecordBytes) {
        keep(_begin);
        keep(_end);
    }

    // Writes the records. A run's byte says whether a turn ends with it. Called by one warp: lane t has turn t. Where a
    // row has no block for a turn, the turn has a run all the same, whose factors are 0: it leaves the accumulator 0,
    // but the tree has it.
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
    __device__ __forceinline__ uint32_t begin() const { return _begin; }
    // The record behind one. Behind the last is the first.
    __device__ __forceinline__ uint32_t next(uint32_t record) const {
        record += kRecordBytes;
        return record == _end ? _begin : record;
    }
    // The first block of a run, or kEmpty.
    static __device__ __forceinline__ uint32_t block(uint32_t record, int run) { return readWord(record + run * 4); }
    // Those of all runs.
    static __device__ __forceinline__ void blocks(uint32_t record, uint32_t (&block)[Layout::kRuns]) {
        float bits[Layout::kRuns];
        readShared(record, bits);
#pragma unroll
        for (int run = 0; run < Layout::kRuns; ++run) block[run] = __float_as_uint(bits[run]);
    }
    // Bit 8 * run: whether a turn ends with this run.
    static __device__ __forceinline__ uint32_t ends(uint32_t record) { return readWord(record + Layout::kRuns * 4); }

private:
    __device__ __forceinline__ void writeRun(int run, uint32_t block, bool ends) const {
        const uint32_t record = _begin + run / Layout::kRuns * kRecordBytes, place = run % Layout::kRuns;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(record + place * 4), "r"(block) : "memory");
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(record + Layout::kRuns * 4 + place), "r"(static_cast<int>(ends))
                     : "memory");
    }
    static __device__ __forceinline__ uint32_t readWord(uint32_t at) {
        uint32_t word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
        return word;
    }

    uint32_t _begin, _end;
};

}  // namespace sharpi::cuda
