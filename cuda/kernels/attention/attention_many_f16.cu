// The kernels of f16 caches for many rows. See attention_many.cu.
#include "kernels/attention/many/many_rows.cuh"

namespace sharpi::cuda::many {

bool launchF16(Stream& stream, const Args& args) { return chooseKind<KvType::F16>(stream, args); }

}  // namespace sharpi::cuda::many
