// A layer of experts of which some are missed: what the CPU learns, what is fetched into slots and what is added up;
// and that nothing waits if nothing is missed. The CPU is a thread that gives up after a while, so that a fault fails
// the test instead of hanging.
#include <cmath>
#include <numeric>
#include <set>

#include "core/portable.h"
#include "crossing_test.h"
#include "kernels/experts/expert_cache.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "reference_matmul.h"

namespace sharpi::cuda {
namespace {

const std::vector<DType>& allTypes() {
    static const std::vector<DType> types = [] {
        std::vector<DType> all = reference::quantizedTypes();
        all.insert(all.end(), {DType::F32, DType::F16, DType::BF16});
        return all;
    }();
    return types;
}

// One of the three matrices of all experts, as in the file, in pinned memory that ends with their last piece of 16
// bytes.
struct FileStack {
    FileStack(DType kind, int64_t outputs, int64_t inputs, int32_t experts, size_t skip, std::mt19937& random)
        : type(kind),
          rows(outputs),
          cols(inputs),
          begin(skip),
          bytes((skip + static_cast<size_t>(experts) * expertBytes() + 15) / 16 * 16) {
        std::vector<uint8_t> weights(static_cast<size_t>(experts) * expertBytes());
        if (info(type).isFloat) {
            for (size_t i = 0; i < weights.size(); i += 2) {  // of moderate size for every type
                const uint16_t half =
                    type == DType::F16 ? f16FromFloat(uniform(random)) : bf16FromFloat(uniform(random));
                std::memcpy(&weights[i], &half, 2);
            }
        } else {
            weights = reference::randomWeights(type, rows * experts, cols, reference::Fill::Random, random);
        }
        std::copy(weights.begin(), weights.end(), bytes.get() + begin);
        onDevice = std::make_unique<DeviceArray<uint8_t>>(weights);
    }
    static float uniform(std::mt19937& random) { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random); }
    size_t expertBytes() const { return static_cast<size_t>(rows) * rowBytes(type, cols); }
    const uint8_t* at(int32_t expert) const {
        return bytes.get() + begin + static_cast<size_t>(expert) * expertBytes();
    }

    DType type;
    int64_t rows, cols;
    size_t begin;
    PinnedArray<uint8_t> bytes;
    std::unique_ptr<DeviceArray<uint8_t>> onDevice;
};

struct Shape {
    int64_t hidden, cols;
    int32_t experts;
};

struct ExpertFile {
    ExpertFile(std::array<DType, 3> types, Shape s, std::array<size_t, 3> skip, std::mt19937& random)
        : shape(s),
          gate(types[0], s.hidden, s.cols, s.experts, skip[0], random),
          up(types[1], s.hidden, s.cols, s.experts, skip[1], random),
          down(types[2], s.cols, s.hidden, s.experts, skip[2], random) {}
    ExpertFetch fetch(int32_t expert, int32_t slot) const {
        return {expert, slot, gate.at(expert), up.at(expert), down.at(expert)};
    }
    std::string name() const {
        return std::string(info(gate.type).name) + " " + info(up.type).name + " " + info(down.type).name;
    }

    Shape shape;
    FileStack gate, up, down;
};

// Contiguous slots of whole experts, poisoned.
struct Slots {
    Slots(const ExpertFile& from, int32_t slots)
        : file(from),
          count(slots),
          gateBytes(packed(from.gate)),
          upBytes(packed(from.up)),
          stride(gateBytes + upBytes + packed(from.down)),
          memory(static_cast<size_t>(count) * stride) {}
    static size_t packed(const FileStack& s) { return packedBytes(s.type, s.rows, s.cols); }
    ExpertStacks stacks() const {
        const auto stack = [&](const FileStack& s, size_t offset) {
            return MatrixStack{{s.type, s.rows, s.cols, memory.get() + offset}, stride, count};
        };
        return {stack(file.gate, 0), stack(file.up, gateBytes), stack(file.down, gateBytes + upBytes)};
    }
    // Packs an expert as loading a model does.
    void pack(Stream& stream, int32_t expert, int32_t slot) const {
        const ExpertStacks s = stacks();
        const auto one = [&](const MatrixStack& to, const FileStack& from) {
            packRows(stream, to.at(slot), 0, from.rows,
                     from.onDevice->get() + static_cast<size_t>(expert) * from.expertBytes());
        };
        one(s.gate, file.gate), one(s.up, file.up), one(s.down, file.down);
    }

