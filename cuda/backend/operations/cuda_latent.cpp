// Latent attention on the GPU; see cuda_operations.h. CudaKind refuses such models before they are loaded.
#include "backend/operations/cuda_operations.h"
#include "core/error.h"

namespace sharpi {

namespace {

[[noreturn]] void refuse() { throw Error(ErrorKind::Internal, "the GPU has no kernels for latent attention"); }

}  // namespace

void CudaOperations::takeRows(const TakenRows&, RowInput, Readers) { refuse(); }

void CudaOperations::linearByHead(RowInput, const HeadProduct&) { refuse(); }

void CudaOperations::prepareLatent(const LatentCall&, const KvPages&) { refuse(); }

}  // namespace sharpi
