// The blocks on one NVIDIA GPU, with weights in its memory or brought over as they are used.
//
// Batches of up to cuda::kMaxMatvecRows rows go through products that follow core/contract.h, so that decode gives the
// CPU's bits; larger ones through tensor cores. A small batch's launches are captured once for each number of rows and replayed.
// In small batches the CPU may compute a part of the feed-forward rows, and experts that are in no slot (host_share.h): what it
// does in a step is recorded beside the captured launches.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "device/cuda_memory.h"
#include "device/stream.h"
#include "engine/backend.h"
#include "engine/cuda_expert_loads.h"
#include "engine/cuda_transfers.h"
#include "engine/expert_misses.h"
#include "engine/gpu_scratch.h"
#include "engine/host_share.h"
#include "kernels/attention.h"
#include "kernels/gated_delta.h"
#include "kernels/matmul.h"

namespace sharpi {

class CudaBackend : public Backend {
public:
    // vram: the most memory to take, in bytes; 0: all. threads: for what the CPU computes.
    // Throws Error(InvalidArgument) where there is no usable GPU.
    CudaBackend(size_t vram, int threads);
    ~CudaBackend() override;

    const char* device() const override { return "cuda"; }
    const char* name() const override { return _stream.device().name.c_str(); }
    Allocator& allocator() override { return _allocator; }
    Placer& placer() override { return *_placer; }
    bool streams() const override { return _weights->streams(); }
    std::vector<std::string> notes() const override;
    void whenUploaded(std::function<void(double)> told) override { _weights->onUploaded(std::move(told)); }
    void unload() override;
    void takeScratch(const StepLimits& limits) override;
    void startExperts(const ExpertUse& use) override;
    ExpertCounts expertCounts() override;

    int64_t decodeRows() const override { return std::min<int64_t>(_limits.maxRows, GpuScratch::kMaxDecodeRows); }
    bool oneArithmetic() const override { return _limits.prompt == PromptMode::Exact; }
    int64_t promptStep() const override { return _limits.deltaHeads && !oneArithmetic() ? kPromptTile : 1; }
    void begin(const Batch& batch, const KvCache& kv) override;
    void region(Pass pass, const std::function<void()>& body) override;
    bool replays() const override { return _replays; }
    void setReplays(bool replay) override { _replays = replay; }
    int64_t kernelsPerStep() const override { return _kernelsPerStep; }
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

private:
    // A captured step, and the CPU's work in it, in order.
    struct Step {
        std::unique_ptr<cuda::Graph> graph;
        std::vector<std::function<void()>> jobs;
    };
    // Rows of a weight's product: where they go.
    struct Product {
        const Weight& w;
        const float* bias = nullptr;
        float* y = nullptr;
    };

    void setUp();
    void pass(Pass which, const std::function<void()>& body);
    void record(Pass which, const std::function<void()>& body);
    void replay(const Step& step);
    void onHost(std::function<void()> job);
    bool few() const { return _rows <= cuda::kMaxMatvecRows; }
    int rows() const { return static_cast<int>(_rows); }
    void beginExperts();
    void collectUses();
    void fillSlots(const std::vector<std::pair<int32_t, int32_t>>& wanted);
    void settleAhead();
    void listMissing();
    int32_t* expertRow(size_t table, int32_t row) const { return at<int32_t>(table) + static_cast<int64_t>(row) * _limits.experts; }
    int64_t addTiles(const Batch& batch, int32_t* numbers, const GpuScratch::BatchBlock& block);
    void addStates(const Batch& batch, const KvCache& kv, int32_t* numbers, const GpuScratch::BatchBlock& block);
    void addSources(const Batch& batch, int32_t* numbers, const GpuScratch::BatchBlock& block) const;
    void pointAt(const GpuScratch::BatchBlock& block);
    template <typename T> T* at(size_t offset) const { return reinterpret_cast<T*>(_scratch.as<uint8_t>() + offset); }
    float* floats(size_t offset) const { return at<float>(offset); }
    cuda::HalfRows halves(size_t hi, size_t lo) const { return {at<uint16_t>(hi), hi == lo ? nullptr : at<uint16_t>(lo)}; }
    // The forms of few rows that the products with these matrices read.
    cuda::RowOutputs formsFor(std::initializer_list<Matrix> readers, size_t floatsAt, size_t quantizedAt, int64_t formRows, int64_t cols) const;
    cuda::MatvecInput input(const cuda::RowOutputs& forms) const { return {forms.floats, forms.quantized}; }

