// The matrix-vector kernels for float weights: F32, F16 and BF16.
//
// They are the kernels for quantized weights with other steps (Steps<D, true> in matvec_kernel.cuh). Element i of a row
// belongs to lane i mod 32, so lanes read consecutive elements, eight of them in a step. The loads are small, but
// several steps are in flight. Float weights are routers and other small matrices of a model, or whole models kept for
// comparison.
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
