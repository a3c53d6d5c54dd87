// Blocks of tokens that attention sees as one row each (CompressorSpec), and the scores by which it chooses some of
// them (IndexerSpec). Each operation rounds to nearest even; fma rounds once; exp is exp.h's.
//
// A block's row, for each element, over the tokens j that it is made of, in ascending order:
//   g[j] = gate[j] + offset[j];  m = max g;  w[j] = exp(g[j] - m)
//   l = l + w[j] from +0;  o = fma(w[j], key[j], o) from +0;  the row is o / l
// Then core/rules/norm.h normalizes it and it is rotated.
//
// A block's score for a query row, over heads h in ascending order:
//   dot[h] = q[h] . row by fma over the elements in ascending order from +0
//   score  = fma(max(0, dot[h]), weight[h] * scale, score) from +0
// Of the blocks that are over, the topK with the largest scoreKey (core/rules/routing_rule.h) are chosen; among equals
// the lower number.
#include "cpu/kernels/exp.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/transpose.h"

namespace sharpi::cpu::SHARPI_ISA {

void poolBlock(const BlockArgs& args, float* out) {
    for (int64_t d = 0; d < args.headDim; d += kLanes) {
        const int lanes = static_cast<int>(args.headDim - d < kLanes ? args.headDim - d : kLanes);
        const auto gate = [&](int32_t j) __attribute__((always_inline)) {
            return vadd(vloadPart(args.gates[j] + d, lanes), vloadPart(args.offsets[j] + d, lanes));
        };
        Vec top = vset(-__builtin_inff()), sum = vzero(), all = vzero();
        for (int32_t j = 0; j < args.tokens; j++) top = vmax(top, gate(j));
        for (int32_t j = 0; j < args.tokens; j++) {
            const Vec weight = vexp(vsub(gate(j), top));
            sum = vadd(sum, weight);
            all = vfma(weight, vloadPart(args.keys[j] + d, lanes), all);
        }
        vstorePart(out + d, vdiv(all, sum), lanes);
    }
}

template <class Read> static void scoreRows(const IndexArgs& args, float* scores, float* turned) {
    using Element = typename Read::Element;
    const int64_t dim = args.rows.headDim;
    const Element* const base = reinterpret_cast<const Element*>(args.rows.k);
    for (int64_t begin = 0; begin < args.count; begin += kLanes) {
        const Element* lines[kLanes];
        for (int64_t i = 0; i < kLanes; i++) {
            const int64_t row = begin + i < args.count ? begin + i : args.count - 1;
            lines[i] = base + args.rows.rowAt(args.table, row);
        }
        for (int64_t d = 0; d < dim; d += kLanes) {
            Vec rows[kLanes];
            for (int i = 0; i < kLanes; i++) rows[i] = loadFirst<Read>(lines[i] + d, dim - d);
            storeTransposed(rows, turned + d * kLanes, kLanes);
        }
        Vec score = vzero();
        for (int32_t h = 0; h < args.heads; h++) {
            const float* const q = args.queries + h * dim;
            Vec dot = vzero();
            for (int64_t d = 0; d < dim; d++) dot = vfma(vset(q[d]), vload(turned + d * kLanes), dot);
            score = vfma(vmax(vzero(), dot), vset(args.weights[h]), score);
        }
        vstore(scores + begin, score);
    }
}

void indexScores(const IndexArgs& args, float* scores, float* scratch) {
    switch (args.rows.type) {
    case KvType::F32: return scoreRows<ReadF32>(args, scores, scratch);
    case KvType::BF16: return scoreRows<ReadBf16>(args, scores, scratch);
    case KvType::F16: return scoreRows<ReadF16>(args, scores, scratch);
    }
}

}  // namespace sharpi::cpu::SHARPI_ISA
