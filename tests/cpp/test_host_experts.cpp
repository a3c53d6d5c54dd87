// The CPU's experts in a GPU step: whatever the types, choices, rows and threads, the mailbox holds the bits of each pair of row and
// expert computed by itself and summed by rank. A thread plays the GPU. Meant to be run under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "core/error.h"
#include "engine/host_share.h"
#include "step_test.h"

using namespace sharpi;
using namespace steptest;

namespace {

constexpr float kPoison = -777.0f;
constexpr int64_t kMostRows = 9;  // one more than is used: what must stay untouched

struct Shape {
    DType gate, up, down;
    int64_t embedding, hidden;
    int32_t experts, used;
};

std::string nameOf(const Shape& s) {
    return std::string(info(s.gate).name) + " " + info(s.up).name + " " + info(s.down).name + ", " + std::to_string(s.embedding) +
           " x " + std::to_string(s.hidden) + ", " + std::to_string(s.used) + " of " + std::to_string(s.experts);
}

struct Stack {
    std::vector<uint8_t> bytes;
    MatrixStack matrices;

    Stack(DType type, int32_t count, int64_t rows, int64_t cols, std::mt19937& random) {
        matrices.stride = static_cast<size_t>(rows) * rowBytes(type, cols);
        matrices.count = count;
        bytes = randomWeights(type, rows * count, cols, random);
        matrices.first = {type, rows, cols, bytes.data()};
    }
};

// One row in both forms.
struct Row {
    std::vector<float> floats;
    Bytes buffer;
    cpu::QuantizedRows quantized;

    explicit Row(std::vector<float> values) : floats(std::move(values)) {
        const int64_t cols = static_cast<int64_t>(floats.size());
        if (cols % 32 != 0) return;
        buffer = poisoned(cpu::quantizedRowsBytes(1, cols));
        quantized = cpu::quantizedRowsOver(buffer.get(), 1, cols);
        cpu::kernels().quantizeRow(floats.data(), cols, quantized.q, quantized.scale, quantized.sums);
    }
};

std::vector<float> multiply(const Matrix& w, const Row& x) {
    std::vector<float> y(static_cast<size_t>(w.rows), kPoison);
    const Bytes scratch = poisoned(cpu::matmulScratchBytes(w.cols));
    cpu::MatmulArgs args;
    args.w = w;
    args.xFloat = x.floats.data();
    args.xQuant = &x.quantized;
    args.count = 1;
    args.y = y.data();
    args.yStride = w.rows;
    cpu::kernels().matmul(args, 0, w.rows, scratch.get());
    return y;
}

enum class Choice {
    Random,  // different experts at the ranks of a row
    Same,    // all rows the same, in turned orders
    Twice,   // one expert at several ranks of a row
};

// A layer, its input and choices, and what comes of them, pair by pair. `dense`: a layer of one expert that is always chosen.
struct Layer {
    Stack gate, up, down;
    bool dense;
    int32_t used;
    std::vector<Row> input;
    std::vector<int32_t> chosen;
    std::vector<float> weight, output;

    Layer(const Shape& s, int64_t rows, Choice choice, std::mt19937& random)
        : gate(s.gate, s.experts, s.hidden, s.embedding, random), up(s.up, s.experts, s.hidden, s.embedding, random),
          down(s.down, s.experts, s.embedding, s.hidden, random), dense(s.experts == 1), used(s.used) {
        std::normal_distribution<float> normal;
        std::vector<int32_t> order(static_cast<size_t>(s.experts));
        for (int32_t e = 0; e < s.experts; ++e) order[static_cast<size_t>(e)] = e;
        std::shuffle(order.begin(), order.end(), random);
        for (int64_t t = 0; t < rows; ++t) {
            std::vector<float> values(static_cast<size_t>(s.embedding));
            for (float& v : values) v = normal(random) * 0.1f;
            input.emplace_back(std::move(values));
            if (choice == Choice::Random) std::shuffle(order.begin(), order.end(), random);
            for (int32_t k = 0; k < used; ++k) {
                const int64_t at = choice == Choice::Same ? (k + t) % used : choice == Choice::Twice ? (t + k / 2) % s.experts : k;
                chosen.push_back(order[static_cast<size_t>(at)]);
                weight.push_back(dense ? 1.0f : normal(random));
            }
            addOutput(t);
        }
    }

