// The matrix-vector kernels for float weights: F32, F16 and BF16.
//
// They are the quantized ones' with other steps (Steps<D, true> in matvec_kernel.cuh): element i of a row belongs to
// lane i mod 32, so lanes read consecutive elements, eight a step. Small loads, but several steps of them are in
// flight; these are a model's routers and norms' neighbours, or whole models kept for comparison.
#include "kernels/matvec/matvec_experts.cuh"
#include "kernels/matvec/matvec_gated.cuh"
#include "kernels/matvec/matvec_product.cuh"

namespace sharpi::cuda {

template void launchProducts<DType::F32>(Stream&, Products, int64_t);
template void launchProducts<DType::F16>(Stream&, Products, int64_t);
template void launchProducts<DType::BF16>(Stream&, Products, int64_t);
template void launchGated<DType::F32>(Stream&, GatedProduct, int64_t);
template void launchGated<DType::F16>(Stream&, GatedProduct, int64_t);
template void launchGated<DType::BF16>(Stream&, GatedProduct, int64_t);
template void launchDown<DType::F32>(Stream&, const DownProduct&, int64_t);
template void launchDown<DType::F16>(Stream&, const DownProduct&, int64_t);
template void launchDown<DType::BF16>(Stream&, const DownProduct&, int64_t);

}  // namespace sharpi::cuda
