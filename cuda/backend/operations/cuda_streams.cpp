// Hyper-connections and rows of blocks on the GPU; see cuda_operations.h. CudaKind refuses such models before they are
// loaded.
#include "backend/operations/cuda_operations.h"
#include "core/error.h"

namespace sharpi {

namespace {

[[noreturn]] void refuse() { throw Error(ErrorKind::Internal, "the GPU has no kernels for hyper-connections"); }

}  // namespace

BlockOperations& CudaOperations::blocks() { refuse(); }

StreamOperations& CudaOperations::streams() { refuse(); }

}  // namespace sharpi