    void addOutput(int64_t t) {
        std::vector<float> sum(static_cast<size_t>(down.matrices.first.rows), 0.0f);
        for (size_t k = static_cast<size_t>(t * used); k < static_cast<size_t>((t + 1) * used); ++k) {
            std::vector<float> hidden = multiply(gate.matrices.at(chosen[k]), input[static_cast<size_t>(t)]);
            const std::vector<float> upped = multiply(up.matrices.at(chosen[k]), input[static_cast<size_t>(t)]);
            cpu::kernels().siluMul(hidden.data(), upped.data(), static_cast<int64_t>(hidden.size()));
            const std::vector<float> answer = multiply(down.matrices.at(chosen[k]), Row(hidden));
            for (size_t i = 0; i < sum.size(); ++i) sum[i] = std::fma(weight[k], answer[i], sum[i]);
        }
        output.insert(output.end(), sum.begin(), sum.end());
    }
};

StepLimits limitsOf(const std::vector<Shape>& shapes) {
    StepLimits limits;
    for (const Shape& s : shapes) {
        limits.embedding = s.embedding;
        if (s.experts == 1) {
            limits.denseHidden = std::max(limits.denseHidden, s.hidden);
            continue;
        }
        limits.experts = std::max(limits.experts, s.experts);
        limits.expertsUsed = std::max(limits.expertsUsed, s.used);
        limits.expertHidden = std::max(limits.expertHidden, s.hidden);
    }
    return limits;
}

struct Desk {
    StepLimits limits;
    Bytes memory;
    HostShare share;

    Desk(const std::vector<Shape>& shapes, int threads, std::function<bool()> waiting)
        : limits(limitsOf(shapes)), memory(poisoned(HostShare::mailboxBytes(limits, kMostRows))),
          share(threads, memory.get(), limits, kMostRows, std::move(waiting)) {
        poison();
    }
    const Mailbox& mailbox() const { return share.mailbox(); }
    void poison() const {
        const Mailbox& box = mailbox();
        std::fill_n(box.input.floats, kMostRows * box.input.cols, kPoison);
        for (int64_t t = 0; box.input.q && t < kMostRows; ++t) {
            std::fill_n(box.input.q + t * box.input.qStride, box.input.cols, static_cast<int8_t>(-128));
            std::fill_n(box.input.scale + t * (box.input.qStride / 32), box.input.cols / 32, kPoison);
            std::fill_n(box.input.sums + t * (box.input.qStride / 16), box.input.cols / 16, static_cast<int16_t>(-7777));
        }
        std::fill_n(box.down, kMostRows * box.input.cols, kPoison);
        std::fill_n(box.chosen, kMostRows * limits.expertsUsed, -1);
        std::fill_n(box.weight, kMostRows * limits.expertsUsed, kPoison);
    }
    void give(const Layer& layer) const {
        const Mailbox& box = mailbox();
        for (size_t t = 0; t < layer.input.size(); ++t) {
            const Row& row = layer.input[t];
            const int64_t at = static_cast<int64_t>(t), blocks = box.input.cols / 32;
            std::copy(row.floats.begin(), row.floats.end(), box.input.floats + at * box.input.cols);
            if (!box.input.q) continue;
            std::copy_n(row.quantized.q, box.input.cols, box.input.q + at * box.input.qStride);
            std::copy_n(row.quantized.scale, blocks, box.input.scale + at * (box.input.qStride / 32));
            std::copy_n(row.quantized.sums, 2 * blocks, box.input.sums + at * (box.input.qStride / 16));
        }
        if (layer.dense) return;
        std::copy(layer.chosen.begin(), layer.chosen.end(), box.chosen);
        std::copy(layer.weight.begin(), layer.weight.end(), box.weight);
    }
    void expectOutput(const Layer& layer) const {
        const float* got = mailbox().down;
        for (size_t i = 0; i < layer.output.size(); ++i) {
            ASSERT_EQ(bitsFromFloat(got[i]), bitsFromFloat(layer.output[i])) << "output " << i;
        }
        ASSERT_EQ(got[layer.output.size()], kPoison) << "written past the end";
    }
    // The CPU's part of a layer.
    void compute(const Layer& layer, uint32_t after) {
        const int64_t rows = static_cast<int64_t>(layer.input.size());
        const MatrixStack &gate = layer.gate.matrices, &up = layer.up.matrices, &down = layer.down.matrices;
        if (!layer.dense) return share.experts(gate, up, down, rows, layer.used, after, share.nextReturned());
        share.gated(gate.first, up.first, down.first, rows, 0, after, share.nextReturned());
        share.down(down.first, rows, 0, 0, share.nextReturned());
    }
};

// What the GPU does in a step of some layers. It gives up, and says so, when no answer comes.
class PlayedGpu {
public:
    PlayedGpu(const Desk& desk, const std::vector<Layer>& layers) : _desk(desk), _layers(layers), _thread([this] { play(); }) {}
    ~PlayedGpu() { _thread.join(); }
    bool failed() const { return _failed; }

private:
    void play() {
        uint32_t sent = 0, returned = 0;
        for (const Layer& layer : _layers) {
            // Whoever reads before the counter says so reads poison.
            if (sent % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            _desk.give(layer);
            __atomic_store_n(_desk.mailbox().sent, ++sent, __ATOMIC_RELEASE);
            returned += layer.dense ? 2 : 1;
            if (!receive(returned)) return;
            _desk.expectOutput(layer);
            _desk.poison();
        }
    }
    bool receive(uint32_t ticket) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        for (;;) {
            const uint32_t returned = __atomic_load_n(_desk.mailbox().returned, __ATOMIC_ACQUIRE);
            if (returned == ticket) return true;
            if (returned > ticket || std::chrono::steady_clock::now() > deadline) {
                _failed = true;
                return false;
            }
            std::this_thread::yield();
        }
    }

