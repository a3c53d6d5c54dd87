// The CPU as a backend: weights are read in the mapped files, or from a device memory that host code can read.
#pragma once

#include <memory>

#include "cpu/operations/cpu_operations.h"
#include "memory/host_memory.h"
#include "operations/backend.h"

namespace sharpi {

class CpuBackend : public Backend {
public:
    // Weights stay in the mapped files.
    explicit CpuBackend(int threads);
    // Weights are brought into `memory`, which host code can read (the fake device), as they are to a GPU.
    CpuBackend(int threads, std::unique_ptr<DeviceMemory> memory);
    static size_t scratchBytes(int threads, const StepLimits& limits) { return CpuScratch(threads, limits).total; }

    const char* name() const override { return _work.kernels.name; }
    Allocator& allocator() override { return *_allocator; }
    Placer& placer() override { return *_placer; }
    BusUse bus() const override { return {_stream && _stream->streams(), 0}; }
    void whenUploaded(std::function<void(double seconds)> told) override;
    void readFrom(const std::vector<MappedFile>& files, size_t expertRamBytes) override;
    void unload() override;
    ExpertCounts expertCounts(bool forget) override;
    void takeScratch(const StepLimits& limits) override;
    void startExperts(const ExpertUse& use) override;

    int64_t decodeRows() const override { return _work.limits.maxRows; }
    bool oneArithmetic() const override { return true; }
    int64_t promptStep() const override { return 1; }
    void begin(const Batch& batch, const KvCache& kv) override;
    void region(Pass pass, const std::function<void()>& body) override;
    Operations& operations() override { return _operations; }
    int64_t headRows() const override { return _work.scratch().headRows; }
    void readLogits(int64_t row, int64_t count, float* out) override;
    std::vector<Score> score(const std::vector<ScoredToken>& tokens) override;
    std::vector<Chosen> sample(const std::vector<Choice>& choices) override;

protected:
    float* rows(RowBuffer buffer) const { return _work.at(buffer); }

private:
    void readFromDevice();

    std::unique_ptr<DeviceMemory> _memory;
    std::unique_ptr<Allocator> _allocator;
    std::unique_ptr<Transfers> _transfers;
    std::unique_ptr<WeightStream> _stream;  // if weights are not in the mapped file
    // In RAM, of a model that is larger. Beside a weight stream it stays empty, since the CPU's batches are all alike.
    std::unique_ptr<ExpertSlotManager> _slots;
    std::unique_ptr<FileReader> _reader;  // if weights are in the mapped file
    std::unique_ptr<RamExperts> _source;
    std::unique_ptr<Placer> _placer;
    CpuWork _work;
    CpuOperations _operations{_work};
    Buffer _scratch;
};

}  // namespace sharpi
