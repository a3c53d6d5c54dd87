// See memory_plan.h.
#include "engine/memory_plan.h"

#include <algorithm>
#include <functional>
#include <set>

#include "engine/cpu_backend.h"
#include "engine/gpu_scratch.h"
#include "engine/model_weights.h"

namespace sharpi {

namespace {

// What driver and runtime keep for the captured steps and the kernels' code, measured.
constexpr size_t kGraphBytes = size_t{16} << 20;

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
    for (const LayerSpec& layer : spec.layers) {
        shapes.push_back(layer.attention ? KvLayerShape{layer.attention->kvHeads, layer.attention->headDim} : KvLayerShape());
    }
    return shapes;
}

std::vector<RecurrentShape> recurrentShapes(const ModelSpec& spec) {
    std::vector<RecurrentShape> shapes;
    for (const LayerSpec& layer : spec.layers) {
        shapes.push_back(layer.delta ? RecurrentShape{layer.delta->convState(), layer.delta->matrixState()} : RecurrentShape());
    }
    return shapes;
}

std::vector<TraceLine> plannedLines(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options) {
    const int64_t batch = std::min(options.batch, options.context);
    const StepLimits limits = stepLimits(spec, tensors, batch, options.context, options.kvType);
    CountingMemory memory(options.cuda ? size_t{2} << 20 : size_t{4} << 10);
    Allocator allocator(memory);
    LoadTrace trace(allocator, false);
    trace.note("start");
    std::unique_ptr<Placer> placer;
    WeightStream stream(allocator, gpuLayout(), nullptr);
    if (options.cuda) {
        placer = std::make_unique<DevicePlacer>(allocator, gpuLayout(), stream);
    } else {
        placer = std::make_unique<MappedPlacer>(allocator);
    }
    const Weights shapes(tensors);
    const ModelWeights weights(spec, shapes, *placer, options.homes, options.context, trace);
    RecurrentState states(allocator, recurrentShapes(spec), options.sequences);
    if (states.any()) trace.note("recurrent state");
    const KvCache kv(allocator, kvShapes(spec), options.kvType, options.context, std::move(states));
    trace.note("KV cache");
    const size_t scratchBytes = options.cuda ? GpuScratch(limits).bytes() : CpuBackend::scratchBytes(options.threads, limits);
    const Buffer scratch(allocator, scratchBytes, "working memory");
    trace.note("scratch");
    std::vector<TraceLine> lines(trace.lines().begin() + 1, trace.lines().end());
    TraceLine graphs;
    graphs.name = "graphs";
    graphs.asked = options.cuda ? kGraphBytes : 0;
    graphs.taken = static_cast<int64_t>(graphs.asked);
    lines.push_back(graphs);
    return lines;
}

size_t plannedBytes(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options) {
    int64_t total = 0;
    for (const TraceLine& line : plannedLines(spec, tensors, options)) total += line.taken;
    return static_cast<size_t>(total);
}

Homes fittedHomes(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options, size_t available) {
    EngineOptions tried = options;
    size_t least = plannedBytes(spec, tensors, tried);
    Homes best = options.homes;
    if (least <= available) return best;
    std::set<int32_t, std::greater<>> ranks;
    for (const TensorHome& home : options.homes) {
        if (home.home == Home::Vram) ranks.insert(home.rank);
    }
    // One after the other: slots may take more than what leaves, so fewer resident tensors are not always fewer bytes.
    for (const int32_t rank : ranks) {
        for (TensorHome& home : tried.homes) {
            if (home.rank >= rank) home.home = Home::Direct;
        }
        const size_t taken = plannedBytes(spec, tensors, tried);
        if (taken <= available) return tried.homes;
        if (taken >= least) continue;
        least = taken;
        best = tried.homes;
    }
    return best;
}

std::string fittingAdvice(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options, size_t available) {
    const auto fits = [&](int64_t context, int64_t batch) {
        EngineOptions tried = options;
        tried.context = context;
        tried.batch = batch;
        return plannedBytes(spec, tensors, tried) <= available;
    };
    for (int64_t batch = std::min(options.batch, options.context); batch >= 1; batch = batch > 64 ? batch / 2 : 0) {
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
