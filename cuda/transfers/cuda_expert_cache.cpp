// See cuda_expert_cache.h.
#include "transfers/cuda_expert_cache.h"

#include <algorithm>
#include <set>

namespace sharpi {

// What is wanted, then the first expert of each layer, the second, ...
LayerExperts CudaExpertCache::fillingOrder(const LayerExperts& wanted) const {
    LayerExperts order;
    std::set<std::pair<int32_t, int32_t>> known;
    const auto add = [&](int32_t layer, int32_t expert) {
        if (known.emplace(layer, expert).second) order.emplace_back(layer, expert);
    };
    for (const auto& [layer, expert] : wanted) add(layer, expert);
    for (int32_t expert = 0; expert < _limits.experts; ++expert) {
        for (int32_t layer = 0; layer < _limits.expertLayerCount(); ++layer) {
            if (expert < _limits.expertLayers[static_cast<size_t>(layer)].second) add(layer, expert);
        }
    }
    return order;
}

void CudaExpertCache::takeTables(const StepLimits& limits, const GpuScratch& layout, uint8_t* memory) {
    _limits = limits;
    _layout = &layout;
    _memory = memory;
    profileLayers(_profiler, limits);
    const size_t experts = limits.expertLayers.size() * static_cast<size_t>(limits.experts);
    if (experts) _stream.zero(_memory + layout.expertUses, sizeof(uint32_t) * experts);
    if (limits.expertSlots) _tables = std::make_unique<cuda::PinnedBuffer>(2 * sizeof(int32_t) * experts);
}

void CudaExpertCache::start(const ExpertUse& use, const CudaTransfers& transfers, RamLevel* level) {
    _foresight = prefetchWanted();
    _level = level;
    if (_slots.capacity() > 0) {
        std::vector<ExpertStacks> files;
        for (int32_t layer = 0; layer < _slots.layers(); ++layer) files.push_back(_slots.file(layer));
        _loads = std::make_unique<CudaExpertLoads>(_allocator, _stream, transfers.files(), files);
        _slots.setLoads(_loads.get());
    }
    _prefetcher = std::make_unique<ExpertPrefetcher>(_slots, _profiler, _foresight);
    const auto reachable = [&transfers, level](const uint8_t* host, size_t bytes) {
        return level ? level->reachable(host, bytes) : transfers.reachable(host, bytes);
    };
    _misses = std::make_unique<ExpertMisses>(_slots, *_prefetcher, _profiler, use, _foresight, reachable, ram());
    if (_level) _slots.setReluctant();
    fill(warmExperts(use, _limits.expertLayers));
    if (_foresight == Prefetch::NextLayer)
        _ahead = std::make_unique<cuda::Stream>(_stream.device(), cuda::Stream::Role::Feed);
    _tableUploaded = false;
}

void CudaExpertCache::fill(const LayerExperts& wanted) {
    const auto load = [this](LayerExperts order) {
        _prefetcher->fill(std::move(order));
        while (_prefetcher->filling()) {
            _slots.beginPass();
            _prefetcher->pump(0);
        }
        if (_loads) _loads->settle();
        _slots.beginPass();
    };
    LayerExperts order = fillingOrder(wanted);
    for (size_t first = 0; _level && first < order.size() && _slots.resident() < _slots.capacity();) {
        const size_t count = _level->readAhead(_slots, order, first);
        const auto begin = order.begin() + static_cast<std::ptrdiff_t>(first);
        load({begin, begin + static_cast<std::ptrdiff_t>(count)});
        first += count;
    }
    if (!_level) load(std::move(order));
    _slots.addWanted(wanted);
    if (!_level) return;
    // RAM is to hold what VRAM does not.
    LayerExperts outside;
    for (const auto& [layer, expert] : wanted) {
        if (_slots.tryGet(layer, expert) < 0) outside.emplace_back(layer, expert);
    }
    _level->experts().fill(outside);
}

// The slots' policy hears of a batch with prompt rows here: a prompt counts for as much as some of the tokens that will
// follow it.
void CudaExpertCache::collectUses() {
    constexpr double kPromptTokens = 64;
    const auto stride = static_cast<size_t>(_limits.experts);
    std::vector<uint32_t> uses(_limits.expertLayers.size() * stride);
    if (uses.empty()) return;
    _stream.download(uses.data(), _memory + _layout->expertUses, sizeof(uint32_t) * uses.size());
    _stream.zero(_memory + _layout->expertUses, sizeof(uint32_t) * uses.size());
    _profiler.addUses(uses.data(), _limits.experts);
    const double weight = _uncountedRows ? std::min(1.0, kPromptTokens / static_cast<double>(_uncountedRows)) : 0;
    _uncountedRows = 0;
    // Layer by layer, the last layers' experts would be the last to be evicted.
    for (int32_t e = 0; weight > 0 && e < _slots.experts(); ++e) {
        for (int32_t layer = 0; layer < _slots.layers(); ++layer) {
            const uint32_t times = uses[static_cast<size_t>(layer) * stride + static_cast<size_t>(e)];
            if (!times) continue;
            _slots.addUses(layer, e, static_cast<float>(times * weight));
            // RAM is to hold what VRAM does not.
            if (_level && _slots.tryGet(layer, e) < 0)
                _level->experts().addUses(layer, e, static_cast<float>(times * weight));
        }
    }
}

ExpertCounts CudaExpertCache::counts() {
    ExpertCounts counts = _profiler.counts();
    counts.capacity = _slots.capacity();
    counts.resident = _slots.resident();
    counts.slotBytes = _slots.bytes();
    if (_level) _level->addTo(counts);
    return counts;
}

void CudaExpertCache::beginPass(bool step, bool draft, int64_t rows, WeightStream& stream, const DevicePlacer& placer) {
    if (_passFailed) {
        _slots.passFailed();
        if (_level) _level->experts().passFailed();
    }
    _passFailed = false;
    if (_level) _level->experts().beginPass(rows);
    _prefetcher->pump(_misses->takeFetched());  // before the pass: then almost everything may be overwritten
    _slots.beginPass();
    if (!step || _uncountedRows) collectUses();
    if (!step) {
        _uncountedRows = rows;
        try {
            listMissing(draft, stream, placer);
        } catch (...) {
            _passFailed = true;  // slots in RAM were given to experts that nobody will read
            throw;
        }
    }
    if (!step || !_tableUploaded || _slots.tableVersion() != _tableVersion) uploadTables(step);
}

// A batch that is no step brings over the experts that are in no slot.
void CudaExpertCache::listMissing(bool draft, WeightStream& stream, const DevicePlacer& placer) {
    const std::vector<int32_t>& table = _slots.table();
    int32_t* const ordinals = _tables->as<int32_t>() + table.size();
    std::vector<std::vector<int32_t>> missing(static_cast<size_t>(_slots.layers()));
    for (int32_t layer = 0; layer < _slots.layers(); ++layer) {
        const size_t first = static_cast<size_t>(layer) * static_cast<size_t>(_limits.experts);
        std::vector<int32_t>& ofLayer = missing[static_cast<size_t>(layer)];
        for (int32_t e = 0; e < _slots.file(layer).gate.count; ++e) {
            const size_t at = first + static_cast<size_t>(e);
            const bool isMissing = table[at] < 0;
            ordinals[at] = isMissing ? static_cast<int32_t>(ofLayer.size()) : -1;
            if (isMissing) ofLayer.push_back(e);
        }
    }
    // Only what the pass goes through is read, and only that may be given room in RAM.
    std::vector<std::vector<int32_t>> passed = missing;
    const auto model = passed.end() - _limits.predictionExperts;
    std::for_each(draft ? passed.begin() : model, draft ? model : passed.end(), [](auto& layer) { layer.clear(); });
    const RamExperts::Origins origins = _level ? _level->experts().originsOf(passed) : RamExperts::Origins();
    for (int32_t layer = 0; layer < _slots.layers(); ++layer) {
        const auto l = static_cast<size_t>(layer);
        const std::vector<int32_t>& groups = placer.stackGroups(layer);
        for (size_t g = 0; g < groups.size(); ++g) {
            const size_t which = _slots.file(layer).gated() || g == 0 ? g : 2;
            std::vector<StreamOrigin> from;
            for (size_t i = 0; _level && i < passed[l].size(); ++i) from.push_back(origins[l][i][which]);
            stream.setWanted(groups[g], missing[l], std::move(from));
        }
    }
}

void CudaExpertCache::uploadTables(bool step) {
    const std::vector<int32_t>& table = _slots.table();
    const size_t bytes = sizeof(int32_t) * table.size();
    auto* const host = _tables->as<int32_t>();
    std::copy(table.begin(), table.end(), host);
    _stream.uploadPinned(tableOf(0), host, bytes);
    if (!step) _stream.uploadPinned(ordinalsOf(0), host + table.size(), bytes);
    _tableVersion = _slots.tableVersion();
    _tableUploaded = true;
}

// While this layer's experts are multiplied, and until the next layer looks for its own.
void CudaExpertCache::fetchAhead(int32_t expertLayer, cuda::DeviceOrders* orders) {
    if (!_ahead) return;
    _stream.record(_aheadForked);
    _ahead->wait(_aheadForked);
    cuda::fetchAhead(*_ahead, _slots.slots(expertLayer), orders, tableOf(expertLayer));
    _ahead->record(_aheadDone);
    _aheadRuns = true;
}

void CudaExpertCache::awaitFetchedAhead() {
    if (_aheadRuns) _stream.wait(_aheadDone);
    _aheadRuns = false;
}

void CudaExpertCache::settle() {
    _aheadRuns = false;
    if (!_ahead) return;
    if (_ahead->capturing()) _ahead = std::make_unique<cuda::Stream>(_stream.device(), cuda::Stream::Role::Feed);
    else _ahead->synchronize();
}

}  // namespace sharpi
