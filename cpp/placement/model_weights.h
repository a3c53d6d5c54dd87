// Loads the weights that a model lists, through a Placer, in the order in which a token meets them; then gives each by
// its id.
#pragma once

#include <string>
#include <vector>

#include "model/model_spec.h"
#include "model/weights.h"
#include "placement/homes.h"
#include "placement/load_trace.h"
#include "placement/placer.h"
#include "placement/weight.h"

namespace sharpi {

class ModelWeights {
public:
    // homes: see homes.h. slots: of experts in Slots. context: positions that rotary tables cover. Throws
    // Error(OutOfMemory), Error(BadModel).
    ModelWeights(const ModelSpec& spec, const Weights& files, Placer& placer, const Homes& homes,
                 const SlotBudget& slots, int64_t context, LoadTrace& trace);

    // A matrix without rows, or a stack without matrices, if the model does not have it.
    const Weight& operator[](MatrixId id) const { return id ? at(id.index).matrix : _absent.matrix; }
    const WeightStack& operator[](StackId id) const { return id ? at(id.index).stack : _absent.stack; }
    // nullptr for a vector that the model does not have.
    const float* operator[](VectorId id) const { return id ? at(id.index).vector : nullptr; }
    // The same vector where the CPU can read it; nullptr if there is none, or when only planning.
    const float* inHost(VectorId id) const { return id ? at(id.index).hostVector : nullptr; }
    // For AttentionSpec::rope; -1 gives a table that rotates nothing.
    const RopeTable& rope(int32_t index) const { return _ropes[static_cast<size_t>(index + 1)]; }
    // For AttentionSpec::queryScale: [context] factors by position; nullptr for -1.
    const float* queryScale(int32_t index) const {
        return index < 0 ? nullptr : _queryScales[static_cast<size_t>(index)];
    }

private:
    // Where an entry of the list is. Which of the members counts depends on the entry's form.
    struct Placed {
        Weight matrix;
        WeightStack stack;
        const float *vector = nullptr, *hostVector = nullptr;
    };
    const Placed& at(int32_t index) const { return _placed.at(static_cast<size_t>(index)); }
    const ListedWeight& listed(int32_t index) const { return _spec.weights[static_cast<size_t>(index)]; }
    void loadPart(ModelPart part, LoadTrace& trace);
    void loadTables(const LayerSpec& layer, int32_t number);
    void loadRope(const RopeSpec& rope, RopeTable& table, int32_t number);
    void place(int32_t index);
    void placeUnit(int32_t index);
    void placeExperts(int32_t index);
    std::vector<int32_t> unitOf(int32_t index) const;
    FileMatrix inFile(const ListedWeight& weight) const;
    std::string name(const ListedWeight& weight) const;
    std::vector<float> floats(const ListedWeight& weight) const;
    void placeByHead(const ListedWeight& weight, Placed& placed);
    void placeVector(const ListedWeight& weight, Placed& placed);
    const float* placeFloats(const std::vector<float>& values, size_t count, const std::string& name);

    const ModelSpec& _spec;
    const Weights& _files;
    Placer& _placer;
    const Homes& _homes;
    int64_t _context;
    bool _expertsResident = true;
    std::vector<Placed> _placed;  // by the list's numbers
    Placed _absent;
    std::vector<std::vector<float>> _hostCopies;  // of vectors that the file does not hold as floats
    std::vector<RopeTable> _ropes;                // the first rotates nothing
    std::vector<const float*> _queryScales;
};

}  // namespace sharpi
