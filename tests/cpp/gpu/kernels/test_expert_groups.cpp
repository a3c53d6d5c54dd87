// Products of pairs that are grouped by expert have the bits of the products of each pair alone: for every type, up to
// 64 rows, even and skewed choices, and pairs without an expert. test_matvec.cpp compares the latter with the CPU's.
#include <algorithm>
#include <numeric>

#include "kernels/experts/expert_down.h"
#include "kernels/rows/pair_groups.h"
#include "matmul_test.h"

namespace sharpi::cuda {
namespace {

// What the rows choose: any experts; a few, by all rows; or any, with some pairs left to another processor.
enum class Choice { Even, Skewed, Partial };

class ExpertGroups : public GpuTest {
protected:
    struct Stack {
        Matrix first;
        int32_t count;
        std::unique_ptr<DeviceArray<uint8_t>> memory;
        ExpertStack stack() const { return {first, packedBytes(first.type, first.rows, first.cols), count}; }
    };
    Stack stack(DType type, int64_t rows, int64_t cols, int32_t count) {
        Stack made = {{type, rows, cols, nullptr}, count, nullptr};
        const size_t bytes = packedBytes(type, rows, cols);
        made.memory = std::make_unique<DeviceArray<uint8_t>>(bytes * static_cast<size_t>(count));
        made.first.data = made.memory->get();
        for (int32_t e = 0; e < count; ++e) {
            const DeviceArray<uint8_t> file(fileWeights(type, rows, cols, random()));
            packRows(stream(), made.stack().at(e), 0, rows, file.get());
            stream().synchronize();
        }
        return made;
    }

    struct Rows {
        std::unique_ptr<DeviceArray<float>> floats;
        std::unique_ptr<DeviceArray<uint8_t>> bytes;
        MatvecInput input;
    };
    Rows rowsOf(int64_t rows, int64_t cols) {
        Rows made;
        made.floats = std::make_unique<DeviceArray<float>>(randomFloats(static_cast<size_t>(rows * cols)));
        made.bytes = std::make_unique<DeviceArray<uint8_t>>(quantizedRowsBytes(rows, cols));
        made.input = {made.floats->get(), quantizedRowsOver(made.bytes->get(), rows, cols)};
        convertRows(stream(), made.floats->get(), rows, cols, {nullptr, made.input.quantized, {}});
        return made;
    }

    std::vector<int32_t> choose(int64_t rows, int32_t used, int32_t experts, Choice choice) {
        std::vector<int32_t> chosen, all(static_cast<size_t>(experts));
        std::iota(all.begin(), all.end(), 0);
        for (int64_t t = 0; t < rows; ++t) {
            if (choice != Choice::Skewed || random()() % 8 == 0) std::shuffle(all.begin(), all.end(), random());
            for (int32_t k = 0; k < used; ++k)
                chosen.push_back(choice == Choice::Partial && random()() % 3 == 0 ? -1 : all[static_cast<size_t>(k)]);
        }
        return chosen;
    }

    // The groups of `chosen` with their memory.
    struct Grouped {
        DeviceArray<int32_t> chosen;
        DeviceArray<uint8_t> memory;
        PairGroups groups;
        Grouped(Stream& stream, const std::vector<int32_t>& of, int32_t experts)
            : chosen(of),
              memory(pairGroupsBytes(static_cast<int64_t>(of.size()), experts)),
              groups(
                  groupPairs(stream, chosen.get(), static_cast<int64_t>(of.size()), experts, experts, memory.get())) {}
    };

    void compareGated(DType type, int rows, int32_t used, int64_t hidden, int64_t cols, Choice choice,
                      const GatedJoin& join = {});
    void compareProduct(DType type, int rows, int32_t used, int64_t outputs, int64_t cols, Choice choice);
    void compareDown(DType type, int rows, int32_t used, int64_t outputs, int64_t hidden, int variant);

