// The operations on the CPU: each is shared among the threads of a pool and calls the kernels of cpu/.
#pragma once

#include "cpu/cpu_work.h"
#include "cpu/operations/cpu_blocks.h"
#include "cpu/operations/cpu_experts.h"
#include "cpu/operations/cpu_streams.h"
#include "operations/operations.h"

namespace sharpi {

class CpuOperations : public Operations {
public:
    explicit CpuOperations(CpuWork& work) : _work(work), _experts(work), _streams(work) {}
    CpuExperts& expertWork() { return _experts; }

    void embed(const Weight& table, float scale) override;
    void norm(const OptionalPart& part, const NormCall& norm, Readers readers, bool floats) override;
    void addPart(const PartCall& part) override;
    void linear(RowInput x, std::initializer_list<Product> products) override;
    void addLinear(RowInput x, const Weight& w, const float* bias) override;
    void gatedLinear(RowInput x, const GatedProduct& product, const Weight& reader) override;
    void copyRows(const OptionalPart& part, Readers readers) override;
    void joinLayerInputs(const LayerInputsCall& call) override;
    void gateLayerInput(int32_t layer, int64_t width, const Weight& reader) override;
    void prepareHeads(const HeadsCall& heads, const KvPages& pages) override;
    void takeRows(const TakenRows& rows, RowInput to, Readers readers) override;
    void linearByHead(RowInput x, const HeadProduct& call) override;
    void prepareLatent(const LatentCall& call, const KvPages& pages) override;
    void attend(const HeadsCall& heads, const KvPages& pages, const Weight& reader) override;
    BlockOperations& blocks() override { return _blocks; }
    StreamOperations& streams() override { return _streams; }
    void deltaRule(const DeltaCall& call, const RecurrentLayer& state, const Weight& reader) override;
    void mamba(const MambaCall& call, const RecurrentLayer& state, const Weight& reader) override;
    void route(const ExpertCall& call) override { _experts.route(call); }
    void experts(const ExpertCall& call) override { _experts.compute(call); }
    void joinDraft(const Weight& table, const float* norms, const float* sourceNorm, float eps,
                   const Weight& reader) override;
    void head(const HeadCall& call, int64_t first, int64_t count) override;

private:
    const float* input(RowInput x) const;

    CpuWork& _work;
    CpuExperts _experts;
    CpuBlocks _blocks{_work};
    CpuStreams _streams;
    const float* _attended = nullptr;  // the last mixer's output
};

}  // namespace sharpi
