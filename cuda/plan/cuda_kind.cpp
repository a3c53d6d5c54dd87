// See cuda_kind.h.
#include "plan/cuda_kind.h"

#include <string>

#include "core/error.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/latent_shape.h"
#include "kernels/blocks/blocks.h"
#include "kernels/delta/gated_delta.h"
#include "kernels/delta/mamba.h"
#include "kernels/experts/router.h"
#include "plan/gpu_scratch.h"

namespace sharpi {

namespace {

// What driver and runtime keep for the captured steps and the kernels' code, measured.
constexpr size_t kGraphBytes = size_t{16} << 20;
// If experts are in slots: more of both, and streams.
constexpr size_t kSlotGraphBytes = size_t{24} << 20;

void require(bool ok, const std::string& what) {
    if (!ok) throw Error(ErrorKind::InvalidArgument, "the GPU cannot run this model: " + what + "; device cpu can");
}

void requireNorms(const AttentionSpec& a) {
    const bool valuesAreKeys = !a.v && a.kvLayer < 0;
    require(a.qkNorm != AttentionSpec::QkNorm::FullRow || !(a.normAfterRotation || a.valueNorm || valuesAreKeys),
            "norms of all queries together after their rotation, or beside norms of values or values that are keys");
}

void requireLatent(const AttentionSpec& a) {
    require(!a.gated && a.qkNorm == AttentionSpec::QkNorm::None, "latent attention with gates or norms of heads");
    cuda::requireLatent({a.heads, a.latent->rank, a.headDim - a.latent->rank, a.latent->plainDim});
}

void requireIndexer(const IndexerSpec& indexer) {
    const int32_t dim = indexer.compressor.headDim;
    require(dim % 4 == 0 && dim <= cuda::kMostIndexDim, "an indexer with heads of " + std::to_string(dim) +
                                                            " elements, where 4, 8, .. " +
                                                            std::to_string(cuda::kMostIndexDim) + " are known");
}

void requireExperts(const ExpertFfnSpec& experts, const ModelSpec& spec) {
    require(experts.routing.count <= cuda::kMostRouted, std::to_string(experts.routing.count) +
                                                            " experts a layer, where up to " +
                                                            std::to_string(cuda::kMostRouted) + " are known");
    if (!experts.latentDown) return;
    const int64_t latents = spec.weights[static_cast<size_t>(experts.latentDown.index)].slice().rows;
    require(latents % 4 == 0,
            "experts that read latents of " + std::to_string(latents) + " elements, which is no multiple of 4");
}

class CudaKind final : public DeviceKind {
public:
    const char* name() const override { return "cuda"; }
    const char* memoryName() const override { return "vram"; }
    size_t granularity() const override { return size_t{2} << 20; }
    std::optional<DeviceLayout> layout() const override { return gpuLayout(); }
    size_t scratchBytes(const StepLimits& limits, int) const override { return GpuScratch(limits).bytes(); }
    size_t recordBytes(const StepLimits& limits) const override {
        return kGraphBytes + (limits.expertSlots ? kSlotGraphBytes : 0);
    }
    // A recurrent layer takes fast prompt rows in whole tiles.
    int64_t promptTile(PromptMode mode) const override { return mode == PromptMode::Fast ? kPromptTile : 1; }
    void requireCanRun(const ModelSpec& spec) const override {
        require(spec.embedding % 4 == 0,
                "a width of " + std::to_string(spec.embedding) + ", which is no multiple of 4");
        for (const LayerSpec* layer : spec.loadedLayers()) {
            if (layer->experts) requireExperts(*layer->experts, spec);
            if (layer->attention) {
                const AttentionSpec& a = *layer->attention;
                if (a.latent) requireLatent(a);
                else cuda::requireHeads({a.heads, a.kvHeads, a.headDim});
                if (a.indexer) requireIndexer(*a.indexer);
                requireNorms(a);
            }
            if (layer->delta) {
                const GatedDeltaSpec& d = *layer->delta;
                cuda::requireDelta({d.keyHeads, d.valueHeads, d.headDim, d.convWidth});
            }
            if (layer->mamba) {
                const MambaSpec& m = *layer->mamba;
                cuda::requireMamba({m.heads, m.groups, m.headDim, m.stateDim, m.convWidth});
            }
        }
    }
};

}  // namespace

const DeviceKind& cudaKind() {
    static const CudaKind kind;
    return kind;
}

}  // namespace sharpi
