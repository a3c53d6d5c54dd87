// See memory_plan.h.
#include "planning/memory_plan.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "core/launch_rows.h"
#include "experts/expert_staging.h"
#include "experts/ram_experts.h"
#include "placement/model_weights.h"
#include "placement/placement.h"

namespace sharpi {

namespace {

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

// See KvPages.
static int32_t valuePrefix(const AttentionSpec& a) {
    if (a.latent) return a.latent->rank;
    return a.valuesAreKeys ? a.headDim : 0;
}

std::vector<KvLayerShape> kvShapes(const ModelSpec& spec) {
    std::vector<KvLayerShape> shapes;
    for (const LayerSpec* layer : spec.loadedLayers()) {
        const auto& a = layer->attention;
        if (!a) shapes.emplace_back();
        else shapes.push_back({a->kvHeads, a->headDim, a->reach, a->kvLayer, valuePrefix(*a)});
    }
    for (const CompressorSpec* c : spec.compressors()) {
        shapes.push_back({1, c->width(), {c->span(), 0}});
        shapes.back().floats = true;
        shapes.push_back({1, c->headDim, {}, -1, c->headDim, c->blockTokens});
    }
    return shapes;
}

KvRoom kvRoom(const EngineOptions& options) { return {options.mostCached(), batchRows(options), options.sequences}; }

size_t kvBytes(const ModelSpec& spec, const EngineOptions& options) {
    return KvCache::bytesFor(kvShapes(spec), options.kvType, kvRoom(options));
}

size_t kvBytesIfAllSeen(const ModelSpec& spec, const EngineOptions& options) {
    // Blocks that are not over are no part of what a layer sees.
    std::vector<KvLayerShape> whole, pending;
    for (const KvLayerShape& shape : kvShapes(spec)) (shape.floats ? pending : whole).push_back(shape);
    return KvCache::bytesFor(whole, options.kvType, kvRoom(options).tokens) +
           (pending.empty() ? 0 : KvCache::bytesFor(pending, options.kvType, kvRoom(options)));
}

// The most rows that a token reads of each of kvShapes(): those of blocks that an indexer chooses, or all.
static std::vector<int64_t> mostRowsRead(const ModelSpec& spec) {
    std::vector<int64_t> most(spec.loadedLayers().size(), INT64_MAX);
    for (const LayerSpec& layer : spec.layers) {
        if (!layer.attention || !layer.attention->compressor) continue;
        const std::optional<IndexerSpec>& indexer = layer.attention->indexer;
        most.insert(most.end(), {INT64_MAX, indexer ? int64_t{indexer->topK} : INT64_MAX});
        if (indexer) most.insert(most.end(), {INT64_MAX, INT64_MAX});
    }
    return most;
}

size_t kvBytesRead(const ModelSpec& spec, KvType type, int64_t tokens) {
    const std::vector<KvLayerShape> shapes = kvShapes(spec);
    const std::vector<int64_t> most = mostRowsRead(spec);
    size_t bytes = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
        const KvLayerShape& layer = shapes[i];
        const int64_t seen = tokens - layer.reach.first(static_cast<int32_t>(std::max<int64_t>(tokens - 1, 0)));
        const int64_t rows = std::min(seen / layer.rowTokens, most[i]);
        bytes += static_cast<size_t>(rows * layer.elementsPerRow()) * kvElementBytes(layer.typeIn(type));
    }
    return bytes;
}

std::vector<RecurrentShape> recurrentShapes(const ModelSpec& spec) {
    std::vector<RecurrentShape> shapes;
    for (const LayerSpec* layer : spec.loadedLayers()) {
        RecurrentShape shape;
        if (layer->delta) shape = {layer->delta->convState(), layer->delta->matrixState()};
        if (layer->mamba) shape = {layer->mamba->convState(), layer->mamba->matrixState()};
        shapes.push_back(shape);
    }
    return shapes;
}

namespace {

// A model loaded over a memory that only counts.
struct Counted {
    Counted(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options)
        : memory(options.device.kind->granularity()),
          allocator(memory),
          trace(allocator, nullptr),
          layout(options.device.kind->layout()),
          stream(allocator, layout.value_or(DeviceLayout()), nullptr),
          slots(allocator, layout.value_or(ramSlotLayout())) {
        trace.note("start");
        if (layout) placer = std::make_unique<DevicePlacer>(allocator, *layout, stream, slots, nullptr);
        else placer = std::make_unique<MappedPlacer>(allocator, slots, nullptr);
        const Weights shapes(tensors);
        weights.emplace(spec, shapes, *placer, options.homes, slotBudget(options), options.context, trace);
    }

    CountingMemory memory;
    Allocator allocator;
    LoadTrace trace;
    std::optional<DeviceLayout> layout;
    WeightStream stream;
    ExpertSlotManager slots;
    std::unique_ptr<Placer> placer;
    std::optional<ModelWeights> weights;
};

// The staging buffers that single experts pass through on their way to slots.
size_t expertStagingBytes(const ExpertSlotManager& slots) {
    if (slots.capacity() == 0) return 0;
    std::vector<ExpertStacks> files;
    for (int32_t row = 0; row < slots.layers(); ++row) files.push_back(slots.file(row));
    return expertStaging(files).bytes();
}

}  // namespace

std::vector<TraceLine> plannedLines(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& asked) {
    EngineOptions options = asked;
    options.homes = normalized(spec, std::move(options.homes));
    const StepLimits limits = engineLimits(spec, tensors, options);
    Counted model(spec, tensors, options);
    RecurrentState states(model.allocator, recurrentShapes(spec), options.sequences);
    if (states.any()) model.trace.note("recurrent state");
    const KvCache kv(model.allocator, kvShapes(spec), options.kvType, kvRoom(options), std::move(states));
    model.trace.note("KV cache");
    const DeviceKind& kind = *options.device.kind;
    const Buffer scratch(model.allocator, kind.scratchBytes(limits, options.threads), "working memory");
    std::optional<Buffer> staging;
    if (const size_t bytes = model.layout ? expertStagingBytes(model.slots) : 0)
        staging.emplace(model.allocator, bytes, "staging for experts");
    model.trace.note("scratch");
    std::vector<TraceLine> lines(model.trace.lines().begin() + 1, model.trace.lines().end());
    TraceLine graphs;
    graphs.name = "graphs";
    graphs.asked = kind.recordBytes(limits);
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
    return std::min(std::max(options.batch, options.device.kind->promptTile(options.prompt)), options.mostCached());
}

int64_t headRows(const EngineOptions& options) {
    const int64_t wanted = std::clamp<int64_t>(2 * int64_t{options.sequences}, kMostDraftRows, kExactLaunchRows);
    return std::min(batchRows(options), wanted);
}

SlotBudget slotBudget(const EngineOptions& options) { return {options.expertSlotBytes, headRows(options)}; }

StepLimits engineLimits(const ModelSpec& spec, const TensorTable& tensors, const EngineOptions& options) {
    StepLimits limits = stepLimits(spec, tensors, batchRows(options), options.context, options.kvType);
    limits.prompt = options.prompt;
    limits.headRows = headRows(options);
    limits.expertSlots = options.device.kind->keepsWeights() && expertsAway(spec, options.homes);
    return limits;
}

}  // namespace sharpi
