// The operations on the CPU: shares each among the threads of a pool and calls the kernels of cpu/.
#pragma once

#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "engine/backend.h"

namespace sharpi {

// What the scratch buffers are sized for. Nothing grows after construction.
struct CpuLimits {
    int64_t maxRows = 1;       // rows of a batch
    int64_t maxCols = 1;       // inputs of any matrix
    int64_t embedding = 1;     // outputs of an expert block
    int32_t heads = 1, kvHeads = 1, headDim = 2, pageTokens = 1;
    int32_t experts = 0, expertsUsed = 0;
    int64_t expertHidden = 0;
};

class CpuBackend : public Backend {
public:
    CpuBackend(int threads, const CpuLimits& limits);
    static size_t scratchBytes(int threads, const CpuLimits& limits);

    const char* name() const override { return _kernels.name; }
    DeviceMemory& memory() override { return _memory; }
    int threads() const { return _pool.threads(); }

    void embed(const Matrix& table, const int32_t* tokens, int64_t count, float* out) override;
    void rmsNorm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) override;
    void linear(const float* x, int64_t count, const std::vector<Linear>& outputs) override;
    void rope(float* x, const int32_t* positions, int64_t count, int32_t heads, int32_t headDim, const RopeTable& table) override;
    void storeKv(const float* k, const float* v, const int32_t* positions, const SequenceRows& rows, const KvPages& pages) override;
    void attention(const float* q, const int32_t* positions, const std::vector<SequenceRows>& sequences, int32_t heads,
                   float scale, const KvPages& pages, float* out) override;
    void siluMul(float* gate, const float* up, int64_t n) override;
    void add(float* x, const float* y, int64_t n) override;
    void experts(const float* x, int64_t count, const ExpertWeights& weights, float* y) override;

private:
    // A token's share in an expert: `pair` numbers the (token, rank) pairs grouped by expert.
    struct Routing {
        std::vector<int32_t> expertBegin;  // [experts + 1]: pairs of expert e are [begin[e], begin[e + 1])
        std::vector<int32_t> pairToken;    // [pairs]
        std::vector<int32_t> pairOf;       // [tokens, used]
        std::vector<float> weight;         // [tokens, used]
    };
    void route(float* logits, int64_t count, const ExpertWeights& weights);
    void matmuls(const std::vector<cpu::MatmulArgs>& jobs);
    cpu::QuantizedRows quantize(const float* x, int64_t count, int64_t cols, const Buffer& buffer);
    // Runs body(begin, end) over [0, n) in pieces of at least `grain`.
    template <typename Body> void forRanges(int64_t n, int64_t grain, const Body& body);

    const cpu::Kernels& _kernels;
    HostMemory _memory;
    CpuLimits _limits;
    ThreadPool _pool;
    Buffer _quantized, _quantizedHidden;
    Buffer _threadScratch;
    size_t _threadScratchStride = 0;
    Buffer _routerLogits, _gate, _up, _expertOut;
    Routing _routing;
};

}  // namespace sharpi
