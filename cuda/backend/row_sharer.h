// Another processor that takes a part of a step: output rows [begin, w.rows) of matrices, while the GPU computes the
// rows before them. Calls come in the order of the pass's launches, and the results have the bits of core/contract.h.
#pragma once

#include "kernels/rows/rows.h"
#include "operations/operations.h"

namespace sharpi {

class RowSharer {
public:
    virtual ~RowSharer() = default;

    // Sends rows [rows, cols], which its next gated() or head() reads.
    virtual void sendInput(const cuda::RowOutputs& x, int64_t rows, int64_t cols) = 0;
    // Sends columns [0, end) of the hidden rows, which its next product() reads.
    virtual void sendHidden(const cuda::RowOutputs& hidden, int64_t rows, int64_t end) = 0;
    // It computes the hidden columns from `begin` on for `reader`, and keeps them for its next product().
    virtual void gated(const GatedProduct& product, const Weight& reader, int64_t rows, int64_t begin) = 0;
    // Receives these columns.
    virtual void receiveHidden(const cuda::RowOutputs& hidden, int64_t rows, int64_t begin, int64_t end) = 0;
    // It multiplies the hidden rows by w's rows from `begin` on. With the bias, the results go to these columns of `to`
    // ([rows, w.rows]): they are added if `adds`, else written.
    virtual void product(const Weight& w, const float* bias, int64_t rows, int64_t begin, float* to, bool adds) = 0;
    // It multiplies the rows of sendInput() by the output head's rows from `begin` on, to these columns of `logits`.
    virtual void head(const Weight& output, int64_t rows, int64_t begin, float* logits) = 0;
};

}  // namespace sharpi
