// The list of a model's weights. Each tensor that an architecture uses is listed here once, with the part of the file
// it is, what it is used for and in what form a processor needs it. Loading, placement, planning, streaming and checks
// work from this list; layers name its entries by id.
#pragma once

#include <cstdint>
#include <vector>

namespace sharpi {

// Some rows of a tensor, or some columns of floats. Newer files fuse matrices (attn_qkv, ffn_gate_up_exps): each part
// is then a slice of one tensor. A tensor of experts is a stack: the rows of expert e start at rowBegin + e *
// expertStride.
struct WeightSlice {
    int32_t tensor = -1;  // index into the TensorTable
    int64_t rowBegin = 0;
    int64_t colBegin = 0;  // of floats that are a part of a fused tensor; matrices are taken whole
    int64_t rows = 0;
    int64_t cols = 0;
    int64_t experts = 1;
    int64_t expertStride = 0;  // rows from one expert to the next
    explicit operator bool() const { return tensor >= 0; }
};

// What a weight is used for. It decides which homes a plan may give it.
enum class WeightRole : uint8_t {
    Embedding,       // a token reads one row
    LayerEmbedding,  // the same, of a table with rows for all layers: large, and never multiplied
    Vector,          // norms, biases and other small parameters: always in the processor's memory
    Attention,       // matrices that each token reads in full: those of mixers, shared experts and draft projections
    Router,
    FfnGate,
    FfnUp,
    FfnDown,
    Experts,  // a token reads the experts that it chose
    Head,
};
constexpr WeightRole kWeightRoles[] = {
    WeightRole::Embedding, WeightRole::LayerEmbedding, WeightRole::Vector,  WeightRole::Attention, WeightRole::Router,
    WeightRole::FfnGate,   WeightRole::FfnUp,          WeightRole::FfnDown, WeightRole::Experts,   WeightRole::Head};
// The role's name in plans and in Python: "embedding", "vector", ..., "ffn_gate", ...
const char* roleName(WeightRole role);
// Whether the CPU may compute some rows of such a matrix while a GPU computes the others.
inline bool sharesRows(WeightRole role) {
    return role == WeightRole::FfnGate || role == WeightRole::FfnUp || role == WeightRole::FfnDown ||
           role == WeightRole::Head;
}

enum class WeightForm : uint8_t {
    Matrix,       // products read it whole
    Table,        // single rows are read
    Stack,        // one matrix for each expert
    Vector,       // floats
    Transposed,   // floats, [cols, rows] of the file's [rows, cols]
    HeadRows,     // a matrix: the rows of each head behind one another; a slice has heads for experts
    HeadColumns,  // the same with each head's matrix transposed
    Parameters,   // floats that loading computes with; the processor does not see them
};

// The passes that use a weight. The output head belongs to both.
enum class ModelPart : uint8_t { Body, Prediction, Head };

struct ListedWeight {
    // One slice; for a Vector that joins several, all of them in order.
    std::vector<WeightSlice> slices;
    WeightRole role = WeightRole::Vector;
    WeightForm form = WeightForm::Vector;
    ModelPart part = ModelPart::Body;
    int32_t layer = -1;  // the layer's number; a prediction layer's is the one after the last layer's; -1: no layer's
    // Weights of one unit are used together, so they share one home: a layer's gate and up, a layer's stacks. The
    // number is the id of the unit's first weight.
    int32_t unit = -1;
    double factor = 1.0;  // of a vector: its values are multiplied by it when they are loaded
    int64_t below = 0;    // of a vector of integers: what each is below; 0: they are not integers
    double share = 1.0;   // the part of its bytes that a token reads
    int32_t sameAs = -1;  // an earlier entry that lists the same slice: a tied output head
    const WeightSlice& slice() const { return slices.front(); }
};

// An entry's number. The types keep vectors, matrices and stacks apart.
template <WeightForm> struct WeightId {
    int32_t index = -1;
    explicit operator bool() const { return index >= 0; }
};
using MatrixId = WeightId<WeightForm::Matrix>;  // also of tables and of matrices by head
using StackId = WeightId<WeightForm::Stack>;
using VectorId = WeightId<WeightForm::Vector>;  // also of transposed matrices and of parameters

}  // namespace sharpi
