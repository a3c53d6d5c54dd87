// Launches the gated first half of a feed-forward layer, dense or of experts: gate and up, the activation and
// its quantization in one launch (matvec_gated.cuh, mma_gated.cuh).
#include "kernels/matvec/mma/mma_gated.cuh"

#include "kernels/matvec/grouped.cuh"

namespace sharpi::cuda {

static GatedProduct gatedOf(const MatvecInput& x, int rows, const Matrix& gate, const Matrix& up, const RowOutputs& out,
                            const GatedJoin& join) {
    if (gate.type != up.type || gate.rows != up.rows || gate.cols != up.cols)
        throw Error(ErrorKind::Internal, "matvecGated: gate and up differ in type or shape");
    checkShape(gate);
    if (out.quantized.q && gate.rows % kContractBlock != 0)
        throw Error(ErrorKind::Internal,
                    "matvecGated: " + std::to_string(gate.rows) + " values cannot be quantized in blocks of 32");
    GatedProduct p;
    p.gate = gate.data;
    p.up = up.data;
    p.shape = packedShape(gate.type, gate.rows, gate.cols);
    p.hidden = p.width = static_cast<int32_t>(gate.rows);
    p.cols = static_cast<int32_t>(gate.cols);
    p.x = x;
    p.rows = rows;
    p.out = out;
    p.join = join;
    return p;
}

// The same outputs from column `begin` on, so that the kernel does not need to know `begin`.
static RowOutputs columnsFrom(const RowOutputs& out, int64_t begin) {
    RowOutputs shifted = out;
    const int64_t block = begin / kContractBlock;
    if (out.floats) shifted.floats += begin;
    if (out.quantized.q) {
        shifted.quantized.q += block * (kContractBlock / 2);
        shifted.quantized.scale += block;
        shifted.quantized.sums += block;
        if (out.quantized.wide.codes) {
            shifted.quantized.wide.codes += block * WideColumns::kCodeBytes;
            shifted.quantized.wide.ends += block * WideColumns::kEndFloats;
        }
    }
    return shifted;
}

// The part of p with `rows` rows of activations from `first` on.
static GatedProduct rowsOf(const GatedProduct& p, int first, int rows) {
    GatedProduct part = p;
    part.x = rowsFrom(p.x, first, p.cols);
    part.rows = rows;
    part.out = rowsFrom(p.out, first, p.width);
    return part;
}

void matvecGated(Stream& stream, const MatvecInput& x, int rows, const Matrix& gate, const Matrix& up,
                 const RowOutputs& out, int64_t begin, int64_t hidden, const GatedJoin& join) {
    if (rows == 0 || gate.rows == 0) return;
    const int64_t width = hidden == 0 ? gate.rows : hidden;
    if (begin < 0 || begin % kContractBlock != 0 || width - begin < gate.rows || width > int64_t{1} << 30 ||
        (out.quantized.q && width % kContractBlock != 0))
        throw Error(ErrorKind::Internal, "matvecGated: " + std::to_string(gate.rows) + " values from column " +
                                             std::to_string(begin) + " on do not fit in rows of " +
                                             std::to_string(width));
    checkRows(rows);
    GatedProduct p = gatedOf(x, rows, gate, up, columnsFrom(out, begin), join);
    if (join.gateBias) p.join.gateBias += begin;
    if (join.upBias) p.join.upBias += begin;
    p.width = static_cast<int32_t>(width);
    withType(gate.type, [&](auto tag) {
        constexpr DType kType = decltype(tag)::kType;
        if constexpr (!kIsFloat<kType>)
            if (usesMma(stream, kType, p.rows)) return launchMmaGated<kType>(stream, p);
        for (int first = 0; first < rows; first += kPlainMatvecRows)
            launchGated<kType>(stream, rowsOf(p, first, std::min(kPlainMatvecRows, rows - first)), 1);
    });
}

void expertGated(Stream& stream, const MatvecInput& x, int rows, const ExpertStack& gate, const ExpertStack& up,
                 const int32_t* chosen, int32_t used, const RowOutputs& out, const GatedJoin& join,
                 const PairGroups& groups) {
    if (rows == 0 || used == 0 || gate.first.rows == 0) return;
    GatedProduct p = gatedOf(x, 1, gate.first, up.first, out, join);
    if (groups.count && hasMma(stream, gate.first.type)) {
        GroupedGated grouped;
        grouped.w = groupedWeights(x, gate, groups, used);
        grouped.w.data[1] = up.first.data;
        grouped.w.stride[1] = static_cast<int64_t>(up.stride);
        grouped.out = out;
        grouped.join = join;
        return launchGroupedGated(stream, gate.first.type, grouped, groups);
    }
    p.chosen = chosen;
    p.gateStride = static_cast<int64_t>(gate.stride);
    p.upStride = static_cast<int64_t>(up.stride);
    p.used = used;
    withType(gate.first.type,
             [&](auto tag) { launchGated<decltype(tag)::kType>(stream, p, static_cast<int64_t>(rows) * used); });
}

}  // namespace sharpi::cuda
