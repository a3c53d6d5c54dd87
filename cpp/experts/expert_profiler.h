// Counts what becomes of every expert, layer by layer: how often it was used, and of these uses how often it was found
// in a slot, computed by the CPU or fetched by the device; how often it was loaded into a slot and driven out.
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

// How good a guess is: of the experts that it named, how many were used.
struct PredictorCounts {
    std::string name;
    uint64_t named = 0, used = 0;
    uint64_t wanted = 0;  // experts that were used: `used` of them had been named
};

struct ExpertCounts {
    int32_t layers = 0, experts = 0;
    std::vector<int32_t> layer;    // of each row below: its number in the model
    std::vector<int32_t> present;  // of each row: how many experts the layer has (up to `experts`)
    // [layers, experts]
    std::vector<uint64_t> uses;
    std::vector<uint64_t> hits, computed,
        fetched;                             // in steps: found in a slot; the CPU's; brought over within the pass
    std::vector<uint64_t> loads, evictions;  // into slots to stay, by whatever way; out of them
    std::vector<PredictorCounts> predictors;
    uint64_t slotBytes = 0;              // of the device's memory that the slots take
    int64_t capacity = 0, resident = 0;  // experts that the slots can hold, and do: filled in by whoever has them
};

// Thread-safe. Every call throws Error(Internal) for a row or expert that there is not, and has counted nothing then.
class ExpertAccessProfiler {
public:
    enum class Event { Hit, Computed, Fetched, Load, Eviction };

    // layer: its number in the model. Returns the row of the counts: 0, 1, ...
    int32_t addLayer(int32_t layer, int32_t experts);
    void count(int32_t row, int32_t expert, Event event, uint64_t times = 1);
    // uses: [rows, stride], to be added; what a row has behind its experts is not looked at.
    void addUses(const uint32_t* uses, int32_t stride);
    void addUse(int32_t row, int32_t expert, uint64_t times = 1);
    void addPrediction(const std::string& name, uint64_t named, uint64_t used, uint64_t wanted);
    ExpertCounts counts() const;
    void clear();  // the counts

private:
    static constexpr size_t kEvents = 5;
    struct Row {
        int32_t layer = 0, experts = 0;
        std::vector<uint64_t> uses;
        std::array<std::vector<uint64_t>, kEvents> events;
    };
    Row& rowOf(int32_t row, int32_t expert);

    mutable std::mutex _mutex;
    std::vector<Row> _rows;
    std::vector<PredictorCounts> _predictors;
};

}  // namespace sharpi
