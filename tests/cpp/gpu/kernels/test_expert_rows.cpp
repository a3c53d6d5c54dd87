// Experts for any number of rows that follow the contract. The bits are the same with all rows at once, with eight at a
// time, and with a stack that comes in pieces.
#include "kernels/experts/expert_cache.h"
#include "kernels/experts/expert_down.h"
#include "kernels/experts/router.h"
#include "matmul_test.h"

namespace sharpi::cuda {
namespace {

class ExpertRowsByContract : public GpuTest {
protected:
    static constexpr int64_t kCols = 512, kHidden = 256;
    static constexpr int32_t kExperts = 23;

    struct Stacks {
        DType type;
        int64_t outputs, cols;
        size_t bytes;
        std::unique_ptr<DeviceArray<uint8_t>> packed;
        // Elements [first, end) in the order of `order`, in memory of their own.
        std::unique_ptr<DeviceArray<uint8_t>> piece(const std::vector<int32_t>& order, int32_t first,
                                                    int32_t end) const {
            const std::vector<uint8_t> all = packed->read();
            std::vector<uint8_t> some;
            for (int32_t i = first; i < end; ++i) {
                const auto begin = all.begin() + static_cast<int64_t>(bytes) * order[static_cast<size_t>(i)];
                some.insert(some.end(), begin, begin + static_cast<int64_t>(bytes));
            }
            return std::make_unique<DeviceArray<uint8_t>>(some);
        }
        ExpertStack over(const DeviceArray<uint8_t>& memory, int32_t count) const {
            return {{type, outputs, cols, memory.get()}, bytes, count};
        }
        ExpertStack all() const { return over(*packed, kExperts); }
    };

    Stacks stacks(DType type, int64_t outputs, int64_t cols) {
        Stacks s = {type, outputs, cols, packedBytes(type, outputs, cols), nullptr};
        s.packed = std::make_unique<DeviceArray<uint8_t>>(s.bytes * kExperts);
        for (size_t e = 0; e < kExperts; ++e) {
            const DeviceArray<uint8_t> file(fileWeights(type, outputs, cols, random()));
            packRows(stream(), {type, outputs, cols, s.packed->get() + e * s.bytes}, 0, outputs, file.get());
            stream().synchronize();
        }
        return s;
    }

    std::vector<int32_t> shuffled() {
        std::vector<int32_t> all(kExperts);
        for (int32_t e = 0; e < kExperts; ++e) all[static_cast<size_t>(e)] = e;
        std::shuffle(all.begin(), all.end(), random());
        return all;
    }

