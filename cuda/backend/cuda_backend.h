// The blocks on one NVIDIA GPU, with weights in its memory or brought over as they are used.
//
// A batch's rows are exact or fast. Exact rows follow core/contract.h, so they have the CPU's bits: decode rows always,
// prompt rows in PromptMode::Exact. Fast rows, which are the other prompt rows, go through tensor cores. Each block
// takes both ranges, and a row's range alone decides its bits.
//
// A batch of decode rows alone is a step. Its launches are captured once for each number of rows, and of rows that want
// logits, and replayed. In a step the CPU may compute a part of the feed-forward rows, and experts that are in no slot
// (host_share.h): that work is listed beside the captured launches. In other batches the GPU computes all, and what is
// not resident is brought to it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

#include "backend/cuda_expert_loads.h"
#include "backend/cuda_transfers.h"
#include "cpu/share/host_share.h"
#include "cpu/share/host_work.h"
#include "device/cuda_memory.h"
#include "device/stream.h"
#include "experts/expert_misses.h"
#include "kernels/attention/attention.h"
#include "kernels/delta/gated_delta.h"
#include "kernels/matmul/matmul.h"
#include "operations/backend.h"
#include "plan/gpu_scratch.h"

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
    // A captured step, and what the CPU does in it.
    struct Step {
        std::unique_ptr<cuda::Graph> graph;
        HostWork work{HostWork::When::Later};
    };
    // Steps of one shape share a capture: of a kind of pass, with as many rows, and as many that want logits.
    using Shape = std::tuple<Pass, int64_t, int64_t>;
    // A batch's activations in the forms that its products read.
    struct Activations {
        cuda::RowOutputs exact;  // [exact rows, cols]: floats and int8 blocks
        cuda::HalfRows fast;     // [fast rows, cols]
        int64_t cols = 0;
        // The exact rows from `first` on.
        cuda::MatvecInput from(int64_t first) const {
            return cuda::rowsFrom(cuda::MatvecInput{exact.floats, exact.quantized}, first, cols);
        }
    };
    // Rows of a weight's product: where they go.
    struct Product {
        const Weight& w;
        const float* bias = nullptr;
        float* y = nullptr;
    };

    void setUp();
    void beginExperts();
    void listMissing();
    void collectUses();
    void fillSlots(const std::vector<std::pair<int32_t, int32_t>>& wanted);
    int32_t* expertRow(size_t table, int32_t row) const {
        return at<int32_t>(table) + static_cast<int64_t>(row) * _limits.experts;
    }

    void launch(Pass which, const std::function<void()>& body);
    const Step* recorded(Pass which, const std::function<void()>& body);
    bool worthRecording(const Shape& shape);
    void replay(const Step& step);
    void pass(Pass which, const std::function<void()>& body, HostWork& work);
    void giveUp() noexcept;
    void settleAhead();

    template <typename T> T* at(size_t offset) const { return reinterpret_cast<T*>(_scratch.as<uint8_t>() + offset); }
    float* floats(size_t offset) const { return at<float>(offset); }
    cuda::HalfRows halves(size_t hi, size_t lo) const {
        return {at<uint16_t>(hi), hi == lo ? nullptr : at<uint16_t>(lo)};
    }
    int64_t exactRows() const { return _view.exactRows; }
    int64_t fastRows() const { return _view.fastRows(); }
    // Calls body(first, rows) for groups of the exact rows, of as many as a launch of the contract's products takes.
    template <typename Body> void forExactGroups(const Body& body) const {
        for (int64_t first = 0; first < exactRows(); first += cuda::kMaxMatvecRows) {
            body(first, static_cast<int>(std::min<int64_t>(cuda::kMaxMatvecRows, exactRows() - first)));
        }
    }
    // Calls body(part, begin) for each part of a matrix that is on the device at once: w's rows [begin, begin +
    // part.rows).
    template <typename Body> void forParts(const Weight& w, const Body& body) {
        if (w.resident()) {
            _weights->arrive(w.group);
            body(w, 0);
        } else if (_step) {
            _weights->forPieces(w.group,
                                [&](const std::vector<Matrix>& parts, int64_t begin) { body(parts[0], begin); });
        } else {
            _weights->forPieces(w.group, w.member, body);
        }
    }

    // `rows` exact rows in the forms that the products with these matrices read.
    cuda::RowOutputs exactForms(std::initializer_list<Matrix> readers, size_t floatsAt, size_t quantizedAt,
                                int64_t rows, int64_t cols) const;
    Activations normed(const float* weight, float eps, std::initializer_list<Matrix> readers,
                       float* exactFloats = nullptr, float* fastFloats = nullptr);
    Activations hiddenRows(const Matrix& reader, int64_t perRow) const;
    void products(const Activations& x, std::initializer_list<Product> products);
    void exactProducts(const Activations& x, std::vector<cuda::MatvecOutput> outputs);
    void fastProduct(const Activations& x, const Matrix& part, const float* bias, float* y, int64_t stride,
                     cuda::Store store);
    void addProduct(const Activations& x, const Weight& w, const float* bias);
    void gated(const Activations& x, const Weight& gate, const Weight& up, const Activations& hidden);
    void readTable(const Weight& table, float* out);
    cuda::HeadPreparation preparation(const AttentionWeights& weights, float eps) const;
    void attendExact(const AttentionWeights& weights, const cuda::HeadShape& shape, const KvPages& pages,
                     const float* queries, const Activations& attended);
    void attendFast(const AttentionWeights& weights, const cuda::HeadShape& shape, const KvPages& pages,
                    const float* queries, const Activations& attended);
    void denseShared(const DenseWeights& weights, const Activations& in, const Activations& hidden);
    void deltaExact(const GatedDeltaWeights& weights, const cuda::DeltaInputs& in, const cuda::DeltaStates& states,
                    float eps, const Activations& attended);
    void deltaFast(const GatedDeltaWeights& weights, const cuda::DeltaInputs& in, const cuda::DeltaStates& states,
                   float eps, const Activations& attended);

    void routeRows(const ExpertWeights& weights, const Activations& in);
    // What the shared expert adds to the rows from `first` on.
    cuda::SharedAnswer sharedAnswer(const ExpertWeights& layer, int64_t first) const;
    void sharedExpert(const ExpertWeights& layer, const Activations& in);
    void expertsOfStep(const ExpertWeights& weights, const Activations& in);
    void expertsInSlots(const ExpertWeights& weights, const Activations& in, float eps);
    void expertsByStack(const ExpertWeights& weights, const Activations& in);
    void pairProducts(const Activations& x, const MatrixStack& w, const int32_t* which, int32_t used, bool ofRows,
                      float* y);
    void hiddenOfExperts(const Activations& x, const ExpertStacks& w, const int32_t* which, int32_t used,
                         const Activations& hidden);
    void expertProduct(const Activations& x, const WeightStack& w, const MatrixStack& slots, const ExpertWeights& layer,
                       const cuda::ExpertGroups& groups, bool ofRows, float* y);
    const int32_t* foreseeNext(const ExpertWeights& weights, float eps);
    void fetchAheadOf(const ExpertWeights& next);

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
    int64_t _uncountedRows = 0;  // of the last batch, if it was no step: its uses of experts are still on the device
    // Experts of the next layer come on a stream beside the one that computes.
    std::unique_ptr<cuda::Stream> _ahead;
    cuda::Event _aheadForked, _aheadDone;
    bool _aheadRuns = false;

    // The batch at hand.
    BatchView _view;
    int64_t _logitRows = 0;
    bool _step = false;         // it has decode rows alone
    HostWork* _work = nullptr;  // of the pass whose launches are being made

    const pid_t _process = ::getpid();
    std::atomic<bool> _withoutRecord{false};  // a step could not be captured
    std::atomic<bool> _replays;               // these two are also asked for while a step runs
    std::atomic<int64_t> _kernelsPerStep{0};
    std::map<Shape, Step> _steps;
    std::set<Shape> _met;  // shapes of many rows that have come before
};

}  // namespace sharpi