    const ExpertFile& file;
    int32_t count;
    size_t gateBytes, upBytes, stride;
    DeviceArray<uint8_t> memory;
};

// Lets a kernel go on if it waits although it should not.
class Patience {
public:
    explicit Patience(const Flags& flags)
        : _host([this, &flags] {
              for (int i = 0; i < 2000 && !_over; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
              if (!_over) flags.abort();
          }) {}
    ~Patience() { _over = true; }

private:
    std::atomic<bool> _over{false};
    Host _host;
};

class ExpertCacheTest : public GpuTest {
protected:
    static void later() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
    int32_t below(int32_t bound) { return static_cast<int32_t>(random()() % static_cast<uint32_t>(bound)); }
    DType anyType() { return allTypes()[random()() % allTypes().size()]; }
    // `count` different numbers below `bound`, in any order.
    std::vector<int32_t> distinct(int32_t count, int32_t bound) {
        std::vector<int32_t> all(static_cast<size_t>(bound));
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random());
        all.resize(static_cast<size_t>(count));
        return all;
    }
    std::array<size_t, 3> anySkips() { return {random()() % 160, random()() % 160, random()() % 160}; }

    // The ordered experts arrive in their slots, the other slots do not change, and the pairs name the new slots.
    void expectFetched(const ExpertFile& file, int32_t demanded) {
        const int32_t slotCount = demanded + 2;
        const Slots slots(file, slotCount), want(file, slotCount);
        const std::vector<int32_t> experts = distinct(demanded, file.shape.experts),
                                   places = distinct(demanded, slotCount);
        const PinnedArray<ExpertOrders> orders(1);
        for (size_t i = 0; i < experts.size(); ++i) want.pack(stream(), experts[i], places[i]);
        std::vector<int32_t> chosen(below(2) ? 37 : 64 * 22), slot(chosen.size()), wantSlot(chosen.size());
        for (size_t p = 0; p < chosen.size(); ++p) {
            chosen[p] = below(file.shape.experts);
            slot[p] = below(3) == 0 ? 1000 + below(9) : -1;
            wantSlot[p] = slot[p];
            for (size_t i = 0; i < experts.size(); ++i)
                if (slot[p] < 0 && experts[i] == chosen[p]) wantSlot[p] = places[i];
        }
        DeviceOrders fresh;
        fresh.missed = 1;
        const DeviceArray<DeviceOrders> device(std::vector<DeviceOrders>{fresh});
        const DeviceArray<int32_t> chosenOnDevice(chosen), slotOnDevice(slot);
        const Flags flags;
        {
            const Host host([&] {
                flags.instructedNow().store(4);  // an earlier ticket
                later();
                orders[0].demanded = demanded;
                for (size_t i = 0; i < experts.size(); ++i) orders[0].fetch[i] = file.fetch(experts[i], places[i]);
                flags.instructedNow().store(5, std::memory_order_release);
            });
            fetchExperts(stream(), slots.stacks(), orders.get(), flags.instructed(), 5, device.get(),
                         static_cast<int64_t>(chosen.size()), chosenOnDevice.get(), slotOnDevice.get());
            stream().synchronize();
        }
        ASSERT_TRUE(want.memory.read() == slots.memory.read());
        ASSERT_EQ(wantSlot, slotOnDevice.read());
        EXPECT_EQ(device.read()[0].ready, 1u);
    }

    void expectReplayed(int64_t rows, int32_t used);

