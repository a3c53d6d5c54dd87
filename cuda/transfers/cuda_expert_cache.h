// The cache of single experts of a model on the GPU, with all that belongs to it: the slots, the copies that fill them,
// the prefetcher, the plan for what a step misses, and the tables that kernels read. Layers are numbered by
// ExpertFfnSpec::expertLayer.
#pragma once

#include <memory>
#include <vector>

#include "device/stream.h"
#include "experts/expert_misses.h"
#include "experts/expert_prefetcher.h"
#include "experts/expert_profiler.h"
#include "experts/expert_slots.h"
#include "kernels/experts/expert_cache.h"
#include "operations/backend.h"
#include "plan/gpu_scratch.h"
#include "transfers/cuda_expert_loads.h"
#include "transfers/cuda_transfers.h"
#include "transfers/ram_level.h"

namespace sharpi {

class CudaExpertCache {
public:
    CudaExpertCache(Allocator& allocator, cuda::Stream& stream)
        : _allocator(allocator), _stream(stream), _slots(allocator, gpuLayout()) {}

    ExpertSlotManager& slots() { return _slots; }
    // The slots that a layer's experts may be in; none if the experts are resident.
    ExpertStacks slotsOf(int32_t expertLayer) const {
        return expertLayer < _slots.layers() ? _slots.slots(expertLayer) : ExpertStacks{};
    }
    ExpertMisses& misses() { return *_misses; }
    // Where experts are that are in no slot, if the model is larger than RAM; else nullptr.
    RamExperts* ram() const { return _level ? &_level->experts() : nullptr; }
    ExpertAccessProfiler& profiler() { return _profiler; }
    ExpertCounts counts();

    // The working memory is there. memory: where the layout's offsets begin.
    void takeTables(const StepLimits& limits, const GpuScratch& layout, uint8_t* memory);
    // Fills the slots with what is wanted first, and then with others. Returns when they are there. level: what holds
    // the other experts if the model is larger than RAM, else nullptr; it must outlive this object.
    void start(const ExpertUse& use, const CudaTransfers& transfers, RamLevel* level);

    // A batch begins, and the device does nothing: what has arrived since the last one can be found by this one. In a
    // batch that is no step, `stream` brings over the experts that are in no slot; placer: knows their groups. draft:
    // the batch goes through the prediction layer, and not through the model.
    void beginPass(bool step, bool draft, int64_t rows, WeightStream& stream, const DevicePlacer& placer);
    // Whether the pass under way was given up after some of it had run.
    void setPassFailed(bool failed) noexcept { _passFailed = failed; }
    // Fetches what the device has counted since the last time.
    void collectUses();

    // [experts], on the device: the slot of each of the layer's experts, or -1.
    int32_t* tableOf(int32_t expertLayer) const { return rowOf(_layout->expertTable, expertLayer); }
    // [experts], on the device: for each expert that is in no slot, which of the layer's missing ones it is, or -1.
    int32_t* ordinalsOf(int32_t expertLayer) const { return rowOf(_layout->expertOrdinal, expertLayer); }

    // Whether a layer's rows are shown to the next layer's router.
    bool foresees() const { return _foresight == Prefetch::Count || _foresight == Prefetch::NextLayer; }
    // Fetches what the CPU ordered ahead for that layer, on a stream beside the one that computes, until
    // awaitFetchedAhead().
    void fetchAhead(int32_t expertLayer, cuda::DeviceOrders* orders);
    void awaitFetchedAhead();
    // Waits for what runs beside the passes. A stream whose capture was given up is replaced.
    void settle();

private:
    int32_t* rowOf(size_t table, int32_t expertLayer) const {
        return reinterpret_cast<int32_t*>(_memory + table) + static_cast<int64_t>(expertLayer) * _limits.experts;
    }
    LayerExperts fillingOrder(const LayerExperts& wanted) const;
    void fill(const LayerExperts& wanted);
    void listMissing(bool draft, WeightStream& stream, const DevicePlacer& placer);
    void uploadTables(bool step);

    Allocator& _allocator;
    cuda::Stream& _stream;
    ExpertSlotManager _slots;
    ExpertAccessProfiler _profiler;
    StepLimits _limits;
    const GpuScratch* _layout = nullptr;
    uint8_t* _memory = nullptr;
    std::unique_ptr<cuda::PinnedBuffer> _tables;  // what the device's tables are uploaded from: slots, then ordinals
    std::unique_ptr<CudaExpertLoads> _loads;
    std::unique_ptr<ExpertPrefetcher> _prefetcher;
    std::unique_ptr<ExpertMisses> _misses;
    RamLevel* _level = nullptr;
    Prefetch _foresight = Prefetch::Off;
    uint64_t _tableVersion = 0;  // of the table as it was uploaded last
    bool _tableUploaded = false, _passFailed = false;
    int64_t _uncountedRows = 0;  // of the last batch, if it was no step: its uses are still on the device
    std::unique_ptr<cuda::Stream> _ahead;
    cuda::Event _aheadForked, _aheadDone;
    bool _aheadRuns = false;
};

}  // namespace sharpi
