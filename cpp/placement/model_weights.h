// Loads a model's weights through a Placer, in the order in which a token meets them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/weights.h"
#include "placement/layer_weights.h"
#include "placement/load_trace.h"
#include "placement/placer.h"

namespace sharpi {

class ModelWeights {
public:
    // homes: see homes.h. expertSlotBytes: for the slots of experts in Slots. context: positions that rotary tables
    // cover. Throws Error(OutOfMemory), Error(BadModel).
    ModelWeights(const ModelSpec& spec, const Weights& files, Placer& placer, const Homes& homes,
                 size_t expertSlotBytes, int64_t context, LoadTrace& trace);
    ModelWeights(const ModelWeights&) = delete;  // layers point to each other
    ModelWeights& operator=(const ModelWeights&) = delete;

    Weight embedding;
    std::vector<LayerWeights> layers;
    HeadWeights head;
    std::optional<PredictionWeights> prediction;

private:
    struct Rotation {
        RopeSpec spec;
        RopeTable table;
    };
    FileMatrix inFile(const WeightSlice& slice) const;
    Weight weight(const WeightSlice& slice, bool shared = false);  // shared: the CPU may compute rows of it
    DenseWeights dense(const LayerSpec& layer);
    ExpertWeights experts(const LayerSpec& layer);
    bool resident(const WeightSlice& slice) const;
    const float* vector(const WeightSlice& slice);
    const float* vectors(const WeightSlice& first, const WeightSlice& second);
    const float* turnedMatrix(const WeightSlice& slice);
    std::vector<float> floats(const WeightSlice& slice) const;
    RopeTable rotation(const RopeSpec& spec, const std::string& name);
    AttentionWeights attention(const LayerSpec& layer, const std::string& name);
    GatedDeltaWeights gatedDelta(const LayerSpec& layer);
    SharedExpertWeights sharedExpert(const SharedExpertSpec& spec);
    LayerWeights loadLayer(const LayerSpec& layer, const std::string& name);
    PredictionWeights loadPrediction(const PredictionSpec& spec, const std::string& name);

    const Weights& _files;
    Placer& _placer;
    const Homes& _homes;
    int64_t _context;
    bool _expertsResident = true;
    int32_t _expertLayers = 0;  // so far
    std::vector<Rotation> _rotations;
};

}  // namespace sharpi
