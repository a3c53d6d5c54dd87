// The CPU's arithmetic for a layer of experts. It computes the pairs (a row that chose an expert, at some rank) that
// HostShare gives it: several experts at once over all threads, each read once however many rows chose it. By
// core/contract.h a pair's answer has the bits that any other processor would give it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "core/host_rows.h"
#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "experts/ram_experts.h"
#include "operations/step_limits.h"

namespace sharpi {

namespace host {
class Pieces;
}

// A layer's experts, and what joins their gates and ups. The stacks are as in the file, the biases in the host's
// memory. ram: where the experts are if the model is larger than RAM, else nullptr.
struct HostExpertLayer {
    ExpertStacks file;
    Activation activation = {};
    const float *gateBias = nullptr, *upBias = nullptr;  // [count, hidden]; may be nullptr
    RamExperts* ram = nullptr;
    // An expert's matrix: 0, 1, 2 for gate, up and down.
    Matrix matrix(int32_t expert, size_t which) const {
        if (ram) return ram->matrix(expert, which);
        return (which == 0 ? file.gate : which == 1 ? file.up : file.down).at(expert);
    }
};

class HostExperts {
public:
    // For steps of up to `rows` rows. All memory is taken here. The pool must outlive it.
    HostExperts(ThreadPool& pool, const StepLimits& limits, int64_t rows);

    // Throws Error(Internal) unless such a layer can be computed for `rows` rows of x. The stacks: as in the file.
    void requireFit(const ExpertStacks& file, const HostRows& x, int64_t rows, int32_t used) const;
    // For each pair p with expert[p] >= 0 (an expert of the layer) writes the row down(activation(gate x, up x)), where
    // x is row p / used, to answers + p * embedding; the other rows of answers are left alone. weight: by pair, if it
    // multiplies the experts' input; else nullptr. Returns how many bytes of the file were read. The arguments must
    // pass requireFit(), and the experts must be in memory.
    size_t compute(const HostExpertLayer& layer, const HostRows& x, int64_t rows, int32_t used, const int32_t* expert,
                   const float* weight, float* answers);

private:
    struct Release {
        void operator()(uint8_t* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }
    };
    // An expert to compute, and its places [begin, end). A pair's place is its index when pairs are sorted by expert.
    struct ChosenExpert {
        int32_t index, begin, end;
        int32_t places() const { return end - begin; }
    };

    void sortByExpert(const int32_t* expert, int32_t pairs, int32_t used);
    // The matrices of all chosen experts, of `rows` rows each, are cut into pieces as one. Calls body(index in _chosen,
    // first row, last row) for each expert's part of piece i.
    template <typename Body>
    static void forPiece(const host::Pieces& pieces, int64_t i, int64_t rows, const Body& body);
    void prepareHidden(const ExpertStacks& file);
    void gated(const HostExpertLayer& layer, const HostRows& x, const cpu::QuantizedRows& input, const float* weight,
               size_t which, int64_t first, int64_t last, int worker);
    void finishBlock(const HostExpertLayer& layer, const ChosenExpert& expert, const float* weight, int64_t first,
                     int64_t last);
    void down(const HostExpertLayer& layer, float* answers, size_t which, int64_t first, int64_t last, int worker);
    bool fewPlaces() const;  // every expert has so few places that products are not blocked
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
    cpu::QuantizedRows _hidden;  // [places, hidden] of the layer at work, if its down matrix is quantized
    float* _out = nullptr;       // [places, embedding], for experts with several places
    // By expert and block of 32: the hidden rows computed so far.
    std::unique_ptr<std::atomic<int32_t>[]> _computed;
    std::unique_ptr<std::atomic<int32_t>[]> _blocksLeft;  // by chosen expert: blocks not computed yet
    std::vector<int32_t> _pairAt, _rowAt;                 // by place
    std::vector<int32_t> _next;                           // by expert: the place of its next pair
    std::vector<ChosenExpert> _chosen;
};

}  // namespace sharpi
