// See memory_plan.h.
#include "engine/memory_plan.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>

#include "cpu/cpu_backend.h"
#include "experts/expert_staging.h"
#include "placement/model_weights.h"
#include "placement/placement.h"
#include "plan/gpu_scratch.h"

namespace sharpi {

namespace {

// What driver and runtime keep for the captured steps and the kernels' code, measured.
constexpr size_t kGraphBytes = size_t{16} << 20;
// More of both, and streams, where experts are in slots.
constexpr size_t kSlotGraphBytes = size_t{24} << 20;

// Addresses with nothing behind them.
class CountingMemory : public DeviceMemory {
public:
    explicit CountingMemory(size_t granularity) : _granularity(granularity) {}
    std::string name() const override { return "the plan"; }
    size_t granularity() const override { return _granularity; }
    size_t freeBytes() const override { return kCapacity - _used; }
    void* reserve(size_t bytes) override {
        void* at = reinterpret_cast<void*>(_next);
        _next += bytes;
        return at;
    }
    void release(void*, size_t) noexcept override {}
    bool commit(void*, size_t bytes) override {
        _used += bytes;
        return true;
    }
    void decommit(void*, size_t bytes) noexcept override { _used -= bytes; }
    void upload(void*, const void*, size_t) override {}
    void download(void*, const void*, size_t) override {}
    void zero(void*, size_t) override {}

private:
    static constexpr size_t kCapacity = size_t{1} << 46;
    size_t _granularity, _used = 0;
    uintptr_t _next = uintptr_t{1} << 46;
};

}  // namespace

std::vector<KvLayerShape> kvShapes(const ModelSpec& spec) {
    std::vector<KvLayerShape> shapes;
    for (const LayerSpec* layer : spec.loadedLayers()) {
        shapes.push_back(layer->attention ? KvLayerShape{layer->attention->kvHeads, layer->attention->headDim}
                                          : KvLayerShape());
    }
    return shapes;
}

std::vector<RecurrentShape> recurrentShapes(const ModelSpec& spec) {
    std::vector<RecurrentShape> shapes;
    for (const LayerSpec* layer : spec.loadedLayers()) {
        shapes.push_back(layer->delta ? RecurrentShape{layer->delta->convState(), layer->delta->matrixState()}
                                      : RecurrentShape());
    }
    return shapes;
}

namespace {

// A model loaded over a memory that only counts.
struct Counted {
    Counted(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options)
        : memory(options.cuda ? size_t{2} << 20 : size_t{4} << 10),
          allocator(memory),
          trace(allocator, nullptr),
          stream(allocator, gpuLayout(), nullptr),
          slots(allocator, gpuLayout()) {
        trace.note("start");
        if (options.cuda) placer = std::make_unique<DevicePlacer>(allocator, gpuLayout(), stream, slots, nullptr);
        else placer = std::make_unique<MappedPlacer>(allocator);
        const Weights shapes(tensors);
        weights.emplace(spec, shapes, *placer, options.homes, options.expertSlotBytes, options.context, trace);
    }

