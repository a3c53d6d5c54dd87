// Weights of any type times activations, by the contract (core/contract.h).
#include "cpu/kernels/internal.h"

#if defined(__AVX2__)
#include "cpu/kernels/matmul/matmul_tile.h"
#include "cpu/kernels/matmul/matmul_vector.h"
#else
#include "cpu/kernels/matmul/matmul_scalar.h"
#endif

namespace sharpi::cpu::SHARPI_ISA {

void matmulQuantized(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch) {
    withBlockOf(args.w.type, [&](auto tag) {
        using Block = typename decltype(tag)::Type;
#if defined(__AVX2__)
        // Repacking a tile of rows pays for itself once a few tokens share it.
        if (args.count > kVectorTokens) matmulTiles<Block>(args, rowBegin, rowEnd, scratch);
        else matmulVector<Block>(args, rowBegin, rowEnd, scratch);
#else
        (void)scratch;
        matmulScalar<Block>(args, rowBegin, rowEnd);
#endif
    });
}

void matmul(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch) {
    if (args.w.type == DType::F32 || args.w.type == DType::F16 || args.w.type == DType::BF16)
        matmulFloat(args, rowBegin, rowEnd, scratch);
    else matmulQuantized(args, rowBegin, rowEnd, scratch);
}

}  // namespace sharpi::cpu::SHARPI_ISA
