// The matrix product of prefill on Hopper in small tiles. They are compiled beside the large ones, which takes as long.
#include "kernels/matmul/matmul_wgmma.cuh"
#include "kernels/matmul/matmul_wgmma.h"

namespace sharpi::cuda {

void matmulInSmallTiles(Stream& stream, const MatmulCall& call, int tileRows) {
    withNarrowType(call.type, [&](auto tag) {
        if (tileRows == 64) launchTiling<decltype(tag)::kType, SmallTiling<64>>(stream, call);
        else launchTiling<decltype(tag)::kType, SmallTiling<128>>(stream, call);
    });
}

}  // namespace sharpi::cuda
