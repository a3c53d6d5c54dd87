// The decode kernels for latents in f32. See attention_latent.cu.
#include "kernels/attention/latent_kernel.cuh"

namespace sharpi::cuda::decode {

void launchLatentsF32(Stream& stream, const LatentArgs& args, int64_t pages) {
    chooseLatents<KvType::F32>(stream, args, pages);
}

}  // namespace sharpi::cuda::decode
