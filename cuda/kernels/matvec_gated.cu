// The gated first half of a feed-forward layer, dense or an expert's: gate and up, SiLU, their product and its
// quantization in one launch (matvec_gated.cuh).
#include "kernels/matvec_gated.cuh"

namespace sharpi::cuda {

static GatedProduct gatedOf(const MatvecInput& x, int rows, const Matrix& gate, const Matrix& up, const RowOutputs& out) {
    if (gate.type != up.type || gate.rows != up.rows || gate.cols != up.cols)
        throw Error(ErrorKind::Internal, "matvecGated: gate and up differ in type or shape");
    checkShape(gate);
    if (out.quantized.q && gate.rows % kContractBlock != 0)
        throw Error(ErrorKind::Internal, "matvecGated: " + std::to_string(gate.rows) + " values cannot be quantized in blocks of 32");
    GatedProduct p;
    p.gate = gate.data;
    p.up = up.data;
    p.shape = packedShape(gate.type, gate.rows, gate.cols);
    p.hidden = static_cast<int32_t>(gate.rows);
    p.cols = static_cast<int32_t>(gate.cols);
    p.x = x;
    p.rows = rows;
    p.out = out;
    return p;
}

void matvecGated(Stream& stream, const MatvecInput& x, int rows, const Matrix& gate, const Matrix& up, const RowOutputs& out) {
    if (rows == 0 || gate.rows == 0) return;
    const GatedProduct p = gatedOf(x, rows, gate, up, out);
    withType(gate.type, [&](auto tag) { launchGated<decltype(tag)::kType>(stream, p, 1); });
}

void expertGated(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& gate, const ExpertStack& up,
                 const int32_t* chosen, int32_t used, const RowOutputs& out) {
    if (rows == 0 || used == 0 || gate.first.rows == 0) return;
    GatedProduct p = gatedOf(x, 1, gate.first, up.first, out);
    p.chosen = chosen;
    p.gateStride = static_cast<int64_t>(gate.stride);
    p.upStride = static_cast<int64_t>(up.stride);
    p.used = used;
    withType(gate.first.type, [&](auto tag) { launchGated<decltype(tag)::kType>(stream, p, static_cast<int64_t>(rows) * used); });
}

}  // namespace sharpi::cuda
