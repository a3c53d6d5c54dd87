// The decode kernels of f32 caches. See attention_decode.cu.
#include "kernels/attention/decode/kernel.cuh"

namespace sharpi::cuda::decode {

void launchF32(Stream& stream, const Args& args, int64_t pages) { chooseKernel<KvType::F32>(stream, args, pages); }

}  // namespace sharpi::cuda::decode
