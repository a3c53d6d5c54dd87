// Products of a batch's rows with matrices, wherever the matrices are. In a step the CPU may compute output rows [a, b)
// of a matrix: it gets the rows that it reads through a mailbox, and its results come back the same way.
#pragma once

#include "backend/cuda_pass.h"

namespace sharpi {

class CudaProducts {
public:
    explicit CudaProducts(CudaPass& pass) : _pass(pass) {}

    // See Operations.
    void linear(const Activations& x, std::initializer_list<Product> products);
    void addLinear(const Activations& x, const Weight& w, const float* bias);
    void gatedLinear(const Activations& x, const Weight& gate, const Weight& up, const Weight& reader);
    void logits(const cuda::RowOutputs& x, const Weight& output, int64_t rows, bool inRegion);
    // Exact rows; y of each output is where the first row goes.
    void exact(const Activations& x, std::vector<cuda::MatvecOutput> outputs);

private:
    void fast(const Activations& x, const Matrix& part, const float* bias, float* y, int64_t stride, cuda::Store store);
    void gated(const Activations& x, const Weight& gate, const Weight& up, const Activations& hidden);
    void add(const Activations& x, const Weight& w, const float* bias);
    bool shares(const Weight& w) const { return _pass.step && w.cpuRows > 0; }
    void sharedGated(const Activations& x, const Weight& gate, const Weight& up, const Weight& reader,
                     const Activations& hidden);
    void sendHidden(const Activations& hidden, int64_t end);
    void receiveAdded(const Weight& w);

    CudaPass& _pass;
    const uint8_t* _hiddenReader = nullptr;  // the matrix, in the file, that the hidden rows were made for
    uint32_t _hiddenSent = 0;                // the ticket by which the CPU has all hidden rows that addLinear() needs
};

}  // namespace sharpi
