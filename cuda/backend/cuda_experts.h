// Layers of experts on the GPU. Experts are resident, or in slots with the others in the file. In a step the CPU
// computes the experts that are in no slot, or orders the GPU to fetch them; in other batches they are brought over.
#pragma once

#include "backend/cuda_pass.h"
#include "backend/cuda_products.h"
#include "kernels/experts/expert_cache.h"
#include "kernels/experts/router.h"
#include "transfers/cuda_expert_cache.h"

namespace sharpi {

class CudaExperts {
public:
    CudaExperts(CudaPass& pass, CudaProducts& products, CudaExpertCache& cache)
        : _pass(pass), _products(products), _cache(cache) {}

    // See Operations. What runs between the two runs beside the CPU's part of the layer.
    void route(const ExpertCall& call);
    void compute(const ExpertCall& call);

private:
    // How the host and the device meet in a layer whose experts are in slots.
    struct Tickets {
        uint32_t sent = 0, instructed = 0, returned = 0;
        const int32_t* foreseen = nullptr;  // what the next layer's router makes of this layer's rows
    };
    void chooseExperts(const ExpertCall& call);
    void sendChoices(const ExpertCall& call);
    const int32_t* foreseeNext(const ExpertCall& call);
    void computeResident(const ExpertCall& call);
    void computeInSlots(const ExpertCall& call);
    void computeByStack(const ExpertCall& call);
    cuda::ExpertGroups group(const ExpertCall& call, int64_t exactPairs, cuda::ExpertGrouping& made);
    // Pairs of the exact rows [first, first + rows), which one launch takes.
    struct Pairs {
        int64_t first = 0;
        int rows = 0;
        int32_t used = 0;
        const int32_t* which = nullptr;                 // the pairs' matrices in a stack, or -1
        cuda::PairGroups groups;                        // by `which`
        int64_t begin() const { return first * used; }  // the first of them among all exact rows' pairs
    };
    template <typename Body>
    void forExactPairs(const int32_t* which, const RouterCall& routing, std::initializer_list<MatrixStack> stacks,
                       const Body& body);
    void hiddenOfPairs(const ExpertCall& call, const ExpertStacks& w, const Pairs& pairs, const Activations& hidden);
    void pairProducts(const Activations& x, const MatrixStack& w, const Pairs& pairs, bool ofRows, float* y);
    // Of the pairs from `pair` on.
    cuda::GatedJoin join(const ExpertCall& call, int64_t pair) const;
    cuda::AnswerTerms answerTerms(const ExpertCall& call, int64_t pair) const;
    const float* answerWeights(const ExpertCall& call, int64_t pair) const;
    void stackProduct(const Activations& x, const WeightStack& w, const MatrixStack& slots, const RouterCall& routing,
                      const cuda::ExpertGroups& groups, bool ofRows, float* y);
    // What the shared expert adds to the rows from `first` on.
    cuda::SharedAnswer sharedAnswer(const ExpertCall& call, int64_t first) const;
    const int32_t* chosen(int64_t pair) const { return _pass.at<int32_t>(_pass.layout->chosen) + pair; }
    float* weights(int64_t pair) const { return _pass.floats(_pass.layout->weight) + pair; }

    CudaPass& _pass;
    CudaProducts& _products;
    CudaExpertCache& _cache;
    Tickets _tickets;  // of the layer between route() and compute()
};

}  // namespace sharpi