    static constexpr int32_t kExperts = 6;
};

void ExpertGroups::compareGated(DType type, int rows, int32_t used, int64_t hidden, int64_t cols, Choice choice,
                                const GatedJoin& join) {
    SCOPED_TRACE(std::string(info(type).name) + ", " + std::to_string(rows) + " rows, gated");
    const Stack gate = stack(type, hidden, cols, kExperts), up = stack(type, hidden, cols, kExperts);
    const Rows x = rowsOf(rows, cols);
    const Grouped grouped(stream(), choose(rows, used, kExperts, choice), kExperts);
    const int64_t pairs = int64_t{rows} * used;
    GatedJoin own = join;
    own.expert = join.gateBias ? grouped.chosen.get() : nullptr;
    const bool quantizes = hidden % 32 == 0;
    std::vector<std::vector<float>> floats;
    std::vector<std::vector<uint8_t>> bytes;
    for (const PairGroups& groups : {PairGroups{}, grouped.groups}) {
        const DeviceArray<float> values(static_cast<size_t>(pairs * hidden));
        const DeviceArray<uint8_t> quantized(quantizes ? quantizedRowsBytes(pairs, hidden) : 1);
        RowOutputs out;
        out.floats = values.get();
        if (quantizes) out.quantized = quantizedRowsOver(quantized.get(), pairs, hidden);
        expertGated(stream(), x.input, rows, gate.stack(), up.stack(), grouped.chosen.get(), used, out, own, groups);
        floats.push_back(values.read());
        bytes.push_back(quantized.read());
    }
    ASSERT_TRUE(sameBits(floats[0], floats[1]));
    ASSERT_EQ(bytes[0], bytes[1]);
}

void ExpertGroups::compareProduct(DType type, int rows, int32_t used, int64_t outputs, int64_t cols, Choice choice) {
    SCOPED_TRACE(std::string(info(type).name) + ", " + std::to_string(rows) + " rows, product");
    const Stack w = stack(type, outputs, cols, kExperts);
    const Grouped grouped(stream(), choose(rows, used, kExperts, choice), kExperts);
    const int64_t pairs = int64_t{rows} * used;
    for (const bool rowPerPair : {false, true}) {
        const Rows x = rowsOf(rowPerPair ? pairs : rows, cols);
        const DeviceArray<float> alone(static_cast<size_t>(pairs * outputs)), shared(alone.size());
        expertMatvec(stream(), x.input, rows, w.stack(), grouped.chosen.get(), used, rowPerPair, alone.get());
        expertMatvec(stream(), x.input, rows, w.stack(), grouped.chosen.get(), used, rowPerPair, shared.get(),
                     grouped.groups);
        ASSERT_TRUE(sameBits(alone.read(), shared.read())) << (rowPerPair ? "a row for each pair" : "a row for all");
    }
}

// The bits of `variant`: biases, weights, a shared answer, its scale, adding.
void ExpertGroups::compareDown(DType type, int rows, int32_t used, int64_t outputs, int64_t hidden, int variant) {
    SCOPED_TRACE(std::string(info(type).name) + ", " + std::to_string(rows) + " rows, down " + std::to_string(variant));
    const Stack w = stack(type, outputs, hidden, kExperts);
    const int64_t pairs = int64_t{rows} * used;
    const auto count = static_cast<size_t>(rows * outputs);
    const Rows x = rowsOf(pairs, hidden);
    const Grouped grouped(stream(), choose(rows, used, kExperts, Choice::Even), kExperts);
    const DeviceArray<float> bias(randomFloats(static_cast<size_t>(kExperts * outputs))),
        weight(randomFloats(static_cast<size_t>(pairs))), answer(randomFloats(count)),
        scale(randomFloats(static_cast<size_t>(rows))), answers(static_cast<size_t>(pairs * outputs));
    const std::vector<float> before = randomFloats(count);
    SharedAnswer shared;
    if (variant & 4) shared = {answer.get(), variant & 8 ? scale.get() : nullptr};
    const AnswerTerms terms = {variant & 1 ? bias.get() : nullptr, nullptr, (variant & 16) != 0};
    std::vector<std::vector<float>> results;
    for (const PairGroups& groups : {PairGroups{}, grouped.groups}) {
        const DeviceArray<float> to(before);
        expertDownAdd(stream(), x.input, rows, w.stack(), grouped.chosen.get(), variant & 2 ? weight.get() : nullptr,
                      used, to.get(), shared, terms, groups, answers.get());
        results.push_back(to.read());
    }
    ASSERT_TRUE(sameBits(results[0], results[1]));
}

TEST_F(ExpertGroups, HaveTheBitsOfSinglePairsForEveryType) {
    for (const DType type : reference::quantizedTypes())
        for (const auto& [rows, choice] : {std::pair{2, Choice::Even}, {9, Choice::Partial}, {33, Choice::Skewed}}) {
            ASSERT_NO_FATAL_FAILURE(compareGated(type, rows, 2, 96, blocks(type, 3, 11), choice));
            ASSERT_NO_FATAL_FAILURE(compareProduct(type, rows, 2, 37, blocks(type, 5, 9), choice));
        }
}

TEST_F(ExpertGroups, HaveTheBitsOfSinglePairsForAnyNumberOfRows) {
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::MXFP4})
        for (const int rows : {1, 3, 4, 5, 8, 12, 16, 17, 24, 31, 40, 48, 63, 64})
            for (const Choice choice : {Choice::Even, Choice::Skewed, Choice::Partial}) {
                const int32_t used = 1 + rows % 4;
                ASSERT_NO_FATAL_FAILURE(compareGated(type, rows, used, 64, 1280, choice));
                ASSERT_NO_FATAL_FAILURE(compareProduct(type, rows, used, 80, 768, choice));
            }
}

