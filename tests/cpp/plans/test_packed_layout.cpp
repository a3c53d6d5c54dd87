// Where packed weights lie: planes that do not overlap, aligned, in hardly more bytes than the file has. No GPU needed.
#include <gtest/gtest.h>

#include <string>

#include "core/error.h"
#include "kernels/formats/packed_shape.h"
#include "reference_matmul.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

std::vector<DType> allTypes() {
    std::vector<DType> types = reference::quantizedTypes();
    types.insert(types.end(), {DType::F32, DType::F16, DType::BF16});
    return types;
}

class PackedLayout : public testing::TestWithParam<DType> {};

TEST_P(PackedLayout, TakesHardlyMoreBytesThanTheFile) {
    const DType type = GetParam();
    const int64_t unit = info(type).isFloat ? 1 : info(type).blockElements;
    for (const int64_t rows : {1, 2, 3, 7, 128, 4097}) {
        for (const int64_t blocks : {1, 2, 5, 11, 37, 128}) {
            const int64_t cols = blocks * unit;
            const size_t inFile = static_cast<size_t>(rows) * rowBytes(type, cols),
                         packed = packedBytes(type, rows, cols);
            EXPECT_GE(packed, inFile) << rows << " x " << cols;
            EXPECT_LE(packed, inFile + 256) << rows << " x " << cols;
            EXPECT_EQ(packed % 128, 0u);
        }
    }
    // A large embedding table, past 32 bits.
    const size_t inFile = 300000 * rowBytes(type, 16384);
    EXPECT_GE(packedBytes(type, 300000, 16384), inFile);
    EXPECT_LE(packedBytes(type, 300000, 16384), inFile + 256);
}

TEST_P(PackedLayout, HasDisjointAlignedPlanes) {
    const DType type = GetParam();
    if (info(type).isFloat) return;  // rows as they are in the file
    const PlaneSizes sizes = planeSizes(type);
    for (const int64_t rows : {1, 3, 5, 64}) {
        for (const int64_t cols : {1 * 256, 3 * 256, 256 * 17}) {
            const PackedShape shape = packedShape(type, rows, cols);
            int64_t end = 0, used = 0;
            for (int p = 0; p < PackedShape::kPlanes; ++p) {
                if (sizes.plane[p].bytes == 0) continue;
                const int64_t bytes = rows * cols / 32 / sizes.plane[p].blocks * sizes.plane[p].bytes;
                EXPECT_EQ(shape.plane[p] % 16, 0);
                EXPECT_GE(shape.plane[p], end);
                end = shape.plane[p] + bytes;
                used += bytes;
            }
            EXPECT_LE(end, shape.bytes);
            EXPECT_EQ(used, rows * static_cast<int64_t>(rowBytes(type, cols)));  // the file's bits, none twice
        }
    }
}

TEST_P(PackedLayout, RefusesPartsOfBlocks) {
    const DType type = GetParam();
    if (info(type).isFloat) return;  // rows of any length
    EXPECT_THROW(packedShape(type, 1, info(type).blockElements + 1), Error);
    EXPECT_THROW(packedBytes(type, 1, info(type).blockElements / 2), Error);
}

INSTANTIATE_TEST_SUITE_P(Types, PackedLayout, testing::ValuesIn(allTypes()),
                         [](const auto& test) { return std::string(sharpi::info(test.param).name); });

}  // namespace
