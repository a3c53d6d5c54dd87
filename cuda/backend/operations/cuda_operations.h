// The operations on one NVIDIA GPU. Each takes a batch's exact rows and its fast rows.
#pragma once

#include "backend/cuda_experts.h"
#include "backend/cuda_pass.h"
#include "backend/cuda_products.h"
#include "backend/host_rows_sharer.h"
#include "backend/operations/cuda_blocks.h"
#include "backend/operations/cuda_streams.h"
#include "kernels/delta/gated_delta.h"
#include "operations/operations.h"

namespace sharpi {

class CudaOperations : public Operations {
public:
    CudaOperations(CudaPass& pass, CudaExpertCache& cache)
        : _pass(pass),
          _sharer(pass),
          _products(pass, _sharer),
          _experts(pass, _products, cache),
          _blocks(pass),
          _streams(pass) {}

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
    void deltaExact(const DeltaCall& call, const cuda::DeltaInputs& in, const cuda::DeltaStates& states,
                    const Activations& attended);
    void deltaFast(const DeltaCall& call, const cuda::DeltaInputs& in, const cuda::DeltaStates& states,
                   const Activations& attended);

    CudaPass& _pass;
    HostRowsSharer _sharer;
    CudaProducts _products;
    CudaExperts _experts;
    CudaBlocks _blocks;
    CudaStreams _streams;
};

}  // namespace sharpi