    CountingMemory memory;
    Allocator allocator;
    LoadTrace trace;
    WeightStream stream;
    ExpertSlotManager slots;
    std::unique_ptr<Placer> placer;
    std::optional<ModelWeights> weights;
};

// What single experts pass through on their way.
size_t expertStagingBytes(const ExpertSlotManager& slots) {
    if (slots.capacity() == 0) return 0;
    std::vector<ExpertStacks> files;
    for (int32_t row = 0; row < slots.layers(); ++row) files.push_back(slots.file(row));
    return expertStaging(files).bytes();
}

size_t withExpertSlots(const ModelSpec& spec, const TensorTable& tensors, EngineOptions options, size_t bytes) {
    options.expertSlotBytes = bytes;
    return plannedBytes(spec, tensors, options);
}

// The most for slots, in whole steps, with which the plan takes no more than `available`; nothing where it takes more
// without any.
std::optional<size_t> fittingSlots(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options,
                                   size_t most, size_t available) {
    constexpr size_t kStep = size_t{1} << 20;
    if (withExpertSlots(spec, tensors, options, 0) > available) return std::nullopt;
    size_t low = 0, high = most / kStep;
    while (low < high) {
        const size_t middle = (low + high + 1) / 2;
        if (withExpertSlots(spec, tensors, options, middle * kStep) <= available) low = middle;
        else high = middle - 1;
    }
    return low * kStep;
}

}  // namespace

std::vector<TraceLine> plannedLines(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& asked) {
    EngineOptions options = asked;
    options.homes = normalized(spec, std::move(options.homes));
    const StepLimits limits = engineLimits(spec, tensors, options);
    Counted model(spec, tensors, options);
    RecurrentState states(model.allocator, recurrentShapes(spec), options.sequences);
    if (states.any()) model.trace.note("recurrent state");
    const KvCache kv(model.allocator, kvShapes(spec), options.kvType, options.context, std::move(states));
    model.trace.note("KV cache");
    const size_t scratchBytes =
        options.cuda ? GpuScratch(limits).bytes() : CpuBackend::scratchBytes(options.threads, limits);
    const Buffer scratch(model.allocator, scratchBytes, "working memory");
    std::optional<Buffer> staging;
    if (const size_t bytes = expertStagingBytes(model.slots))
        staging.emplace(model.allocator, bytes, "staging for experts");
    model.trace.note("scratch");
    std::vector<TraceLine> lines(model.trace.lines().begin() + 1, model.trace.lines().end());
    TraceLine graphs;
    graphs.name = "graphs";
    graphs.asked = options.cuda ? kGraphBytes + (limits.expertSlots ? kSlotGraphBytes : 0) : 0;
    graphs.taken = static_cast<int64_t>(graphs.asked);
    lines.push_back(graphs);
    return lines;
}

size_t plannedBytes(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options) {
    int64_t total = 0;
    for (const TraceLine& line : plannedLines(spec, tensors, options)) total += line.taken;
    return static_cast<size_t>(total);
}

std::vector<ExpertSlotManager::PoolShape> expertPools(const ModelSpec& spec, const TensorTable& tensors,
                                                      const EngineOptions& asked) {
    EngineOptions options = asked;
    options.homes = normalized(spec, std::move(options.homes));
    return Counted(spec, tensors, options).slots.pools();
}

int64_t batchRows(const EngineOptions& options) {
    const int64_t least = options.cuda && options.prompt == PromptMode::Fast ? kPromptTile : 1;
    return std::min(std::max(options.batch, least), options.context);
}

StepLimits engineLimits(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options) {
    StepLimits limits = stepLimits(spec, tensors, batchRows(options), options.context, options.kvType);
    limits.prompt = options.prompt;
    limits.expertSlots = options.cuda && expertsAway(spec, options.homes);
    return limits;
}

FittedPlan fittedPlan(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options,
                      size_t available) {
    EngineOptions tried = options;
    size_t least = plannedBytes(spec, tensors, tried);
    FittedPlan best{options.homes, options.expertSlotBytes};
    if (least <= available) return best;
    if (expertsAway(spec, tried.homes)) {
        if (const auto bytes = fittingSlots(spec, tensors, tried, options.expertSlotBytes, available))
            return {options.homes, *bytes};
        tried.expertSlotBytes = 0;
    }
    const size_t mostSlots = expertsAway(spec, options.homes) ? options.expertSlotBytes : available;
    std::set<int32_t, std::greater<>> ranks;
    for (const TensorHome& home : options.homes) {
        if (home.home == Home::Vram) ranks.insert(home.rank);
    }
    // One after the other: slots may take more than what leaves, so fewer resident tensors are not always fewer bytes.
    for (const int32_t rank : ranks) {
        for (TensorHome& home : tried.homes) {
            if (home.rank >= rank && home.home == Home::Vram) home.home = Home::Direct;
        }
        tried.homes = normalized(spec, tried.homes);
        const size_t taken = plannedBytes(spec, tensors, tried);
        // What is left goes to single experts.
        if (taken <= available)
            return {tried.homes,
                    expertsAway(spec, tried.homes) ? *fittingSlots(spec, tensors, tried, mostSlots, available) : 0};
        if (taken >= least) continue;
        least = taken;
        best = {tried.homes, 0};
    }
    return best;
}

std::string fittingAdvice(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options,
                          size_t available) {
    const auto fits = [&](int64_t context, int64_t batch) {
        EngineOptions tried = options;
        tried.context = context;
        tried.batch = batch;
        return plannedBytes(spec, tensors, tried) <= available;
    };
    for (int64_t batch = batchRows(options); batch >= 1; batch = batch > 64 ? std::max<int64_t>(batch / 2, 64) : 0) {
        if (fits(options.context, batch)) return "a batch of " + std::to_string(batch) + " would fit";
        int64_t low = 0, high = options.context;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (fits(middle, batch)) low = middle;
            else high = middle - 1;
        }
        if (low >= std::min<int64_t>(512, options.context)) {
            const std::string with = batch < options.batch ? " with a batch of " + std::to_string(batch) : "";
            return "a context of " + std::to_string(low) + with + " would fit";
        }
    }
    return options.cuda ? "the model does not fit there: use device cpu" : "a smaller context or batch needs less";
}

}  // namespace sharpi
