// How rows choose their experts on the CPU, by the rule of core/rules/routing_rule.h.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "operations/operations.h"

namespace sharpi {

class CpuRouter {
public:
    CpuRouter(const cpu::Kernels& kernels, const RouterCall& call);
    // A row's logits, which are overwritten. chosen, weight: [used], by rank. token: the row's, for
    // RouterCall::tokenChoices.
    void route(float* logits, int32_t* chosen, float* weight, int32_t token = 0);

private:
    void score(float* logits);
    void choose(const float* scores, int32_t token, int32_t* chosen);
    void keepBestGroups();
    void weigh(const float* scores, const int32_t* chosen, float* weight) const;

    const cpu::Kernels& _kernels;
    const RouterCall& _call;
    std::vector<float> _biased;   // [count]: what the choice goes by
    std::vector<uint32_t> _key;   // [count]; 0: not to be chosen
    std::vector<int32_t> _order;  // [count]
};

}  // namespace sharpi
