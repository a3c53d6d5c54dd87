// Products of a batch's rows with matrices, wherever the matrices are. In a step another processor may compute the last
// output rows of a matrix (row_sharer.h).
#pragma once

#include "backend/cuda_pass.h"
#include "backend/row_sharer.h"

namespace sharpi {

class CudaProducts {
public:
    CudaProducts(CudaPass& pass, RowSharer& sharer) : _pass(pass), _sharer(sharer) {}

    // See Operations.
    void linear(const Activations& x, std::initializer_list<Product> products);
    void addLinear(const Activations& x, const Weight& w, const float* bias);
    void gatedLinear(const Activations& x, const GatedProduct& product, const Weight& reader);
    void logits(const cuda::RowOutputs& x, const Weight& output, int64_t rows, bool inRegion);
    // Exact rows; y of each output is where the first row goes.
    void exact(const Activations& x, std::vector<cuda::MatvecOutput> outputs);
    // The hidden rows from the buffers Gate and Up, which have room for `exactRows` rows and then hold `fastRows`.
    // exactDone: exact rows have been made otherwise.
    void activate(const Activations& hidden, int64_t exactRows, const cuda::GatedJoin& ofExact, int64_t fastRows,
                  const cuda::GatedJoin& ofFast, bool exactDone = false);

private:
    // Rows of both kinds; y of each output is where the first row of the batch goes.
    void multiply(const Activations& x, const std::vector<cuda::MatvecOutput>& outputs);
    void fast(const Activations& x, const std::vector<cuda::MatvecOutput>& outputs, cuda::Store store);
    void gated(const Activations& x, const GatedProduct& product, const Activations& hidden);
    void add(const Activations& x, const Weight& w, const float* bias);
    bool shares(const Weight& w) const { return _pass.step && w.cpuRows > 0; }
    void sharedGated(const Activations& x, const GatedProduct& product, const Weight& reader,
                     const Activations& hidden);
    void sharedProduct(const Weight& w, const float* bias, float* to, bool adds);

    CudaPass& _pass;
    RowSharer& _sharer;
    const uint8_t* _hiddenReader = nullptr;  // the matrix, in the file, that the hidden rows were made for
};

}  // namespace sharpi
