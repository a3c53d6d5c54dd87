// Mamba 2 on the GPU; see cuda_operations.h. CudaKind refuses such models before they are loaded.
#include "backend/operations/cuda_operations.h"
#include "core/error.h"

namespace sharpi {

void CudaOperations::mamba(const MambaCall&, const RecurrentLayer&, const Weight&) {
    throw Error(ErrorKind::Internal, "the GPU has no kernels for Mamba 2");
}

}  // namespace sharpi
