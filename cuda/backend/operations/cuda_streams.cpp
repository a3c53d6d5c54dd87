// Hyper-connections and rows of blocks on the GPU; see cuda_operations.h. CudaKind refuses such models before they are
// loaded.
#include "backend/operations/cuda_operations.h"
#include "core/error.h"

namespace sharpi {

namespace {

[[noreturn]] void refuse() { throw Error(ErrorKind::Internal, "the GPU has no kernels for hyper-connections"); }

}  // namespace

void CudaOperations::compress(const CompressCall&) { refuse(); }

void CudaOperations::chooseBlocks(const IndexCall&) { refuse(); }

void CudaOperations::beginStreams() { refuse(); }

void CudaOperations::normStreams(float, const Weight&) { refuse(); }

void CudaOperations::enterStreams(const StreamsCall&) { refuse(); }

void CudaOperations::leaveStreams(const StreamsCall&) { refuse(); }

void CudaOperations::endStreams(const StreamsCall&) { refuse(); }

}  // namespace sharpi
