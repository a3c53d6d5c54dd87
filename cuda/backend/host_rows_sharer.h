// The CPU as the processor that shares a step's rows: HostShare, its mailbox and the tickets for which both sides wait.
#pragma once

#include "backend/cuda_pass.h"
#include "backend/row_sharer.h"

namespace sharpi {

class HostRowsSharer : public RowSharer {
public:
    explicit HostRowsSharer(CudaPass& pass) : _pass(pass) {}

    void sendInput(const cuda::RowOutputs& x, int64_t rows, int64_t cols) override;
    void sendHidden(const cuda::RowOutputs& hidden, int64_t rows, int64_t end) override;
    void gated(const GatedProduct& product, const Weight& reader, int64_t rows, int64_t begin) override;
    void receiveHidden(const cuda::RowOutputs& hidden, int64_t rows, int64_t begin, int64_t end) override;
    void product(const Weight& w, const float* bias, int64_t rows, int64_t begin, float* to, bool adds) override;
    void head(const Weight& output, int64_t rows, int64_t begin, float* logits) override;

private:
    CudaPass& _pass;
    uint32_t _inputSent = 0, _gatedReturned = 0;
    uint32_t _hiddenSent = 0;  // the ticket by which the CPU has all hidden rows that it does not compute; 0: none
};

}  // namespace sharpi
