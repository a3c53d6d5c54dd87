// A layer of experts on the CPU: each chosen expert's matrices are read once for all rows that chose it.
#pragma once

#include <initializer_list>
#include <vector>

#include "cpu/cpu_work.h"
#include "experts/expert_profiler.h"
#include "experts/ram_experts.h"

namespace sharpi {

class CpuExperts {
public:
    explicit CpuExperts(CpuWork& work) : _work(work) {}
    ExpertAccessProfiler& profiler() { return _profiler; }
    // nullptr: all experts are in memory, or come through the weight stream.
    void useSource(RamExperts* source) { _source = source; }

    // Chooses each row's experts by RouterLogits, and counts them. What is not in memory is asked of the disk.
    void route(const ExpertCall& call);
    // See Operations::experts().
    void compute(const ExpertCall& call);

private:
    // A pair is a row and one expert that it chose; pairs are numbered expert by expert.
    struct Routing {
        std::vector<int32_t> expertBegin;  // [experts + 1]: pairs of expert e are [begin[e], begin[e + 1])
        std::vector<int32_t> pairToken;    // [pairs]
        std::vector<int32_t> pairAt;       // [pairs]: its place in the lists by rank
        std::vector<int32_t> chosen;       // [rows, used], by rank
        std::vector<int32_t> pairOf;       // [rows, used]
        std::vector<float> weight;         // [rows, used]
    };
    // One of several products of the chosen experts with the same input.
    struct ExpertProduct {
        const WeightStack& w;
        float* y = nullptr;  // [pairs, w.first.rows]
        size_t which = 0;    // of an expert's matrices; see RamExperts
    };
    // The pairs of one expert.
    struct Job {
        cpu::MatmulArgs product;
        int32_t expert = 0;
        size_t which = 0;
    };
    void choose(const RouterCall& call);
    // Computes those in memory first, then the others as they arrive.
    void multiplyAsRead(std::vector<Job> jobs);
    // Pair p reads row rowIndex[p] of x.
    void multiply(const float* x, const cpu::QuantizedRows& xQuant, const int32_t* rowIndex,
                  const std::vector<ExpertProduct>& products);
    void activate(const ExpertCall& call, float* gate, const float* up);
    void sumByRank(const ExpertCall& call, float* to);
    void addShared(const float* scale, float* to);

    CpuWork& _work;
    ExpertAccessProfiler _profiler;
    Routing _routing;
    RamExperts* _source = nullptr;
    bool _sourced = false;  // the layer's experts come from there
};

}  // namespace sharpi
