// Counts what becomes of each expert, layer by layer: how often it was used; how many of these uses found it in a slot,
// had it computed by the CPU or had it fetched by the device; how often it was loaded into a slot and evicted.
//
// Uses of all batches are counted where the tokens are routed (addUses); the other counts come from steps, where
// single experts matter.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace sharpi {

// How good a predictor is.
struct PredictorCounts {
    std::string name;
    uint64_t named = 0, used = 0;  // the experts that it named, and those of them that were used
    uint64_t wanted = 0;           // all experts that were used
};

// Of a model that is larger than RAM: where the processor that computes experts found those that it wanted.
struct DiskCounts {
    uint64_t hits = 0, reads = 0;  // chosen experts that were in RAM, and those that were read; on a GPU, in steps
    uint64_t bytes = 0;            // from the disk to RAM
    double waited = 0;             // seconds of waiting for the disk
    // The owner of the slots in RAM fills these in: experts that they can hold, and do hold.
    int64_t ramCapacity = 0, ramResident = 0;
};

struct ExpertCounts {
    int32_t layers = 0, experts = 0;
    std::vector<int32_t> layer;    // of each layer with experts: its number in the model
    std::vector<int32_t> present;  // of each layer with experts: how many it has (up to `experts`)
    // [layers, experts]
    std::vector<uint64_t> uses;
    // In steps: uses that found the expert in a slot, had the CPU compute it, or had it fetched within the pass.
    std::vector<uint64_t> hits, computed, fetched;
    std::vector<uint64_t> loads, evictions;  // into slots that experts stay in, in whatever way; out of them
    std::vector<PredictorCounts> predictors;
    // The owner of the slots fills these in.
    uint64_t slotBytes = 0;              // the device's memory that the slots take
    int64_t capacity = 0, resident = 0;  // experts that the slots can hold, and do hold
    DiskCounts disk;
};

// expertLayer: a layer's number among the layers with experts. Thread-safe. Every call throws Error(Internal) for an
// expertLayer or an expert that does not exist, and has counted nothing then.
class ExpertAccessProfiler {
public:
    enum class Event { Hit, Computed, Fetched, Load, Eviction };

    // layer: its number in the model. Returns its expertLayer: 0, 1, ...
    int32_t addLayer(int32_t layer, int32_t experts);
    void count(int32_t expertLayer, int32_t expert, Event event, uint64_t times = 1);
    // Adds uses: [expert layers, stride]. Numbers behind a layer's experts are not read.
    void addUses(const uint32_t* uses, int32_t stride);
    void addUse(int32_t expertLayer, int32_t expert, uint64_t times = 1);
    void addPrediction(const std::string& name, uint64_t named, uint64_t used, uint64_t wanted);
    ExpertCounts counts() const;
    void clear();  // sets all counts to 0

private:
    static constexpr size_t kEvents = 5;
    struct Layer {
        int32_t layer = 0, experts = 0;
        std::vector<uint64_t> uses;
        std::array<std::vector<uint64_t>, kEvents> events;
    };
    Layer& layerOf(int32_t expertLayer, int32_t expert);

    mutable std::mutex _mutex;
    std::vector<Layer> _layers;
    std::vector<PredictorCounts> _predictors;
};

}  // namespace sharpi
