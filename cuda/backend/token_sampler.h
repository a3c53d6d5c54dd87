// Chooses and scores tokens on the device, for the backend.
#pragma once

#include <memory>
#include <vector>

#include "backend/cuda_pass.h"
#include "kernels/sampling/scores.h"
#include "operations/backend.h"

namespace sharpi {

class TokenSampler {
public:
    // The pass has its working memory.
    explicit TokenSampler(CudaPass& pass);

    // See Backend.
    std::vector<Score> score(const std::vector<ScoredToken>& tokens);
    std::vector<Chosen> sample(const std::vector<Choice>& choices);

private:
    int64_t vocab() const { return _pass.limits.vocab; }
    float* logits() const { return _pass.floats(_pass.layout->logits); }
    int32_t* tokens() const { return _pass.at<int32_t>(_pass.layout->token); }
    cuda::RowScore* scores() const { return _pass.at<cuda::RowScore>(_pass.layout->scores); }
    cuda::ScoredRow scoredRow(int64_t row, size_t slot, int32_t best) const;
    void mask(const std::vector<Choice>& choices);
    void choose(const std::vector<Choice>& choices);
    void choosePart(std::vector<cuda::RowChoice> rows, const std::vector<TokenAdjustment>& adjustments,
                    const std::vector<Choice>& choices);
    Score scoreAt(size_t slot, int32_t best) const;

    CudaPass& _pass;
    cuda::PinnedBuffer _tokens, _scores;
    std::unique_ptr<cuda::PinnedBuffer> _masks;  // once there are any
};

}  // namespace sharpi
