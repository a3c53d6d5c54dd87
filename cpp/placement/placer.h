// Puts weights where a processor reads them. The engine loads through this, and planning runs the same loading with a
// placer that copies nothing.
#pragma once

#include <string>
#include <vector>

#include "experts/expert_slots.h"
#include "memory/stream/weight_stream.h"
#include "placement/homes.h"
#include "placement/own_pages.h"
#include "placement/weight.h"

namespace sharpi {

// A matrix of the mapped file (its data is null when only planning), and the home that is planned for it.
struct FileMatrix {
    Matrix file;
    TensorHome home;
    std::string name;
};

// A layer's stacks.
struct PlacedExperts {
    WeightStack gate, up, down;
};

// All may throw Error(OutOfMemory). Called in the order in which a token meets the weights.
class Placer {
public:
    virtual ~Placer() = default;
    // Matrices that are used together: those that are not resident have the same number of rows.
    virtual std::vector<Weight> weights(const std::vector<FileMatrix>& files) = 0;
    // A table whose rows are read one at a time.
    virtual Weight table(const FileMatrix& file) = 0;
    // A layer's experts; home: Vram or Slots, the same for all layers.
    virtual PlacedExperts experts(const ExpertStacks& file, Home home, const std::string& name) = 0;
    // A matrix that the file does not have as it is: its bytes, which are empty when only planning. It is resident.
    virtual Weight made(const Matrix& shape, std::vector<uint8_t> bytes, const std::string& name) = 0;
    // `count` floats. If `host` is null, only takes room for them.
    virtual const float* vector(const float* host, size_t count, const std::string& name) = 0;
    // What follows belongs to a prediction layer.
    virtual void startPrediction() {}
    // What follows belongs to the output head.
    virtual void startHead() {}
    // Call it after the last weight.
    virtual void finish() {}
    // After finish(): takes slots of single experts, if experts are in Slots.
    virtual void takeExpertSlots(const SlotBudget&) {}
};

// The CPU's: matrices stay in the mapped file, whatever the plan says.
class MappedPlacer : public Placer {
public:
    // slots: in RAM, of a model that is larger; they may hold none. The profiler may be null.
    MappedPlacer(Allocator& allocator, ExpertSlotManager& slots, ExpertAccessProfiler* profiler)
        : _allocator(allocator), _slots(slots), _profiler(profiler) {}
    std::vector<Weight> weights(const std::vector<FileMatrix>& files) override;
    Weight table(const FileMatrix& file) override;
    PlacedExperts experts(const ExpertStacks& file, Home home, const std::string& name) override;
    Weight made(const Matrix& shape, std::vector<uint8_t> bytes, const std::string& name) override;
    const float* vector(const float* host, size_t count, const std::string& name) override;
    void takeExpertSlots(const SlotBudget& budget) override { _slots.take(budget, _profiler); }

private:
    Allocator& _allocator;
    ExpertSlotManager& _slots;
    ExpertAccessProfiler* _profiler;
    std::vector<Buffer> _buffers;
};

// A device's: takes memory for resident weights, and lets the stream fetch everything.
class DevicePlacer : public Placer {
public:
    DevicePlacer(Allocator& allocator, DeviceLayout layout, WeightStream& stream, ExpertSlotManager& slots,
                 ExpertAccessProfiler* profiler)
        : _allocator(allocator), _layout(std::move(layout)), _stream(stream), _slots(slots), _profiler(profiler) {}
    std::vector<Weight> weights(const std::vector<FileMatrix>& files) override;
    Weight table(const FileMatrix& file) override;
    PlacedExperts experts(const ExpertStacks& file, Home home, const std::string& name) override;
    Weight made(const Matrix& shape, std::vector<uint8_t> bytes, const std::string& name) override;
    const float* vector(const float* host, size_t count, const std::string& name) override;
    void startPrediction() override { _stream.startPrediction(); }
    void startHead() override { _stream.startHead(); }
    void finish() override;
    void takeExpertSlots(const SlotBudget& budget) override { _slots.take(budget, _profiler); }
    // The stream groups of the stacks of a layer whose experts are in Slots.
    const std::vector<int32_t>& stackGroups(int32_t row) const { return _stackGroups.at(static_cast<size_t>(row)); }

private:
    const uint8_t* room(size_t bytes, const std::string& name);
    WeightStack residentStack(const MatrixStack& file, const std::string& name);
    WeightStack streamedStack(const MatrixStack& file);

    Allocator& _allocator;
    DeviceLayout _layout;
    WeightStream& _stream;
    ExpertSlotManager& _slots;
    ExpertAccessProfiler* _profiler;
    std::vector<Buffer> _buffers;
    std::vector<std::vector<int32_t>> _stackGroups;
    std::vector<OwnPages> _made;  // what is uploaded from here and not from the file
};

}  // namespace sharpi