// Rows of 1, 8, 32 and more blocks, and rows and columns that do not fill a tile.
TEST_F(ExpertGroups, HaveTheBitsOfSinglePairsForAnyShape) {
    for (const int64_t cols : {32, 96, 256, 288, 1024, 1056, 2880})
        for (const int64_t outputs : {1, 16, 31, 33, 129})
            ASSERT_NO_FATAL_FAILURE(compareProduct(DType::Q8_0, 20, 3, outputs, cols, Choice::Even));
    for (const int64_t hidden : {13, 32, 45, 160})
        ASSERT_NO_FATAL_FAILURE(compareGated(DType::MXFP4, 20, 3, hidden, 2880, Choice::Even));
}

TEST_F(ExpertGroups, KnowBiasesActivationsAndWeights) {
    const int64_t hidden = 64;
    const int32_t used = 3;
    const DeviceArray<float> gateBias(randomFloats(kExperts * hidden)), upBias(randomFloats(kExperts * hidden)),
        weight(randomFloats(64 * used));
    for (const Activation activation :
         {Activation{}, Activation{ActivationKind::Gelu}, Activation{ActivationKind::ClampedSwiglu, 7.0f},
          Activation{ActivationKind::ClampedSilu, 7.0f}})
        for (const int rows : {2, 20, 64})
            for (const bool biased : {false, true})
                for (const bool weighted : {false, true}) {
                    GatedJoin join{activation};
                    if (biased) join.gateBias = gateBias.get(), join.upBias = upBias.get();
                    if (weighted) join.weight = weight.get();
                    ASSERT_NO_FATAL_FAILURE(compareGated(DType::MXFP4, rows, used, hidden, 416, Choice::Even, join));
                }
}

TEST_F(ExpertGroups, SumAnswersByRank) {
    for (const DType type : {DType::Q4_K, DType::Q6_K, DType::MXFP4})
        for (int variant = 0; variant < 32; ++variant)
            ASSERT_NO_FATAL_FAILURE(
                compareDown(type, variant % 2 ? 5 : 40, 1 + variant % 6, 37 + variant % 4, 768, variant));
    // Float weights are never grouped, whatever the call says.
    ASSERT_NO_FATAL_FAILURE(compareDown(DType::BF16, 12, 4, 37, 96, 31));
}

TEST_F(ExpertGroups, PayIfEnoughPairsMeet) {
    const ExpertStack of128 = {{DType::Q4_K, 64, 256, nullptr}, 0, 128};
    const bool able = stream().device().codeVersion >= 80;
    EXPECT_FALSE(sharesExperts(stream(), of128, 1, 8));
    EXPECT_FALSE(sharesExperts(stream(), of128, 4, 8));
    EXPECT_EQ(able, sharesExperts(stream(), of128, 8, 8));
    EXPECT_EQ(able, sharesExperts(stream(), {of128.first, 0, 8}, 2, 2));
    EXPECT_FALSE(sharesExperts(stream(), {of128.first, 0, 2}, 1, 2)) << "a row's experts are distinct";
    EXPECT_FALSE(sharesExperts(stream(), {{DType::F16, 64, 256, nullptr}, 0, 8}, 64, 8));
}

}  // namespace
}  // namespace sharpi::cuda
