// Pairs that are not grouped take one launch (matvec_experts.cuh). Grouped pairs take two: their answers come in the
// order of the experts, and are summed by rank.
#include "kernels/experts/expert_down.h"

#include "kernels/experts/router.h"
#include "kernels/matvec/grouped.cuh"
#include "kernels/matvec/matvec_experts.cuh"

namespace sharpi::cuda {

void expertDownAdd(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& down, const int32_t* chosen,
                   const float* weight, int32_t used, float* to, const SharedAnswer& shared, const AnswerTerms& terms,
                   const PairGroups& groups, float* answers) {
    const Matrix& first = down.first;
    if (rows == 0 || first.rows == 0) return;
    if (used < 1 || used > 1024)
        throw Error(ErrorKind::Internal, "expertDownAdd: " + std::to_string(used) + " experts for each token");
    if (groups.count && hasMma(stream, first.type)) {
        expertMatvec(stream, x, rows, down, chosen, used, true, answers, groups);
        AnswerTerms ofPairs = terms;
        ofPairs.expert = chosen;
        return combineExperts(stream, answers, nullptr, weight, rows, used, first.rows, to, shared, ofPairs);
    }
    checkShape(first);
    DownProduct p;
    p.data = first.data;
    p.shape = packedShape(first.type, first.rows, first.cols);
    p.stride = static_cast<int64_t>(down.stride);
    p.rows = static_cast<int32_t>(first.rows);
    p.cols = static_cast<int32_t>(first.cols);
    p.x = x;
    p.chosen = chosen;
    p.weight = weight;
    p.used = used;
    p.to = to;
    p.shared = shared;
    p.bias = terms.bias;
    p.adds = terms.adds;
    withType(first.type, [&](auto tag) { launchDown<decltype(tag)::kType>(stream, p, rows); });
}

}  // namespace sharpi::cuda
