// The blocks on the CPU: shares each among the threads of a pool and calls the kernels of cpu/.
#pragma once

#include <algorithm>
#include <memory>

#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "memory/host_memory.h"
#include "operations/backend.h"

namespace sharpi {

// One of several products that read the same input: y[t, :] = w x[t, :] + bias.
struct Linear {
    Weight w;
    const float* bias = nullptr;  // [w.rows], may be nullptr
    float* y = nullptr;           // [T, w.rows]
};

class CpuBackend : public Backend {
public:
    // Weights stay in the mapped files.
    explicit CpuBackend(int threads);
    // Weights are brought into `memory`, which host code can read (the fake device), as they are to a GPU.
    CpuBackend(int threads, std::unique_ptr<DeviceMemory> memory);
    static size_t scratchBytes(int threads, const StepLimits& limits);

    const char* device() const override { return "cpu"; }
    const char* name() const override { return _kernels.name; }
    Allocator& allocator() override { return *_allocator; }
    Placer& placer() override { return *_placer; }
    bool streams() const override { return _stream && _stream->streams(); }
    void whenUploaded(std::function<void(double)> told) override;
    void unload() override;
    void takeScratch(const StepLimits& limits) override;

    int64_t decodeRows() const override { return _limits.maxRows; }
    bool oneArithmetic() const override { return true; }
    int64_t promptStep() const override { return 1; }
    void begin(const Batch& batch, const KvCache& kv) override;
    void region(Pass pass, const std::function<void()>& body) override;
    void embed(const Weight& table) override;
    void joinDraft(const PredictionWeights& weights, const float* sourceNorm, float eps) override;
    void attention(const AttentionWeights& weights, const KvPages& pages, float eps) override;
    void gatedDelta(const GatedDeltaWeights& weights, const RecurrentLayer& state, float eps) override;
    void dense(const DenseWeights& weights, float eps) override;
    void experts(const ExpertWeights& weights, float eps) override;
    void head(const HeadWeights& weights, float eps, int64_t first, int64_t count) override;
    int64_t headRows() const override;
    void readLogits(int64_t row, int64_t count, float* out) override;
    std::vector<int32_t> sample(const std::vector<Choice>& choices) override;

protected:
    float* x() const { return _x; }  // [rows, embedding]

private:
    // The rows [begin, end) of the batch that belong to one sequence.
    struct SequenceRows {
        int64_t begin = 0, end = 0;
        const int32_t* pageTable = nullptr;
        std::vector<StateStep> steps;  // in rows of the sequence; none where the model has no recurrent state
    };
    // A token's share in an expert: `pair` numbers the (token, rank) pairs grouped by expert.
    struct Routing {
        std::vector<int32_t> expertBegin;  // [experts + 1]: pairs of expert e are [begin[e], begin[e + 1])
        std::vector<int32_t> pairToken;    // [pairs]
        std::vector<int32_t> pairOf;       // [tokens, used]
        std::vector<float> weight;         // [tokens, used]
    };
    // Where the buffers lie in the scratch, in bytes; made from the limits alone, so that planning counts the same.
    struct Layout;

    void readFromDevice();
    int64_t rows() const { return _batch->size(); }
    void readRows(const Weight& table, float* out, int64_t outStride);
    void norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y);
    void linear(const float* x, int64_t count, const std::vector<Linear>& outputs);
    void rope(float* x, int32_t heads, int32_t headDim, const RopeTable& table);
    void storeKv(const SequenceRows& rows, const KvPages& pages);
    void attend(const AttentionWeights& weights, const KvPages& pages);
    void splitGatedQueries(const AttentionWeights& weights, int32_t headDim);
    void convolve(const GatedDeltaWeights& weights, const RecurrentLayer& state);
    void prepareDelta(const GatedDeltaWeights& weights, float eps);
    void deltaRule(const GatedDeltaWeights& weights, const RecurrentLayer& state);
    void siluMul(float* gate, const float* up, int64_t n);
    void sigmoidMul(float* x, const float* gate, int64_t n);
    void addToX(const float* y);
    void route(float* logits, int64_t count, const ExpertWeights& weights);
    void expertProducts(const ExpertWeights& weights);
    // One of several products of the chosen experts with the same input.
    struct ExpertProduct {
        const WeightStack& w;
        float* y = nullptr;  // [pairs, w.first.rows]
    };
    // Pair p reads row rowIndex[p] of x.
    void multiplyExperts(const float* x, const cpu::QuantizedRows& xQuant, const int32_t* rowIndex,
                         std::initializer_list<ExpertProduct> products);
    void sumExperts(const ExpertWeights& weights);
    void addSharedExpert(const SharedExpertWeights& weights);
    void matmuls(const std::vector<cpu::MatmulArgs>& jobs);
    void arrive(int32_t group) {
        if (_stream) _stream->arrive(group);
    }
    cpu::QuantizedRows quantize(const float* x, int64_t count, int64_t cols, void* buffer);
    // Runs body(begin, end) over [0, n) in pieces of at least `grain`.
    template <typename Body> void forRanges(int64_t n, int64_t grain, const Body& body) {
        const int64_t pieces = std::clamp<int64_t>(n / grain, 1, _pool.threads());
        _pool.run(pieces, [&](int64_t piece, int) { body(n * piece / pieces, n * (piece + 1) / pieces); });
    }
    static constexpr int64_t kElementGrain = 8192;  // below this a loop is not worth waking threads for
    template <typename T> T* at(size_t offset) const { return reinterpret_cast<T*>(_scratch.as<uint8_t>() + offset); }

    const cpu::Kernels& _kernels;
    std::unique_ptr<DeviceMemory> _memory;
    std::unique_ptr<Allocator> _allocator;
    std::unique_ptr<Transfers> _transfers;
    std::unique_ptr<WeightStream> _stream;      // where weights are not in the mapped file
    std::unique_ptr<ExpertSlotManager> _slots;  // then too; it stays empty, since the CPU's batches are all alike
    std::unique_ptr<Placer> _placer;
    ThreadPool _pool;
    StepLimits _limits;
    Buffer _scratch;
    float *_x = nullptr, *_normed = nullptr, *_block = nullptr, *_q = nullptr, *_k = nullptr, *_v = nullptr,
          *_attended = nullptr;
    float *_gate = nullptr, *_up = nullptr, *_logits = nullptr, *_routerLogits = nullptr, *_expertOut = nullptr;
    float* _joined = nullptr;  // [rows, 2 * embedding]
    float *_gatedQueries = nullptr, *_queryGate = nullptr, *_sharedScale = nullptr;
    float *_deltaMixed = nullptr, *_deltaGate = nullptr, *_deltaAlpha = nullptr, *_deltaBeta = nullptr;
    void *_quantized = nullptr, *_quantizedHidden = nullptr;
    uint8_t* _threadScratch = nullptr;
    size_t _threadScratchStride = 0;

    const Batch* _batch = nullptr;
    std::vector<SequenceRows> _sequences;
    Routing _routing;
};

}  // namespace sharpi
