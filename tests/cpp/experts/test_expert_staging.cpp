// The staging memory for experts on their way, and how many may be on their way: both follow from the largest expert.
#include <gtest/gtest.h>

#include <vector>

#include "experts/expert_staging.h"

namespace {

using namespace sharpi;

constexpr size_t kMiB = size_t{1} << 20;

ExpertStacks layer(DType gate, DType up, DType down, int64_t embedding, int64_t hidden) {
    const auto stack = [](DType type, int64_t rows, int64_t cols) {
        return MatrixStack{{type, rows, cols, nullptr}, 0, 8};
    };
    return {stack(gate, hidden, embedding), stack(up, hidden, embedding), stack(down, embedding, hidden)};
}

TEST(ExpertStaging, HoldsTheLargestExpertsFileRows) {
    // 34 bytes for 32 numbers; 18 for 32.
    const size_t small = 3 * 256 * 512 / 32 * 18, large = 2 * 768 * 512 / 32 * 34 + 768 * 512 / 32 * 18;
    const ExpertStacks a = layer(DType::Q4_0, DType::Q4_0, DType::Q4_0, 512, 256),
                       b = layer(DType::Q8_0, DType::Q8_0, DType::Q4_0, 512, 768);
    EXPECT_EQ(expertStaging({a}).stageBytes, small);
    for (const auto& layers : {std::vector<ExpertStacks>{a, b, a}, std::vector<ExpertStacks>{b, a}}) {
        const ExpertStaging staging = expertStaging(layers);
        EXPECT_EQ(staging.stageBytes, large);
        EXPECT_EQ(staging.stages, 3);
        EXPECT_EQ(staging.bytes(), 3 * large);
        EXPECT_EQ(staging.depth, ExpertStaging::kMaxDepth);
    }
    // Each matrix begins aligned.
    EXPECT_EQ(expertStaging({layer(DType::Q4_0, DType::Q4_0, DType::Q4_0, 32, 32)}).stageBytes, 3u * 768);
}

TEST(ExpertStaging, FloatsPassThroughNone) {
    const ExpertStaging floats = expertStaging({layer(DType::F32, DType::F16, DType::BF16, 512, 256)});
    EXPECT_EQ(floats.bytes(), 0u);
    EXPECT_EQ(floats.stages, 0);
    EXPECT_EQ(floats.depth, ExpertStaging::kMaxDepth);
    EXPECT_EQ(expertStaging({layer(DType::F32, DType::Q4_0, DType::BF16, 512, 256)}).stageBytes, 256u * 512 / 32 * 18);
    EXPECT_EQ(expertStaging({}).bytes(), 0u);
    EXPECT_GE(expertStaging({}).depth, 1);
}

// Fewer large experts may be on their way at once, but at least one.
TEST(ExpertStaging, IsBoundedByBytes) {
    for (int64_t hidden = 256; hidden < 64 * 1024; hidden += 1792) {
        const ExpertStaging staging = expertStaging({layer(DType::Q8_0, DType::Q8_0, DType::Q8_0, 4096, hidden)});
        SCOPED_TRACE(staging.stageBytes / kMiB);
        ASSERT_GE(staging.stages, 1);
        ASSERT_GE(staging.depth, staging.stages);
        EXPECT_TRUE(staging.bytes() <= 64 * kMiB || staging.stages == 1);
        EXPECT_TRUE(staging.stages == 3 || static_cast<size_t>(staging.stages + 1) * staging.stageBytes > 64 * kMiB);
        EXPECT_TRUE(static_cast<size_t>(staging.depth) * staging.stageBytes <= 64 * kMiB || staging.depth == 1);
        EXPECT_TRUE(staging.depth == 16 || static_cast<size_t>(staging.depth + 1) * staging.stageBytes > 64 * kMiB);
    }
}

}  // namespace