    // hosts: how many pairs are the CPU's: none, some or all. skip: floats before the shared answer.
    // varied: answers have biases, weights are 1, the shared answer has no scale, and rows are replaced.
    void expectCombined(int64_t cols, int32_t used, int32_t hosts, bool isShared, size_t skip = 0,
                        bool varied = false) {
        SCOPED_TRACE(std::to_string(cols) + " columns, " + std::to_string(used) + " ranks, " + std::to_string(hosts));
        const int64_t rows = below(3) ? 1 + below(8) : 9 + below(56);
        const size_t pairs = static_cast<size_t>(rows * used), values = pairs * static_cast<size_t>(cols);
        std::vector<int32_t> slot(pairs);
        for (int32_t& s : slot) s = hosts == 2 || (hosts == 1 && below(2)) ? -1 : below(40);
        if (hosts == 1) slot[random()() % pairs] = -1;
        // Each side has poison in place of the other side's answers.
        std::vector<float> answers = randomFloats(values), y = answers;
        const std::vector<float> weight = randomFloats(pairs), before = randomFloats(static_cast<size_t>(rows * cols));
        const PinnedArray<float> hostY(values);
        for (size_t p = 0; p < pairs; ++p)
            if (slot[p] < 0) std::fill_n(y.begin() + static_cast<int64_t>(p) * cols, cols, NAN);
        const DeviceArray<float> yOnDevice(y), weightOnDevice(weight), residual(before);
        const DeviceArray<int32_t> slotOnDevice(slot);
        const std::vector<float> answer = randomFloats(skip + before.size()),
                                 scale = randomFloats(static_cast<size_t>(rows), 20.0f);
        const DeviceArray<float> answerOnDevice(answer), scaleOnDevice(scale);
        std::vector<int32_t> expert(pairs);
        for (int32_t& e : expert) e = below(5);
        const std::vector<float> bias = randomFloats(static_cast<size_t>(5 * cols));
        const DeviceArray<int32_t> expertOnDevice(expert);
        const DeviceArray<float> biasOnDevice(bias);
        AnswerTerms terms;
        if (varied) terms = {biasOnDevice.get(), expertOnDevice.get(), false};
        const Flags flags;
        {
            const Patience patience(flags);
            const Host host([&] {
                if (!hosts) return;
                later();
                for (size_t p = 0; p < pairs; ++p)
                    if (slot[p] < 0)
                        std::copy_n(answers.begin() + static_cast<int64_t>(p) * cols, cols,
                                    hostY.get() + static_cast<int64_t>(p) * cols);
                flags.returnedNow().store(9, std::memory_order_release);
            });
            combineAnswers(
                stream(), yOnDevice.get(), hostY.get(), slotOnDevice.get(), varied ? nullptr : weightOnDevice.get(),
                rows, used, cols, flags.returned(), 9, residual.get(),
                {isShared ? answerOnDevice.get() + skip : nullptr, varied ? nullptr : scaleOnDevice.get()}, terms);
            stream().synchronize();
        }
        std::vector<float> want = before;
        for (int64_t t = 0; t < rows; ++t) {
            std::vector<float> sum(static_cast<size_t>(cols), 0.0f);
            for (size_t p = static_cast<size_t>(t * used); p < static_cast<size_t>((t + 1) * used); ++p) {
                float* const of = &answers[p * static_cast<size_t>(cols)];
                if (varied) cpu::kernels().add(of, &bias[static_cast<size_t>(expert[p] * cols)], cols);
                cpu::kernels().addScaled(sum.data(), of, varied ? 1.0f : weight[p], cols);
            }
            if (isShared)
                cpu::kernels().addScaled(sum.data(), &answer[skip + static_cast<size_t>(t * cols)],
                                         varied ? 1.0f : portableSigmoid(scale[static_cast<size_t>(t)]), cols);
            if (varied) std::fill_n(&want[static_cast<size_t>(t * cols)], cols, 0.0f);
            cpu::kernels().add(&want[static_cast<size_t>(t * cols)], sum.data(), cols);
        }
        ASSERT_TRUE(sameBits(want, residual.read()));
    }
};

TEST_F(ExpertCacheTest, WhatIsFetchedIsWhatLoadingPacks) {
    for (const DType type : allTypes()) {
        for (const Shape shape : {Shape{256, 256, 3}, Shape{512, 768, 9}}) {
            for (int turn = 0; turn < 3; ++turn) {
                std::array<DType, 3> types = {anyType(), anyType(), anyType()};
                types[static_cast<size_t>(turn)] = type;
                const ExpertFile file(types, shape, anySkips(), random());
                SCOPED_TRACE(file.name() + ", " + std::to_string(shape.hidden) + " x " + std::to_string(shape.cols));
                ASSERT_NO_FATAL_FAILURE(expectFetched(file, 1 + below(std::min(kMaxExpertFetches, shape.experts))));
            }
        }
    }
}

// Rows that do not fill a unit, floats of odd sizes, and as many experts as can be ordered at once.
TEST_F(ExpertCacheTest, OddSizesAreFetched) {
    for (int turn = 0; turn < 12; ++turn) {
        const int32_t demanded = turn < 3 ? kMaxExpertFetches : 8, experts = demanded + 1;
        const std::array<DType, 3> floats = {DType::F16, turn % 2 ? DType::F32 : DType::BF16,
                                             turn % 3 ? DType::BF16 : DType::F16};
        const ExpertFile odd(floats, {1 + below(90), 1 + below(200), experts}, anySkips(), random());
        SCOPED_TRACE(odd.name() + ", " + std::to_string(odd.shape.hidden) + " x " + std::to_string(odd.shape.cols));
        ASSERT_NO_FATAL_FAILURE(expectFetched(odd, demanded));
        const ExpertFile blocks({DType::Q8_0, DType::MXFP4, DType::Q5_1},
                                {32 * (1 + below(5)), 32 * (1 + below(20)), experts}, anySkips(), random());
        SCOPED_TRACE(blocks.name() + ", " + std::to_string(blocks.shape.hidden) + " x " +
                     std::to_string(blocks.shape.cols));
        ASSERT_NO_FATAL_FAILURE(expectFetched(blocks, demanded));
    }
}

TEST_F(ExpertCacheTest, TheCpuLearnsWhatIsMissed) {
    struct Case {
        int64_t rows;
        int32_t used, experts;
    };
    uint32_t ticket = 0;
    const Flags flags;
    for (const Case& c : {Case{1, 1, 1}, Case{1, 8, 128}, Case{3, 8, 60}, Case{8, 10, 512}, Case{8, 100, 300},
                          Case{9, 22, 512}, Case{40, 8, 60}, Case{64, 22, 300}}) {
        for (const int32_t missing : {0, 1, 2}) {  // none, the last pair's expert, about half
            SCOPED_TRACE(std::to_string(c.rows) + " x " + std::to_string(c.used) + " of " + std::to_string(c.experts) +
                         ", " + std::to_string(missing));
            const int64_t cols = 1184;
            const size_t pairs = static_cast<size_t>(c.rows * c.used);
            const Forms f = formsOf(randomFloats(static_cast<size_t>(c.rows * cols)), c.rows, cols, true);
            const DeviceRows from(f);
            const PinnedRows to(c.rows, cols), untouched(c.rows, cols);
            std::vector<int32_t> chosen(pairs), predicted(pairs), table(static_cast<size_t>(c.experts)), want;
            for (int32_t& e : chosen) e = below(c.experts);
            for (int32_t& e : predicted) e = below(c.experts);
            for (int32_t& s : table) s = missing == 2 && below(2) ? -1 : below(1000);
            if (missing == 1) table[static_cast<size_t>(chosen.back())] = -1;
            if (missing == 2) table[static_cast<size_t>(chosen.front())] = -1;
            for (const int32_t e : chosen) want.push_back(table[static_cast<size_t>(e)]);
            const uint32_t missed = static_cast<uint32_t>(std::count(want.begin(), want.end(), -1));
            const DeviceArray<int32_t> chosenOnDevice(chosen), predictedOnDevice(predicted), tableOnDevice(table),
                slot(pairs + 1);
            const DeviceArray<DeviceOrders> orders(1);
            const PinnedArray<int32_t> hostChosen(pairs + 1), hostSlot(pairs + 1), hostPredicted(pairs + 1);
            const std::vector<float> weight = randomFloats(pairs), unwritten(pairs, 0.0f);
            const DeviceArray<float> weightOnDevice(weight);
            const PinnedArray<float> hostWeight(pairs);
            const bool weighs = ticket % 3 == 0;
            std::copy(unwritten.begin(), unwritten.end(), hostWeight.get());
            const bool predicts = ticket % 2 == 0;
            ++ticket;
            std::atomic<int> missingTickets{0}, early{0};
            std::vector<int32_t> wantPadded = want, chosenPadded = chosen,
                                 predictedPadded = predicts ? predicted : std::vector<int32_t>(pairs, -1);
            for (std::vector<int32_t>* v : {&wantPadded, &chosenPadded, &predictedPadded}) v->push_back(-1);
            {
                const Host host([&] {
                    if (!flags.awaitSent(ticket)) return void(++missingTickets);
                    early += hostChosen.read() != chosenPadded || hostSlot.read() != wantPadded ||
                             hostPredicted.read() != predictedPadded;
                    early += missed && to.floats.read() != f.floats;
                    early += hostWeight.read() != (weighs ? weight : unwritten);
                });
                sendExperts(
                    stream(), from.outputs(true, true), c.rows, c.used, chosenOnDevice.get(), tableOnDevice.get(),
                    predicts ? predictedOnDevice.get() : nullptr, slot.get(), orders.get(), to.host(true, true),
                    {hostChosen.get(), hostSlot.get(), predicts ? hostPredicted.get() : nullptr, hostWeight.get()},
                    flags.sent(), ticket, weighs ? weightOnDevice.get() : nullptr);
                stream().synchronize();
            }
            ASSERT_EQ(missingTickets.load(), 0);
            EXPECT_EQ(early.load(), 0);
            EXPECT_EQ(slot.read(), wantPadded);
            EXPECT_EQ(orders.read()[0].missed, missed);
            EXPECT_EQ(orders.read()[0].ready, 0u);
            if (missed) expectSent(f, {cols, 0, cols}, to, true, true);
            else EXPECT_TRUE(to.q.read() == untouched.q.read() && sameBits(to.floats.read(), untouched.floats.read()));
        }
    }
}

TEST_F(ExpertCacheTest, NobodyWaitsWhereNothingIsMissed) {
    const ExpertFile file({DType::Q4_K, DType::Q4_K, DType::Q6_K}, {256, 256, 2}, {0, 0, 0}, random());
    const Slots slots(file, 2), untouched(file, 2);
    const std::vector<float> y = randomFloats(2 * 256), weight = {0.25f, 0.5f}, before = randomFloats(256);
    const DeviceArray<float> yOnDevice(y), weightOnDevice(weight), residual(before);
    const DeviceArray<int32_t> chosen(std::vector<int32_t>{1, 0}), slot(std::vector<int32_t>{0, 1});
    DeviceOrders none;
    const DeviceArray<DeviceOrders> orders(std::vector<DeviceOrders>{none});
    const PinnedArray<ExpertOrders> host(1);
    const PinnedArray<float> hostY(2 * 256);
    const Flags flags;
    {
        const Patience patience(flags);
        fetchExperts(stream(), slots.stacks(), host.get(), flags.instructed(), 1, orders.get(), 2, chosen.get(),
                     slot.get());
        combineAnswers(stream(), yOnDevice.get(), hostY.get(), slot.get(), weightOnDevice.get(), 1, 2, 256,
                       flags.returned(), 1, residual.get());
        stream().synchronize();
    }
    EXPECT_EQ(flags.instructedNow().load(), 0u);
    EXPECT_EQ(flags.returnedNow().load(), 0u);
    EXPECT_EQ(orders.read()[0].ready, 0u);
    EXPECT_TRUE(untouched.memory.read() == slots.memory.read());
    std::vector<float> want(256);
    for (size_t i = 0; i < 256; ++i) want[i] = before[i] + std::fma(0.5f, y[256 + i], std::fma(0.25f, y[i], 0.0f));
    EXPECT_TRUE(sameBits(want, residual.read()));
}

TEST_F(ExpertCacheTest, WhatIsFetchedAheadIsInTheTable) {
    const ExpertFile file({DType::Q5_K, DType::Q3_K, DType::IQ4_XS}, {256, 512, 12}, anySkips(), random());
    for (const int32_t ahead : {0, 1, kMaxFetchesAhead}) {
        const Slots slots(file, 10), want(file, 10);
        const std::vector<int32_t> experts = distinct(ahead, 12), places = distinct(ahead, 10);
        DeviceOrders given;
        given.ready = 1;
        given.orders.demanded = 1;
        given.orders.fetch[0] = file.fetch(0, 0);  // not for this call
        given.orders.ahead = ahead;
        std::vector<int32_t> table(12, -7), wantTable = table;
        for (size_t i = 0; i < experts.size(); ++i) {
            given.orders.aheadFetch[i] = file.fetch(experts[i], places[i]);
            want.pack(stream(), experts[i], places[i]);
            wantTable[static_cast<size_t>(experts[i])] = places[i];
        }
        const DeviceArray<DeviceOrders> orders(std::vector<DeviceOrders>{given});
        const DeviceArray<int32_t> tableOnDevice(table);
        fetchAhead(stream(), slots.stacks(), orders.get(), tableOnDevice.get());
        stream().synchronize();
        EXPECT_TRUE(want.memory.read() == slots.memory.read());
        EXPECT_EQ(wantTable, tableOnDevice.read());

        // Orders of an earlier pass, for a layer that has missed nothing since.
        given.ready = 0;
        const DeviceArray<DeviceOrders> stale(std::vector<DeviceOrders>{given});
        const DeviceArray<int32_t> kept(table);
        const Slots untouched(file, 10), alone(file, 10);
        fetchAhead(stream(), alone.stacks(), stale.get(), kept.get());
        stream().synchronize();
        EXPECT_TRUE(untouched.memory.read() == alone.memory.read());
        EXPECT_EQ(table, kept.read());
    }
}

TEST_F(ExpertCacheTest, AnswersAreAddedByRank) {
    for (const int64_t cols : {1, 32, 99, 130, 1028, 2048})
        for (const int32_t used : {1, 2, 8, 9, 22})
            for (const int32_t hosts : {0, 1, 2}) ASSERT_NO_FATAL_FAILURE(expectCombined(cols, used, hosts, false));
}

TEST_F(ExpertCacheTest, TheSharedAnswerIsAddedLast) {
    for (const int64_t cols : {1, 99, 130, 1028, 2048})
        for (const int32_t used : {1, 8, 9})
            for (const int32_t hosts : {0, 1, 2})
                for (const size_t skip : {0, 1}) ASSERT_NO_FATAL_FAILURE(expectCombined(cols, used, hosts, true, skip));
}

TEST_F(ExpertCacheTest, AnswersMayHaveBiasesAndReplaceRows) {
    for (const int64_t cols : {1, 99, 130, 1028})
        for (const int32_t used : {1, 8, 9})
            for (const int32_t hosts : {0, 1, 2})
                for (const bool isShared : {false, true})
                    ASSERT_NO_FATAL_FAILURE(expectCombined(cols, used, hosts, isShared, 0, true));
}

TEST_F(ExpertCacheTest, AbortingLetsEverythingGoOn) {
    const ExpertFile file({DType::Q4_0, DType::F16, DType::Q2_K}, {256, 256, 4}, anySkips(), random());
    const Slots slots(file, 4), untouched(file, 4);
    const PinnedArray<ExpertOrders> orders(1);
    orders[0].demanded = orders[0].ahead = 1;
    orders[0].fetch[0] = orders[0].aheadFetch[0] = file.fetch(1, 2);
    DeviceOrders fresh;
    fresh.missed = 2;
    const DeviceArray<DeviceOrders> device(std::vector<DeviceOrders>{fresh});
    const std::vector<int32_t> missed = {-1, -1}, table(4, -1);
    const DeviceArray<int32_t> chosen(std::vector<int32_t>{1, 3}), slot(missed), tableOnDevice(table);
    const DeviceArray<float> y(2 * 64), weight(randomFloats(2)), residual(64);
    const PinnedArray<float> hostY(2 * 64);
    const Flags flags;
    {
        const Host host([&] {
            later();
            flags.abort();
        });
        fetchExperts(stream(), slots.stacks(), orders.get(), flags.instructed(), 3, device.get(), 2, chosen.get(),
                     slot.get());
        fetchAhead(stream(), slots.stacks(), device.get(), tableOnDevice.get());
        combineAnswers(stream(), y.get(), hostY.get(), slot.get(), weight.get(), 1, 2, 64, flags.returned(), 3,
                       residual.get());
        stream().synchronize();
    }
    EXPECT_TRUE(untouched.memory.read() == slots.memory.read());
    EXPECT_EQ(missed, slot.read());
    EXPECT_EQ(table, tableOnDevice.read());
}

TEST_F(ExpertCacheTest, PairsWithoutASlotAreLeftAlone) {
    // The activations of the last shape do not fit in shared memory.
    for (const Shape shape : {Shape{64, 768, 4}, Shape{32, 40960, 2}}) {
        for (const DType type : {DType::Q4_K, DType::Q8_0, DType::F16}) {
            const int64_t rows = 2;
            const int32_t used = 5;
            const size_t pairs = static_cast<size_t>(rows * used), hidden = static_cast<size_t>(shape.hidden);
            const ExpertFile file({type, type, DType::Q8_0}, shape, {0, 0, 0}, random());
            const Slots slots(file, shape.experts);
            for (int32_t e = 0; e < shape.experts; ++e) slots.pack(stream(), e, e);
            const std::vector<float> x = randomFloats(static_cast<size_t>(rows * shape.cols), 0.1f);
            const Forms f = formsOf(x, rows, shape.cols, true);
            const DeviceRows from(f);
            const MatvecInput input{from.floats.get(), from.outputs(false, true).quantized};
            std::vector<int32_t> all(pairs), some;
            for (int32_t& s : all) s = below(shape.experts);
            some = all;
            for (int32_t& s : some) s = below(2) ? -1 : s;
            some[random()() % pairs] = -1;
            const DeviceArray<int32_t> allOnDevice(all), someOnDevice(some);
            const auto run = [&](const DeviceArray<int32_t>& chosen) {
                const DeviceArray<float> gated(pairs * hidden), y(pairs * hidden);
                const DeviceRows made(static_cast<int64_t>(pairs), shape.hidden);
                RowOutputs out = made.outputs(false, true);
                out.floats = gated.get();
                expertGated(stream(), input, static_cast<int>(rows), slots.stacks().gate, slots.stacks().up,
                            chosen.get(), used, out);
                expertMatvec(stream(), input, static_cast<int>(rows), slots.stacks().up, chosen.get(), used, false,
                             y.get());
                return std::vector<std::vector<float>>{gated.read(), made.scale.read(), y.read()};
            };
            std::vector<std::vector<float>> want = run(allOnDevice);
            const std::vector<std::vector<float>> got = run(someOnDevice);
            for (size_t form = 0; form < want.size(); ++form) {
                const size_t width = want[form].size() / pairs;
                for (size_t p = 0; p < pairs; ++p)
                    if (some[p] < 0) std::memset(&want[form][p * width], 0xff, width * sizeof(float));
                EXPECT_TRUE(sameBits(want[form], got[form])) << info(type).name << ", form " << form;
            }
        }
    }
}

// A captured layer is replayed with other choices and other tables. It gives the same bits as with every expert in a
// slot, no matter which processor computes the missed ones.
void ExpertCacheTest::expectReplayed(int64_t rows, int32_t used) {
    SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(used));
    const Shape shape{256, 512, 24};
    const int32_t pairs = static_cast<int32_t>(rows) * used, slotCount = 12 + kMaxExpertFetches;
    const ExpertFile file({DType::Q4_K, DType::Q4_K, DType::Q6_K}, shape, anySkips(), random());
    const Slots everything(file, shape.experts), slots(file, slotCount);
    for (int32_t e = 0; e < shape.experts; ++e) everything.pack(stream(), e, e);
    const Forms f = formsOf(randomFloats(static_cast<size_t>(rows * shape.cols)), rows, shape.cols, true);
    const DeviceRows x(f), hiddenRows(pairs, shape.hidden);
    const MatvecInput input{x.floats.get(), x.outputs(false, true).quantized},
        hidden{nullptr, hiddenRows.outputs(false, true).quantized};
    const size_t answers = static_cast<size_t>(pairs * shape.cols);
    const DeviceArray<int32_t> chosen(static_cast<size_t>(pairs)), slot(static_cast<size_t>(pairs)),
        table(static_cast<size_t>(shape.experts));
    const DeviceArray<float> weight(static_cast<size_t>(pairs)), y(answers),
        residual(static_cast<size_t>(rows * shape.cols));
    const DeviceArray<DeviceOrders> device(1);
    const PinnedArray<ExpertOrders> orders(1);
    const PinnedArray<float> hostY(answers);
    const PinnedArray<int32_t> hostChosen(static_cast<size_t>(pairs)), hostSlot(static_cast<size_t>(pairs));
    const PinnedRows hostRows(rows, shape.cols);
    Flags flags;
    const auto multiply = [&](const ExpertStacks& stacks, const int32_t* which) {
        expertGated(stream(), input, static_cast<int>(rows), stacks.gate, stacks.up, which, used,
                    hiddenRows.outputs(false, true));
        expertMatvec(stream(), hidden, static_cast<int>(rows), stacks.down, which, used, true, y.get());
    };
    const auto graph = stream().capture([&] {
        sendExperts(stream(), x.outputs(false, true), rows, used, chosen.get(), table.get(), nullptr, slot.get(),
                    device.get(), hostRows.host(false, true), {hostChosen.get(), hostSlot.get(), nullptr}, flags.sent(),
                    1);
        fetchExperts(stream(), slots.stacks(), orders.get(), flags.instructed(), 1, device.get(), pairs, chosen.get(),
                     slot.get());
        multiply(slots.stacks(), slot.get());
        combineAnswers(stream(), y.get(), hostY.get(), slot.get(), weight.get(), rows, used, shape.cols,
                       flags.returned(), 1, residual.get());
    });
    for (int turn = 0; turn < 12; ++turn) {
        SCOPED_TRACE(turn);
        std::vector<int32_t> choice;
        for (int64_t t = 0; t < rows; ++t) {
            const std::vector<int32_t> row = distinct(used, shape.experts);
            choice.insert(choice.end(), row.begin(), row.end());
        }
        // The experts in slots 0 to 11. In some turns these are all chosen ones, in others none of them.
        const std::vector<int32_t> order = turn % 4 == 0 ? choice : distinct(12, shape.experts);
        std::vector<int32_t> places(static_cast<size_t>(shape.experts), -1);
        int32_t next = 0;
        for (const int32_t e : order) {
            if (turn % 4 == 1 || next == 12 || places[static_cast<size_t>(e)] >= 0) continue;
            slots.pack(stream(), e, next);
            places[static_cast<size_t>(e)] = next++;
        }
        const std::vector<float> factors = randomFloats(static_cast<size_t>(pairs)),
                                 before = randomFloats(static_cast<size_t>(rows * shape.cols));
        stream().upload(chosen.get(), choice.data(), choice.size() * sizeof(int32_t));
        stream().upload(table.get(), places.data(), places.size() * sizeof(int32_t));
        stream().upload(weight.get(), factors.data(), factors.size() * sizeof(float));
        stream().upload(residual.get(), before.data(), before.size() * sizeof(float));
        multiply(everything.stacks(), chosen.get());
        const std::vector<float> wantY = y.read();
        require(cudaMemset(y.get(), 0xff, answers * sizeof(float)));
        require(cudaDeviceSynchronize());
        std::memset(hostY.get(), 0xff, answers * sizeof(float));
        flags.reset();
        const int32_t most = turn % 3 == 0 ? kMaxExpertFetches : below(4);
        std::atomic<int> missing{0}, wrong{0};
        {
            const Host host([&] {
                if (!flags.awaitSent(1)) return void(++missing);
                std::set<int32_t> wanted, fetched;
                for (int32_t p = 0; p < pairs; ++p) {
                    wrong += hostChosen[static_cast<size_t>(p)] != choice[static_cast<size_t>(p)];
                    wrong +=
                        hostSlot[static_cast<size_t>(p)] != places[static_cast<size_t>(choice[static_cast<size_t>(p)])];
                    if (hostSlot[static_cast<size_t>(p)] < 0) wanted.insert(choice[static_cast<size_t>(p)]);
                }
                if (wanted.empty()) return;  // nothing reads the rows
                wrong += hostRows.scale[0] != f.scale[0];
                int32_t count = 0;
                for (const int32_t e : wanted) {
                    if (count == most) break;
                    orders[0].fetch[count] = file.fetch(e, 12 + count);
                    ++count;
                    fetched.insert(e);
                }
                orders[0].demanded = count;
                orders[0].ahead = 0;
                later();
                flags.instructedNow().store(1, std::memory_order_release);
                later();
                for (int32_t p = 0; p < pairs; ++p)
                    if (hostSlot[static_cast<size_t>(p)] < 0 && !fetched.count(choice[static_cast<size_t>(p)]))
                        std::copy_n(wantY.begin() + p * shape.cols, shape.cols, hostY.get() + p * shape.cols);
                flags.returnedNow().store(1, std::memory_order_release);
            });
            const Patience patience(flags);
            stream().replay(*graph);
            stream().synchronize();
        }
        ASSERT_EQ(missing.load(), 0);
        ASSERT_EQ(wrong.load(), 0);
        std::vector<float> want(before.size());
        for (size_t i = 0; i < want.size(); ++i) {
            const size_t t = i / static_cast<size_t>(shape.cols), column = i % static_cast<size_t>(shape.cols);
            float sum = 0.0f;
            for (size_t p = t * used; p < (t + 1) * used; ++p)
                sum = std::fma(factors[p], wantY[p * static_cast<size_t>(shape.cols) + column], sum);
            want[i] = before[i] + sum;
        }
        ASSERT_TRUE(sameBits(want, residual.read()));
    }
}