    const Desk& _desk;
    const std::vector<Layer>& _layers;
    std::atomic<bool> _failed{false};
    std::thread _thread;  // the last: it uses the others
};

void runLayers(const std::vector<Shape>& shapes, int threads, const std::vector<Layer>& layers) {
    PlayedGpu* gpu = nullptr;
    Desk desk(shapes, threads, [&] {
        if (gpu->failed()) throw Error(ErrorKind::Internal, "the GPU has failed");
        return false;  // it may be about to send
    });
    for (int step = 0; step < 2; ++step) {
        desk.share.begin();
        const HostShare::Awake awake(desk.share);
        PlayedGpu played(desk, layers);
        gpu = &played;
        try {
            for (const Layer& layer : layers) desk.compute(layer, desk.share.nextSent());
        } catch (...) {
            desk.share.abort();
            throw;
        }
    }
}

const Shape kShapes[] = {
    {DType::Q4_K, DType::Q4_K, DType::Q6_K, 256, 512, 16, 8},
    {DType::Q8_0, DType::Q4_0, DType::Q5_1, 160, 352, 5, 2},  // rows that end within a group of 8 blocks
    {DType::Q4_K, DType::Q6_K, DType::F16, 256, 288, 9, 8},
    {DType::F16, DType::Q8_0, DType::Q4_0, 96, 320, 12, 1},
    {DType::BF16, DType::F32, DType::Q8_0, 96, 32, 8, 8},     // one block
    {DType::F32, DType::BF16, DType::F16, 100, 333, 7, 2},    // rows that have no quantized form
};

bool refusesAsInternal(const std::function<void()>& body) {
    try {
        body();
    } catch (const Error& e) {
        return e.kind() == ErrorKind::Internal;
    }
    return false;
}

TEST(HostExperts, TheSumByRankHasTheBitsOfEachPairByItself) {
    std::mt19937 random(21);
    for (const Shape& shape : kShapes) {
        for (const int64_t rows : {1, 3, 8}) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows");
            std::vector<Layer> layers;
            for (int i = 0; i < 2; ++i) layers.emplace_back(shape, rows, Choice::Random, random);
            runLayers({shape}, 3, layers);
            if (HasFailure()) return;
        }
    }
}

TEST(HostExperts, RowsMayChooseTheSameExpertsAndOneMoreThanOnce) {
    std::mt19937 random(22);
    for (const Shape& shape : kShapes) {
        for (const int64_t rows : {2, 8}) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows");
            std::vector<Layer> layers;
            for (const Choice choice : {Choice::Same, Choice::Twice}) layers.emplace_back(shape, rows, choice, random);
            runLayers({shape}, 2, layers);
            if (HasFailure()) return;
        }
    }
}

TEST(HostExperts, AnyNumberOfThreadsGivesTheSameBits) {
    std::mt19937 random(23);
    for (const Shape& shape : {kShapes[0], kShapes[5]}) {
        std::vector<Layer> layers;
        layers.emplace_back(shape, 5, Choice::Random, random);
        layers.emplace_back(shape, 5, Choice::Same, random);
        for (int threads = 1; threads <= 16; ++threads) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(threads) + " threads");
            runLayers({shape}, threads, layers);
            if (HasFailure()) return;
        }
    }
}

