// The decode kernels of f16 caches. See attention_decode.cu.
#include "kernels/attention/decode/kernel.cuh"

namespace sharpi::cuda::decode {

void launchF16(Stream& stream, const Args& args, int64_t pages) { chooseKernel<KvType::F16>(stream, args, pages); }

}  // namespace sharpi::cuda::decode
