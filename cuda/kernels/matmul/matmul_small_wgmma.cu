// The matrix product of prefill on Hopper in small tiles. They are compiled beside the large ones, which takes as long.
#include "kernels/matmul/matmul_wgmma.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

void matmulInSmallTiles(Stream& stream, const MatmulCall& call) {
    withNarrowType(call.type, [&](auto tag) { launchTiling<decltype(tag)::kType, SmallTiling>(stream, call); });
}

}  // namespace sharpi::cuda