    void compare(DType type, DType downType, int64_t rows, int32_t used);
};

void ExpertRowsByContract::compare(DType type, DType downType, int64_t rows, int32_t used) {
    SCOPED_TRACE(std::string(info(type).name) + ", " + std::to_string(rows) + " rows of " + std::to_string(used));
    const Stacks gate = stacks(type, kHidden, kCols), up = stacks(type, kHidden, kCols),
                 down = stacks(downType, kCols, kHidden);
    const int64_t pairs = rows * used;
    std::vector<int32_t> choice;
    for (int64_t t = 0; t < rows; ++t) {
        const std::vector<int32_t> row = shuffled();
        choice.insert(choice.end(), row.begin(), row.begin() + used);
    }
    const DeviceArray<int32_t> chosen(choice), element(choice.size());
    const DeviceArray<float> floats(randomFloats(static_cast<size_t>(rows * kCols))),
        weight(randomFloats(choice.size()));
    const DeviceArray<uint8_t> xBytes(quantizedRowsBytes(rows, kCols)), hiddenBytes(quantizedRowsBytes(pairs, kHidden));
    const DeviceArray<float> hiddenFloats(static_cast<size_t>(pairs * kHidden)), y(static_cast<size_t>(pairs * kCols));
    const MatvecInput x = {floats.get(), quantizedRowsOver(xBytes.get(), rows, kCols)};
    const RowOutputs hidden = {hiddenFloats.get(), quantizedRowsOver(hiddenBytes.get(), pairs, kHidden), {}};
    const MatvecInput read = {hidden.floats, hidden.quantized};
    convertRows(stream(), floats.get(), rows, kCols, {nullptr, x.quantized, {}});
    const std::vector<float> before = randomFloats(static_cast<size_t>(rows * kCols));
    const std::vector<float> sharedRows = randomFloats(before.size()),
                             sharedScale = randomFloats(static_cast<size_t>(rows));
    const DeviceArray<float> sharedOnDevice(sharedRows), scaleOnDevice(sharedScale);
    const SharedAnswer shared = {sharedOnDevice.get(), scaleOnDevice.get()};
    const DeviceArray<float> atOnce(before), sliced(before), pieced(before);

    expertGated(stream(), x, static_cast<int>(rows), gate.all(), up.all(), chosen.get(), used, hidden);
    expertDownAdd(stream(), read, static_cast<int>(rows), down.all(), chosen.get(), weight.get(), used, atOnce.get(),
                  shared);
    const std::vector<float> expected = atOnce.read();

    for (int64_t first = 0; first < rows; first += 8) {
        const int count = static_cast<int>(std::min<int64_t>(8, rows - first));
        const int32_t* some = chosen.get() + first * used;
        expertGated(stream(), rowsFrom(x, first, kCols), count, gate.all(), up.all(), some, used,
                    rowsFrom(hidden, first * used, kHidden));
        expertDownAdd(stream(), rowsFrom(read, first * used, kHidden), count, down.all(), some,
                      weight.get() + first * used, used, sliced.get() + first * kCols, rowsFrom(shared, first, kCols));
    }
    EXPECT_TRUE(sameBits(expected, sliced.read())) << "eight at a time";

    // The stacks come in pieces, in another order. Each pair is computed while its expert is present.
    const std::vector<int32_t> order = shuffled();
    std::vector<int32_t> places(kExperts);
    for (int32_t i = 0; i < kExperts; ++i) places[static_cast<size_t>(order[static_cast<size_t>(i)])] = i;
    const DeviceArray<int32_t> index(places);
    for (int32_t first = 0; first < kExperts;) {
        const int32_t end = std::min(kExperts, first + 1 + static_cast<int32_t>(random()() % 9)), held = end - first;
        const auto gates = gate.piece(order, first, end), ups = up.piece(order, first, end),
                   downs = down.piece(order, first, end);
        lookUpExperts(stream(), chosen.get(), pairs, {index.get(), first, end}, element.get());
        expertGated(stream(), x, static_cast<int>(rows), gate.over(*gates, held), up.over(*ups, held), element.get(),
                    used, hidden);
        expertMatvec(stream(), read, static_cast<int>(rows), down.over(*downs, held), element.get(), used, true,
                     y.get());
        stream().synchronize();  // before the piece is freed
        first = end;
    }
    combineExperts(stream(), y.get(), nullptr, weight.get(), rows, used, kCols, pieced.get(), shared);
    EXPECT_TRUE(sameBits(expected, pieced.read())) << "in pieces";
}

TEST_F(ExpertRowsByContract, HaveTheSameBitsAtAnyNumber) {
    for (const auto& [type, down] : {std::pair{DType::Q4_K, DType::Q6_K},
                                     {DType::Q8_0, DType::Q8_0},
                                     {DType::BF16, DType::BF16},
                                     {DType::F32, DType::F32}})
        for (const int64_t rows : {1, 9, 40, 64})
            for (const int32_t used : {3, 22}) ASSERT_NO_FATAL_FAILURE(compare(type, down, rows, used));
}

TEST_F(ExpertRowsByContract, AreFoundInAPartOfAStack) {
    for (const size_t pairs : {size_t{1}, size_t{255}, size_t{256}, size_t{257}, size_t{64 * 22}}) {
        std::vector<int32_t> chosen(pairs), places(kExperts);
        for (int32_t& e : chosen) e = static_cast<int32_t>(random()() % kExperts);
        for (int32_t& place : places) place = static_cast<int32_t>(random()() % 30) - 1;  // -1: in no piece
        const DeviceArray<int32_t> onDevice(chosen), index(places);
        for (const auto& [first, end] : {std::pair{0, 30}, {0, 1}, {5, 17}, {4, 4}, {0, INT32_MAX}}) {
            for (const bool indexed : {true, false}) {
                const DeviceArray<int32_t> element(pairs + 1);
                lookUpExperts(stream(), onDevice.get(), static_cast<int64_t>(pairs),
                              {indexed ? index.get() : nullptr, first, end}, element.get());
                std::vector<int32_t> expected;
                for (const int32_t e : chosen) {
                    const int32_t place = indexed ? places[static_cast<size_t>(e)] : e;
                    expected.push_back(place >= first && place < end ? place - first : -1);
                }
                expected.push_back(-1);  // poison
                ASSERT_EQ(expected, element.read()) << pairs << " pairs, " << first << " to " << end;
            }
        }
    }
}

TEST_F(ExpertRowsByContract, RefuseTooManyPairs) {
    EXPECT_THROW(lookUpExperts(stream(), nullptr, -1, {}, nullptr), Error);
    EXPECT_NO_THROW(lookUpExperts(stream(), nullptr, 0, {}, nullptr));
}

}  // namespace
}  // namespace sharpi::cuda