TEST(HostExperts, LayersOfManyKindsInARow) {
    std::mt19937 random(24);
    const std::vector<Shape> shapes = {
        {DType::Q4_K, DType::Q4_K, DType::Q6_K, 256, 512, 6, 4},    {DType::Q8_0, DType::Q8_0, DType::Q8_0, 256, 1056, 1, 1},
        {DType::Q4_0, DType::Q5_0, DType::Q4_1, 256, 96, 20, 3},    {DType::Q6_K, DType::BF16, DType::F32, 256, 45, 3, 2},
        {DType::IQ4_XS, DType::MXFP4, DType::Q8_0, 256, 288, 8, 4},
    };
    for (const int64_t rows : {1, 4}) {
        std::vector<Layer> layers;
        for (int i = 0; i < 40; ++i) layers.emplace_back(shapes[random() % shapes.size()], rows, Choice::Random, random);
        runLayers(shapes, 3, layers);
        if (HasFailure()) return;
    }
}

TEST(HostExperts, HiddenRowsMayBeMuchWiderThanTheEmbedding) {
    std::mt19937 random(29);
    const Shape shape = {DType::Q4_0, DType::Q8_0, DType::Q6_K, 256, 6144, 2, 2};
    std::vector<Layer> layers;
    layers.emplace_back(shape, 5, Choice::Same, random);
    // Threads whose scratch overlapped would not meet in it every time.
    for (int run = 0; run < 8; ++run) runLayers({shape}, 3, layers);
}

// Layers share their buffers, and the second ends within a group of blocks.
TEST(HostExperts, ALayerOfNanLeavesNothingToTheNext) {
    std::mt19937 random(30);
    const Shape wide = {DType::Q4_K, DType::Q4_K, DType::Q8_0, 256, 256, 4, 2};
    const Shape narrow = {DType::Q4_K, DType::Q4_K, DType::Q8_0, 256, 96, 4, 2};
    for (const int64_t rows : {1, 8}) {
        Layer overflowed(wide, rows, Choice::Same, random);
        const Layer next(narrow, rows, Choice::Same, random);
        for (Row& row : overflowed.input) {
            row.floats[0] = INFINITY;
            row = Row(row.floats);
        }
        Desk desk({wide, narrow}, 2, nullptr);
        desk.share.begin();
        desk.give(overflowed);
        desk.compute(overflowed, 0);
        EXPECT_TRUE(std::isnan(desk.mailbox().down[0]));
        desk.poison();
        desk.give(next);
        desk.compute(next, 0);
        desk.expectOutput(next);
    }
}

TEST(HostExperts, AStepPassesWithoutTakingMemory) {
    std::mt19937 random(25);
    const Shape& shape = kShapes[0];
    for (const int64_t rows : {1, 8}) {
        const Layer first(shape, rows, Choice::Random, random), second(shape, rows, Choice::Same, random);
        Desk desk({shape}, 3, nullptr);
        desk.share.begin();
        const int64_t before = allocations;
        for (const Layer* layer : {&first, &second}) {
            const HostShare::Awake awake(desk.share);
            desk.give(*layer);
            desk.compute(*layer, 0);
        }
        EXPECT_EQ(allocations, before);
        EXPECT_EQ(*desk.mailbox().returned, 2u);
        desk.expectOutput(second);
    }
}

TEST(HostExperts, AChoiceThatIsNoExpertIsRefusedAndTheShareStaysUsable) {
    std::mt19937 random(26);
    const Shape& shape = kShapes[1];
    const Layer layer(shape, 3, Choice::Random, random);
    Desk desk({shape}, 2, nullptr);
    desk.share.begin();
    for (const int32_t wrong : {-1, shape.experts, INT32_MIN, INT32_MAX}) {
        for (const size_t at : {size_t{0}, layer.chosen.size() - 1}) {
            desk.give(layer);
            desk.mailbox().chosen[at] = wrong;
            EXPECT_TRUE(refusesAsInternal([&] { desk.compute(layer, 0); })) << wrong << " at " << at;
            EXPECT_EQ(desk.mailbox().down[0], kPoison);
            EXPECT_EQ(*desk.mailbox().returned, 0u);
        }
    }
    desk.share.begin();
    desk.give(layer);
    desk.compute(layer, 0);
    desk.expectOutput(layer);
    EXPECT_EQ(*desk.mailbox().returned, 1u);
}

