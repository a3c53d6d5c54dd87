// See gpu.h.
#include "hardware/gpu.h"

#include "core/error.h"
#include "kernels/delta/gated_delta.h"
#include "kernels/experts/router.h"

#ifdef SHARPI_WITH_CUDA
#include "backend/cuda_backend.h"
#endif

namespace sharpi {

void requireGpuCanRun(const ModelSpec& spec) {
    const auto require = [](bool ok, const std::string& what) {
        if (!ok) throw Error(ErrorKind::InvalidArgument, "the GPU cannot run this model: " + what + "; device cpu can");
    };
    const auto requireExperts = [&](const ExpertFfnSpec& experts) {
        require(experts.count <= cuda::kMostRouted, std::to_string(experts.count) + " experts a layer, where up to " +
                                                        std::to_string(cuda::kMostRouted) + " are known");
    };
    require(spec.embedding % 4 == 0, "a width of " + std::to_string(spec.embedding) + ", which is no multiple of 4");
    for (const LayerSpec* loaded : spec.loadedLayers()) {
        const LayerSpec& layer = *loaded;
        if (layer.experts) requireExperts(*layer.experts);
        if (layer.delta) {
            const GatedDeltaSpec& d = *layer.delta;
            cuda::requireDelta({d.keyHeads, d.valueHeads, d.headDim, d.convWidth});
            continue;
        }
        const AttentionSpec& a = *layer.attention;
        require(a.headDim % 8 == 0 && a.headDim <= 256,
                "heads of " + std::to_string(a.headDim) + " elements, where 8, 16, .. 256 are known");
        require(a.heads / a.kvHeads <= 32, std::to_string(a.heads) + " heads over " + std::to_string(a.kvHeads) +
                                               ", where groups of up to 32 are known");
    }
}

#ifdef SHARPI_WITH_CUDA

cuda::DeviceInfo findGpu() { return cuda::findDevice(); }

std::unique_ptr<Backend> makeGpuBackend(size_t vram, int threads) {
    return std::make_unique<CudaBackend>(vram, threads);
}

#else

namespace {

[[noreturn]] void refuse() {
    throw Error(ErrorKind::InvalidArgument, "this build of Sharpi has no CUDA part (" SHARPI_CUDA_STATE ")");
}

}  // namespace

cuda::DeviceInfo findGpu() { refuse(); }
std::unique_ptr<Backend> makeGpuBackend(size_t, int) { refuse(); }

#endif

}  // namespace sharpi
