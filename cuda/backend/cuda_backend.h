// One NVIDIA GPU as a backend, with weights in its memory or brought over as they are used.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "backend/cuda_pass.h"
#include "backend/operations/cuda_operations.h"
#include "backend/step_recorder.h"
#include "backend/token_sampler.h"
#include "device/cuda_memory.h"
#include "operations/backend.h"
#include "transfers/cuda_expert_cache.h"
#include "transfers/cuda_transfers.h"

namespace sharpi {

class CudaBackend : public Backend {
public:
    // ordinal: see Device. vram: the most memory to take, in bytes; 0: all. threads: for what the CPU computes.
    // Throws Error(InvalidArgument) where there is no usable GPU.
    CudaBackend(int ordinal, size_t vram, int threads);
    ~CudaBackend() override;

    const char* name() const override { return _stream.device().name.c_str(); }
    Allocator& allocator() override { return _allocator; }
    Placer& placer() override { return *_placer; }
    BusUse bus() const override;
    std::vector<std::string> notes() const override;
    void whenUploaded(std::function<void(double seconds)> told) override { _weights->onUploaded(std::move(told)); }
    void readFrom(const std::vector<MappedFile>& files, size_t expertRamBytes) override;
    void unload() override;
    ExpertCounts expertCounts(bool forget) override;
    void takeScratch(const StepLimits& limits) override;
    void startExperts(const ExpertUse& use) override;

    int64_t decodeRows() const override { return std::min<int64_t>(_pass.limits.maxRows, GpuScratch::kMaxDecodeRows); }
    bool oneArithmetic() const override { return _pass.limits.prompt == PromptMode::Exact; }
    int64_t promptStep() const override { return _pass.limits.recurrent() && !oneArithmetic() ? kPromptTile : 1; }
    void begin(const Batch& batch, const KvCache& kv) override;
    void region(Pass pass, const std::function<void()>& body) override { _recorder.run(pass, body); }
    Recording* recording() override { return &_recorder; }
    Operations& operations() override { return *_operations; }
    int64_t headRows() const override { return _layout->headRows; }
    void readLogits(int64_t row, int64_t count, float* out) override;
    std::vector<Score> score(const std::vector<ScoredToken>& tokens) override { return _sampler->score(tokens); }
    std::vector<Chosen> sample(const std::vector<Choice>& choices) override { return _sampler->sample(choices); }

private:
    void settle() noexcept;

    cuda::Stream _stream;
    cuda::CudaMemory _memory;
    Allocator _allocator;
    const int _threads;
    std::unique_ptr<RamLevel> _level;  // of a model that is larger than RAM
    size_t _levelBytes = 0;
    std::unique_ptr<CudaTransfers> _transfers;
    std::unique_ptr<WeightStream> _weights;
    std::unique_ptr<CudaExpertCache> _cache;
    std::unique_ptr<DevicePlacer> _placer;
    std::optional<GpuScratch> _layout;
    Buffer _scratch;
    std::unique_ptr<cuda::PinnedBuffer> _numbers;  // what begin() uploads
    std::unique_ptr<cuda::PinnedBuffer> _mailbox;
    std::vector<std::unique_ptr<cuda::PinnedBuffer>> _tableRows;  // what kernels read of tables in the file
    std::unique_ptr<TableRows> _tables;
    std::unique_ptr<HostShare> _share;  // if the CPU computes rows or experts

protected:
    CudaPass _pass;

private:
    std::unique_ptr<TokenSampler> _sampler;
    std::unique_ptr<CudaOperations> _operations;
    StepRecorder _recorder;
    const pid_t _process = ::getpid();
};

}  // namespace sharpi