    void productsFew(const cuda::MatvecInput& x, int rows, std::initializer_list<Product> products);
    void addFew(const cuda::MatvecInput& x, const Weight& w, const float* bias);
    void gatedFew(const cuda::MatvecInput& x, const DenseWeights& w, const cuda::RowOutputs& hidden);
    void productMany(const cuda::HalfRows& x, const Weight& w, const float* bias, float* y, cuda::Store store);
    void attentionFew(const AttentionWeights& weights, const KvPages& pages, float eps);
    void attentionMany(const AttentionWeights& weights, const KvPages& pages, float eps);
    void readTable(const Weight& table, float* out);
    void deltaFew(const GatedDeltaWeights& weights, const cuda::DeltaStates& states, float eps);
    void deltaMany(const GatedDeltaWeights& weights, const cuda::DeltaStates& states, float eps);
    cuda::DeltaInputs deltaInputs() const;
    cuda::SharedAnswer sharedFew(const ExpertWeights& layer, const cuda::RowOutputs& normed);
    cuda::SharedAnswer sharedMany(const ExpertWeights& layer, const cuda::HalfRows& normed);
    void denseFew(const DenseWeights& weights, float eps);
    void denseShared(const DenseWeights& weights, const cuda::RowOutputs& normed, const cuda::RowOutputs& hidden);
    void denseMany(const DenseWeights& weights, float eps);
    void feedMany(const cuda::HalfRows& x, const Weight& gate, const Weight& up, const Weight& down, float* y, cuda::Store store);
    void expertsFew(const ExpertWeights& weights, float eps);
    void expertsInSlots(const ExpertWeights& weights, const cuda::RowOutputs& normed, float eps);
    void hiddenOfExperts(const cuda::MatvecInput& x, const ExpertStacks& w, const int32_t* which, int32_t used, const cuda::RowOutputs& hidden);
    const int32_t* foreseeNext(const ExpertWeights& weights, float eps);
    void fetchAheadOf(const ExpertWeights& next);
    void expertsMany(const ExpertWeights& weights, float eps);
    void expertProductMany(const cuda::HalfRows& x, const WeightStack& w, const MatrixStack& slots, int32_t row, const cuda::ExpertGroups& groups,
                           bool gather, float* y);
    cuda::HeadPreparation preparation(const AttentionWeights& weights, float eps) const;

    cuda::Stream _stream;
    cuda::CudaMemory _memory;
    Allocator _allocator;
    const int _threads;
    std::unique_ptr<CudaTransfers> _transfers;
    std::unique_ptr<WeightStream> _weights;
    std::unique_ptr<ExpertSlotManager> _slots;
    std::unique_ptr<DevicePlacer> _placer;
    StepLimits _limits;
    std::optional<GpuScratch> _layout;
    Buffer _scratch;
    std::unique_ptr<cuda::PinnedBuffer> _numbers;  // what begin() uploads
    std::unique_ptr<cuda::PinnedBuffer> _token;
    std::unique_ptr<cuda::PinnedBuffer> _mailbox;
    std::unique_ptr<HostShare> _share;  // where the CPU computes rows or experts
    // Where experts are in slots.
    std::unique_ptr<cuda::PinnedBuffer> _tables;  // what the device's tables are uploaded from
    std::unique_ptr<CudaExpertLoads> _loads;
    std::unique_ptr<ExpertPrefetcher> _prefetcher;
    std::unique_ptr<ExpertMisses> _misses;
    Prefetch _foresight = Prefetch::Off;
    uint64_t _tableVersion = 0;  // of the slots' table, as it was uploaded last
    bool _tableUploaded = false, _passFailed = false;
    int64_t _manyRows = 0;  // of the last batch, if it was of many rows
    // Experts of the next layer come on a stream beside the one that computes.
    std::unique_ptr<cuda::Stream> _ahead;
    cuda::Event _aheadForked, _aheadDone;
    bool _aheadRuns = false;

    // The batch at hand.
    int64_t _rows = 0, _logitRows = 0;
    cuda::BatchRows _batch;
    const int32_t *_tokens = nullptr, *_wanted = nullptr, *_sources = nullptr, *_joinedRows = nullptr;
    cuda::DeltaBatch _states;
    cuda::RowRanges _deltaTiles;
    bool _deltaInTiles = false;  // or row after row
    cuda::QueryTiles _tiles;

    const pid_t _process = ::getpid();
    std::atomic<bool> _withoutRecord{false};  // a step could not be captured
    std::atomic<bool> _replays;  // these two are also asked for while a step runs
    std::atomic<int64_t> _kernelsPerStep{0};
    std::map<std::tuple<Pass, int64_t, int64_t>, Step> _steps;  // by rows, and rows that want logits
    std::vector<std::function<void()>>* _recorded = nullptr;  // where the CPU's work goes while a step is captured
};

}  // namespace sharpi