TEST(HostExperts, WaitingThatThrowsEndsTheWait) {
    std::mt19937 random(27);
    const Shape& shape = kShapes[3];
    const Layer layer(shape, 2, Choice::Random, random);
    Desk desk({shape}, 2, []() -> bool { throw std::runtime_error("the GPU is gone"); });
    desk.share.begin();
    desk.give(layer);
    EXPECT_THROW(desk.compute(layer, 1), std::runtime_error);
    EXPECT_EQ(*desk.mailbox().returned, 0u);
    EXPECT_EQ(desk.mailbox().down[0], kPoison);
}

TEST(HostExperts, RefusesWhatDoesNotFitTheMailbox) {
    std::mt19937 random(28);
    const Shape& shape = kShapes[5];
    const Layer layer(shape, 1, Choice::Random, random);
    const MatrixStack &gate = layer.gate.matrices, &up = layer.up.matrices, &down = layer.down.matrices;
    Desk desk({shape}, 2, nullptr);
    std::fill_n(desk.mailbox().chosen, kMostRows * shape.used, 0);  // no choice is a reason
    desk.give(layer);
    const auto refused = [&](const MatrixStack& g, const MatrixStack& u, const MatrixStack& d, int64_t rows, int32_t used) {
        return refusesAsInternal([&] { desk.share.experts(g, u, d, rows, used, 0, 1); });
    };
    const auto changed = [](MatrixStack stack, const std::function<void(MatrixStack&)>& change) {
        change(stack);
        return stack;
    };
    const MatrixStack more = changed(gate, [](MatrixStack& s) { ++s.count; }), fewer = changed(down, [](MatrixStack& s) { --s.count; });
    const MatrixStack narrow = changed(up, [](MatrixStack& s) { s.first.cols = 64; });
    const MatrixStack quantized = changed(gate, [](MatrixStack& s) { s.first.type = DType::Q8_0; });
    const MatrixStack quantizedDown = changed(down, [](MatrixStack& s) { s.first.type = DType::Q8_0; });
    const MatrixStack shortened = changed(up, [](MatrixStack& s) { s.first.rows = 320; });
    const MatrixStack tall = changed(down, [](MatrixStack& s) { ++s.first.rows; });
    const MatrixStack wide = changed(gate, [](MatrixStack& s) { ++s.first.rows; });
    EXPECT_TRUE(refused(gate, up, down, kMostRows + 1, 1));
    EXPECT_TRUE(refused(gate, up, down, 0, 2));
    EXPECT_TRUE(refused(gate, up, down, 1, 0));
    EXPECT_TRUE(refused(gate, up, down, kMostRows, 3));
    EXPECT_TRUE(refused(more, changed(up, [](MatrixStack& s) { ++s.count; }), changed(down, [](MatrixStack& s) { ++s.count; }), 1, 2));
    EXPECT_TRUE(refused(gate, up, fewer, 1, 2));
    EXPECT_TRUE(refused(gate, narrow, down, 1, 2));
    EXPECT_TRUE(refused(quantized, up, down, 1, 2));
    EXPECT_TRUE(refused(gate, up, quantizedDown, 1, 2));
    EXPECT_TRUE(refused(gate, shortened, down, 1, 2));
    EXPECT_TRUE(refused(gate, up, tall, 1, 2));
    EXPECT_TRUE(refused(wide, up, down, 1, 2));
    EXPECT_EQ(*desk.mailbox().returned, 0u);
    EXPECT_EQ(desk.mailbox().down[0], kPoison);
    EXPECT_FALSE(refused(gate, up, down, 1, 2));
    desk.expectOutput(layer);
}

TEST(HostExperts, TheMailboxHasRoomForAllChoices) {
    const Shape& shape = kShapes[0];
    Desk desk({shape, {DType::Q4_K, DType::Q4_K, DType::Q4_K, 256, 512, 1, 1}}, 1, nullptr);
    const Mailbox& box = desk.mailbox();
    const uint8_t* end = desk.memory.get() + HostShare::mailboxBytes(desk.limits, kMostRows);
    EXPECT_LE(reinterpret_cast<uint8_t*>(box.chosen + kMostRows * shape.used), end);
    EXPECT_LE(reinterpret_cast<uint8_t*>(box.weight + kMostRows * shape.used), end);
    // Everything is poisoned to its last element by now, and still its own.
    for (int64_t i = 0; i < kMostRows * shape.used; ++i) {
        ASSERT_EQ(box.chosen[i], -1);
        ASSERT_EQ(box.weight[i], kPoison);
    }
    for (int64_t i = 0; i < kMostRows * shape.embedding; ++i) ASSERT_EQ(box.down[i], kPoison);
    EXPECT_EQ(*box.sent, 0u);
    EXPECT_EQ(*box.returned, 0u);
}

}  // namespace
