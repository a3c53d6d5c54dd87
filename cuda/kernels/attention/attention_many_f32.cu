// The kernels of f32 caches for many rows. See attention_many.cu.
#include "kernels/attention/many/many_rows.cuh"

namespace sharpi::cuda::many {

bool launchF32(Stream& stream, const Args& args) { return chooseKind<KvType::F32>(stream, args); }

}  // namespace sharpi::cuda::many