TEST_F(ExpertCacheTest, AReplayedLayerGivesTheSameBitsWhereverItsExpertsAre) {
    for (const auto& [rows, used] : {std::pair{3, 4}, {9, 22}, {40, 3}, {64, 8}})
        ASSERT_NO_FATAL_FAILURE(expectReplayed(rows, used));
}

TEST_F(ExpertCacheTest, RefusesWhatNoKernelDoes) {
    const ExpertFile file({DType::Q4_K, DType::Q4_K, DType::Q6_K}, {256, 256, 1}, {0, 0, 0}, random());
    const Slots slots(file, 2);
    const DeviceArray<DeviceOrders> orders(std::vector<DeviceOrders>{DeviceOrders{}});
    ExpertStacks crooked = slots.stacks();
    crooked.up.stride += 8;
    EXPECT_THROW(fetchAhead(stream(), crooked, orders.get(), nullptr), Error);
    crooked = slots.stacks();
    crooked.down.first.data += 4;
    EXPECT_THROW(fetchExperts(stream(), crooked, nullptr, nullptr, 1, orders.get(), 0, nullptr, nullptr), Error);
    EXPECT_THROW(fetchExperts(stream(), slots.stacks(), nullptr, nullptr, 1, orders.get(), -1, nullptr, nullptr),
                 Error);
}

}  // namespace
}  // namespace sharpi::cuda
