// The CPU's arithmetic of a layer of experts: of pairs (a row that chose an expert, at some rank) those that it is
// given, several experts at once over all threads, each expert read once whatever the number of rows that chose it. By
// core/contract.h a pair's answer has the bits that any other processor would give it. Who computes which pair is
// HostShare's business.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "core/host_rows.h"
#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "operations/step_limits.h"

namespace sharpi {

namespace host {
class Pieces;
}

class HostExperts {
public:
    // For steps of up to `rows` rows. Everything is taken here. The pool must outlive it.
    HostExperts(ThreadPool& pool, const StepLimits& limits, int64_t rows);

    // Throws Error(Internal) unless such a layer can be computed for `rows` rows of x. The stacks: as in the file.
    void requireFit(const ExpertStacks& file, const HostRows& x, int64_t rows, int32_t used) const;
    // Of each pair p with expert[p] >= 0 (an expert of the layer) writes the row down(silu(gate x) * (up x)), x the row
    // p / used, to answers + p * embedding; the others' rows are left alone. Returns how many bytes of the file were
    // read. What requireFit allows.
    size_t compute(const ExpertStacks& file, const HostRows& x, int64_t rows, int32_t used, const int32_t* expert,
                   float* answers);

private:
    struct Release {
        void operator()(uint8_t* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }
    };
    // An expert that is to be computed, and its places: [begin, end). A pair's place is its index in the order of
    // experts.
    struct ChosenExpert {
        int32_t index, begin, end;
        int32_t places() const { return end - begin; }
    };

    void sortByExpert(const int32_t* expert, int32_t pairs, int32_t used);
    // Calls body(which of _chosen, first row, last row) for a piece of matrices of `rows` rows, one a chosen expert.
    template <typename Body>
    static void forPiece(const host::Pieces& pieces, int64_t i, int64_t rows, const Body& body);
    void prepareHidden(const ExpertStacks& file);
    void gated(const ExpertStacks& file, const HostRows& x, const cpu::QuantizedRows& input, size_t which,
               int64_t first, int64_t last, int worker);
    void finishBlock(const ChosenExpert& expert, int64_t first, int64_t last, int64_t hidden);
    void down(const MatrixStack& w, float* answers, size_t which, int64_t first, int64_t last, int worker);
    bool fewPlaces() const;  // of each expert: products are not blocked
    uint8_t* threadScratch(int worker) const {
        return _scratch.get() + static_cast<size_t>(worker) * _threadScratchBytes;
    }

    const cpu::Kernels& _kernels;
    ThreadPool& _pool;
    const int64_t _maxRows, _maxPairs, _maxHidden;

    // Taken once, so that a step allocates nothing: each thread's scratch for products, then the rest.
    size_t _threadScratchBytes = 0;
    std::unique_ptr<uint8_t, Release> _scratch;
    float* _gate = nullptr;  // [places, hidden]
    float* _up = nullptr;
    void* _hiddenBuffer = nullptr;
    cpu::QuantizedRows _hidden;  // [places, hidden] of the layer at work, where its down is quantized
    float* _out = nullptr;       // [places, embedding], of experts with more places than one
    std::unique_ptr<std::atomic<int32_t>[]>
        _computed;  // hidden rows computed so far of each block of 32, expert by expert
    std::unique_ptr<std::atomic<int32_t>[]> _blocksLeft;  // of each chosen expert: blocks that are not there yet
    std::vector<int32_t> _pairAt, _rowAt;                 // of each place
    std::vector<int32_t> _next;                           // of each expert: where its next pair goes
    std::vector<ChosenExpert> _chosen;
};

}  // namespace sharpi
