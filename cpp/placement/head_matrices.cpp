// See head_matrices.h.
#include "placement/head_matrices.h"

#include <cstring>

#include "core/half.h"

namespace sharpi {

namespace {

const uint8_t* rowAt(const WeightSlice& slice, const Matrix& whole, int64_t head, int64_t row) {
    return whole.data +
           static_cast<size_t>(slice.rowBegin + head * slice.expertStride + row) * rowBytes(whole.type, whole.cols);
}

// Columns of float types are copied, element by element. Those of quantized types have no blocks: they become halves,
// which keep 11 bits of numbers that have fewer than that before they are multiplied by their block's scale.
void copyColumns(const WeightSlice& slice, const Matrix& whole, ToFloats toFloats, uint8_t* to) {
    const bool copies = info(whole.type).isFloat;
    const size_t bytes = copies ? rowBytes(whole.type, 1) : sizeof(uint16_t);
    std::vector<float> floats(static_cast<size_t>(slice.cols));
    for (int64_t head = 0; head < slice.experts; ++head) {
        for (int64_t row = 0; row < slice.rows; ++row) {
            const uint8_t* const from = rowAt(slice, whole, head, row);
            if (!copies) toFloats(whole.type, from, slice.cols, floats.data());
            for (int64_t col = 0; col < slice.cols; ++col) {
                uint8_t* const element = to + static_cast<size_t>((head * slice.cols + col) * slice.rows + row) * bytes;
                const uint16_t half = copies ? uint16_t{0} : f16FromFloat(floats[static_cast<size_t>(col)]);
                if (copies) std::memcpy(element, from + static_cast<size_t>(col) * bytes, bytes);
                else std::memcpy(element, &half, bytes);
            }
        }
    }
}

}  // namespace

Matrix headMatrix(const ListedWeight& weight, const Matrix& whole) {
    const WeightSlice& slice = weight.slice();
    Matrix made;
    made.type = whole.type;
    made.rows = slice.experts * slice.rows;
    made.cols = slice.cols;
    if (weight.form == WeightForm::HeadRows) return made;
    if (!info(whole.type).isFloat) made.type = DType::F16;
    made.rows = slice.experts * slice.cols;
    made.cols = slice.rows;
    return made;
}

std::vector<uint8_t> headMatrixBytes(const ListedWeight& weight, const Matrix& whole, ToFloats toFloats) {
    const WeightSlice& slice = weight.slice();
    const Matrix made = headMatrix(weight, whole);
    std::vector<uint8_t> bytes(static_cast<size_t>(made.rows) * rowBytes(made.type, made.cols));
    if (weight.form == WeightForm::HeadColumns) {
        copyColumns(slice, whole, toFloats, bytes.data());
        return bytes;
    }
    const size_t ofHead = static_cast<size_t>(slice.rows) * rowBytes(whole.type, whole.cols);
    for (int64_t head = 0; head < slice.experts; ++head)
        std::memcpy(bytes.data() + static_cast<size_t>(head) * ofHead, rowAt(slice, whole, head, 0), ofHead);
    return bytes;
}

}  // namespace sharpi
