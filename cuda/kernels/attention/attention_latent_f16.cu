// The decode kernels for latents in f16. See attention_latent.cu.
#include "kernels/attention/latent_kernel.cuh"

namespace sharpi::cuda::decode {

void launchLatentsF16(Stream& stream, const LatentArgs& args, int64_t pages) {
    chooseLatents<KvType::F16>(stream, args, pages);
}

}  // namespace sharpi::cuda::decode
