// The CPU's share of a GPU step: whatever the split, types, rows and threads, the mailbox holds the bits of the whole
// layer computed in one place. A thread plays the GPU. Meant to be run under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "core/error.h"
#include "cpu/share/host_share.h"
#include "cpu/share/host_work.h"
#include "seed.h"
#include "step_test.h"

using namespace sharpi;
using namespace steptest;

namespace {

struct Shape {
    DType gate, up, down;
    int64_t embedding, hidden;
    Activation activation = {};
    bool biases = false, gated = true;
};

std::string nameOf(const Shape& s) {
    return std::string(info(s.gate).name) + " " + info(s.up).name + " " + info(s.down).name + ", " +
           std::to_string(s.embedding) + " x " + std::to_string(s.hidden) + (s.gated ? "" : ", no gate");
}

struct Weights {
    std::vector<uint8_t> bytes;
    Matrix matrix;

    Weights(DType type, int64_t rows, int64_t cols, std::mt19937& random) {
        bytes = randomWeights(type, rows, cols, random);
        matrix = {type, rows, cols, bytes.data()};
    }
};

// Rows in both forms, as in the mailbox.
struct Rows {
    std::vector<float> floats;
    Bytes buffer;
    cpu::QuantizedRows quantized;

    // The quantized form of `floats`, if there is one.
    void quantize(int64_t rows, int64_t cols) {
        if (cols % 32 != 0) return;
        buffer = poisoned(cpu::quantizedRowsBytes(rows, cols));
        quantized = cpu::quantizedRowsOver(buffer.get(), rows, cols);
        for (int64_t t = 0; t < rows; ++t) {
            cpu::kernels().quantizeRow(&floats[static_cast<size_t>(t * cols)], cols,
                                       quantized.q + t * quantized.qStride, quantized.scale + t * quantized.scaleStride,
                                       quantized.sums + t * quantized.sumStride);
        }
    }
};

std::vector<float> multiply(const Matrix& w, const Rows& x, int64_t rows) {
    std::vector<float> y(static_cast<size_t>(rows * w.rows), -777.0f);
    const Bytes scratch = poisoned(cpu::matmulScratchBytes(w.cols));
    cpu::MatmulArgs args;
    args.w = w;
    args.xFloat = x.floats.data();
    args.xQuant = &x.quantized;
    args.count = rows;
    args.y = y.data();
    args.yStride = w.rows;
    cpu::kernels().matmul(args, 0, w.rows, scratch.get());
    return y;
}

// A layer, its input, and its output as one thread computes it.
struct Layer {
    Weights gate, up, down;
    Activation activation;
    bool gated;
    std::vector<float> gateBias, upBias;  // [hidden], or empty
    Rows input, hidden;
    std::vector<float> output;

    Layer(const Shape& s, int64_t rows, std::mt19937& random)
        : gate(s.gate, s.hidden, s.embedding, random),
          up(s.up, s.hidden, s.embedding, random),
          down(s.down, s.embedding, s.hidden, random),
          activation(s.activation),
          gated(s.gated),
          gateBias(s.biases ? static_cast<size_t>(s.hidden) : 0),
          upBias(gateBias.size()) {
        std::normal_distribution<float> normal;
        for (std::vector<float>* bias : {&gateBias, &upBias})
            for (float& v : *bias) v = normal(random);
        input.floats.resize(static_cast<size_t>(rows * s.embedding));
        for (float& v : input.floats) v = normal(random) * 0.1f;
        input.quantize(rows, s.embedding);
        hidden.floats = multiply(gate.matrix, input, rows);
        std::vector<float> upped = multiply(up.matrix, input, rows);
        for (size_t i = 0; s.biases && i < upped.size(); ++i) {
            hidden.floats[i] += gateBias[i % gateBias.size()];
            upped[i] += upBias[i % upBias.size()];
        }
        const float* const ups = gated ? upped.data() : nullptr;
        cpu::kernels().gatedActivation(activation, {hidden.floats.data(), ups}, rows * s.hidden);
        hidden.quantize(rows, s.hidden);
        output = multiply(down.matrix, hidden, rows);
    }
    HostGated inHost() const {
        const Matrix ups = gated ? up.matrix : Matrix();
        if (gateBias.empty()) return {gate.matrix, ups, nullptr, nullptr, activation};
        return {gate.matrix, ups, gateBias.data(), gated ? upBias.data() : nullptr, activation};
    }
};

// Copies columns [begin, end) of rows into the mailbox.
void copyIn(const Rows& from, int64_t rows, int64_t begin, int64_t end, const HostRows& to) {
    for (int64_t t = 0; t < rows; ++t) {
        std::copy(from.floats.begin() + t * to.cols + begin, from.floats.begin() + t * to.cols + end,
                  to.floats + t * to.cols + begin);
        if (!to.q) continue;
        const cpu::QuantizedRows& q = from.quantized;
        std::copy(q.q + t * q.qStride + begin, q.q + t * q.qStride + end, to.q + t * to.qStride + begin);
        std::copy(q.scale + t * q.scaleStride + begin / 32, q.scale + t * q.scaleStride + end / 32,
                  to.scale + t * (to.qStride / 32) + begin / 32);
        std::copy(q.sums + t * q.sumStride + begin / 16, q.sums + t * q.sumStride + end / 16,
                  to.sums + t * (to.qStride / 16) + begin / 16);
    }
}

// Fills everything but the padding with values that no result has.
void poison(const HostRows& rows, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
        std::fill_n(rows.floats + t * rows.cols, rows.cols, -777.0f);
        if (!rows.q) continue;
        std::fill_n(rows.q + t * rows.qStride, rows.cols, static_cast<int8_t>(-128));
        std::fill_n(rows.scale + t * (rows.qStride / 32), rows.cols / 32, -777.0f);
        std::fill_n(rows.sums + t * (rows.qStride / 16), rows.cols / 16, static_cast<int16_t>(-7777));
    }
}

// Expects the layer's values from column `begin` on in the first `rows` rows, in a form that is `written`; poison
// before them and in the next row; and zeros behind each row's end.
void expectQuantized(const HostRows& got, const cpu::QuantizedRows& want, int64_t rows, int64_t begin, bool written) {
    for (int64_t t = 0; t <= rows; ++t) {
        for (int64_t i = 0; i < got.qStride; ++i) {
            const bool ours = written && t < rows && i >= begin;
            const int expected = i >= got.cols ? 0 : ours ? want.q[t * want.qStride + i] : -128;
            ASSERT_EQ(got.q[t * got.qStride + i], expected) << "q of row " << t << ", column " << i;
        }
        for (int64_t b = 0; b < got.qStride / 32; ++b) {
            const bool ours = written && t < rows && b * 32 >= begin, inside = b * 32 < got.cols;
            const float scale = !inside ? 0.0f : ours ? want.scale[t * want.scaleStride + b] : -777.0f;
            ASSERT_EQ(bitsFromFloat(got.scale[t * (got.qStride / 32) + b]), bitsFromFloat(scale))
                << "scale of row " << t << ", block " << b;
            for (int64_t half = 2 * b; half < 2 * b + 2; ++half) {
                const int expected = !inside ? 0 : ours ? want.sums[t * want.sumStride + half] : -7777;
                ASSERT_EQ(got.sums[t * (got.qStride / 16) + half], expected)
                    << "sum of row " << t << ", half block " << half;
            }
        }
    }
}

void expectHidden(const HostRows& got, const Layer& layer, int64_t rows, int64_t begin) {
    const bool isFloat = info(layer.down.matrix.type).isFloat;
    for (int64_t t = 0; t <= rows; ++t) {
        for (int64_t i = 0; i < got.cols; ++i) {
            const float expected = isFloat && t < rows && i >= begin
                                       ? layer.hidden.floats[static_cast<size_t>(t * got.cols + i)]
                                       : -777.0f;
            ASSERT_EQ(bitsFromFloat(got.floats[t * got.cols + i]), bitsFromFloat(expected))
                << "row " << t << ", column " << i;
        }
    }
    if (got.q) expectQuantized(got, layer.hidden.quantized, rows, begin, !isFloat);
}

void expectDown(const float* got, const Layer& layer, int64_t rows, int64_t begin) {
    const int64_t width = layer.down.matrix.rows, count = width - begin;
    for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < count; ++i) {
            ASSERT_EQ(bitsFromFloat(got[t * count + i]),
                      bitsFromFloat(layer.output[static_cast<size_t>(t * width + begin + i)]))
                << "row " << t << ", output " << begin + i;
        }
    }
    ASSERT_EQ(got[rows * count], -777.0f) << "written past the end";
}

StepLimits limitsOf(const Shape& s) {
    StepLimits limits;
    limits.embedding = s.embedding;
    limits.denseHidden = s.hidden;
    return limits;
}

constexpr int64_t kMostRows = 65;  // one more than is used; the last must stay untouched

struct Desk {
    Bytes memory;
    HostShare share;

    Desk(const Shape& s, int threads, std::function<bool()> waiting)
        : memory(poisoned(HostShare::mailboxBytes(limitsOf(s), kMostRows))),
          share(threads, memory.get(), limitsOf(s), kMostRows, std::move(waiting)) {}
    const Mailbox& mailbox() const { return share.mailbox(); }
    void poisonAll() {
        poison(mailbox().input, kMostRows);
        poison(mailbox().hidden, kMostRows);
        std::fill_n(mailbox().down, kMostRows * mailbox().input.cols, -777.0f);
    }
};

struct Split {
    int64_t hidden, output;  // the first row of each that the CPU computes
};

// What the GPU does in a step of some layers. If no answer comes it gives up and fails the test.
class PlayedGpu {
public:
    PlayedGpu(const Mailbox& mailbox, const std::vector<Layer>& layers, int64_t rows, Split split)
        : _mailbox(mailbox), _layers(layers), _rows(rows), _split(split), _thread([this] { play(); }) {}
    ~PlayedGpu() { _thread.join(); }
    bool failed() const { return _failed; }

private:
    void play() {
        for (const Layer& layer : _layers) {
            // A side that reads before the counter allows it reads poison.
            if (_sent % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            copyIn(layer.input, _rows, 0, _mailbox.input.cols, _mailbox.input);
            send();
            if (!receive()) return;
            expectHidden(_mailbox.hidden, layer, _rows, _split.hidden);
            copyIn(layer.hidden, _rows, 0, _split.hidden, _mailbox.hidden);
            send();
            if (!receive()) return;
            expectDown(_mailbox.down, layer, _rows, _split.output);
            poison(_mailbox.input, _rows);
            poison(_mailbox.hidden, _rows);
            std::fill_n(_mailbox.down, (_rows + 1) * _mailbox.input.cols, -777.0f);
        }
    }
    void send() { __atomic_store_n(_mailbox.sent, ++_sent, __ATOMIC_RELEASE); }
    bool receive() {
        ++_received;
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        for (;;) {
            const uint32_t returned = __atomic_load_n(_mailbox.returned, __ATOMIC_ACQUIRE);
            if (returned == _received) return true;
            if (returned > _received || std::chrono::steady_clock::now() > deadline) {
                _failed = true;
                return false;
            }
            std::this_thread::yield();
        }
    }

    const Mailbox& _mailbox;
    const std::vector<Layer>& _layers;
    const int64_t _rows;
    const Split _split;
    uint32_t _sent = 0, _received = 0;
    std::atomic<bool> _failed{false};
    std::thread _thread;  // the last member: it uses the others
};

void runLayers(const Shape& shape, int threads, int64_t rows, const std::vector<Layer>& layers, Split split) {
    PlayedGpu* gpu = nullptr;
    Desk desk(shape, threads, [&] {
        if (gpu->failed()) throw Error(ErrorKind::Internal, "the GPU has failed");
        return false;  // it may be about to send
    });
    desk.poisonAll();
    HostShare& share = desk.share;
    for (int step = 0; step < 2; ++step) {
        share.begin();
        const HostShare::Awake awake(share);
        PlayedGpu played(desk.mailbox(), layers, rows, split);
        HostWork work(HostWork::When::AtOnce);
        gpu = &played;
        try {
            for (const Layer& layer : layers) {
                const uint32_t sent = work.nextSent(), returned = work.nextReturned();
                share.gated(layer.inHost(), layer.down.matrix, rows, split.hidden, sent, returned);
                const uint32_t sentHidden = work.nextSent(), returnedDown = work.nextReturned();
                share.down(layer.down.matrix, rows, split.output, sentHidden, returnedDown);
            }
        } catch (...) {
            share.abort();
            throw;
        }
    }
}

const Shape kShapes[] = {
    {DType::Q4_K, DType::Q4_K, DType::Q6_K, 512, 768},
    {DType::Q8_0, DType::Q4_0, DType::Q5_1, 160, 352},  // rows that end within a group of 8 blocks
    {DType::Q4_K, DType::Q6_K, DType::F16, 256, 288},
    {DType::F16, DType::Q8_0, DType::Q4_0, 96, 320},
    {DType::F32, DType::BF16, DType::F16, 100, 333},  // rows that have no quantized form
    {DType::Q8_0, DType::Q8_0, DType::Q8_0, 96, 320, {ActivationKind::Gelu}, false},
    {DType::MXFP4, DType::Q4_0, DType::F16, 96, 333, {ActivationKind::ClampedSwiglu, 1.5f}, true},
    {DType::Q8_0, DType::Q8_0, DType::Q8_0, 96, 320, {ActivationKind::ReluSquared}, true, false},
};

TEST(HostShare, AnySplitGivesTheBitsOfTheWhole) {
    std::mt19937 random(sharpi::testSeed(11));
    for (const Shape& shape : kShapes) {
        for (const int64_t rows : {1, 3, 8, 9, 40, 64}) {
            std::vector<Layer> layers;
            for (int i = 0; i < 2; ++i) layers.emplace_back(shape, rows, random);
            const int64_t lastHidden = (shape.hidden - 1) / 32 * 32, lastOutput = (shape.embedding - 1) / 32 * 32;
            const Split middle = {shape.hidden / 64 * 32, shape.embedding / 64 * 32};
            for (const Split split : {Split{0, 0}, Split{32, 32}, middle, Split{lastHidden, lastOutput}}) {
                SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows, from " +
                             std::to_string(split.hidden) + " and " + std::to_string(split.output));
                runLayers(shape, 3, rows, layers, split);
                if (HasFailure()) return;
            }
        }
    }
}

TEST(HostShare, AnyNumberOfThreadsGivesTheSameBits) {
    std::mt19937 random(sharpi::testSeed(12));
    const Shape& shape = kShapes[0];
    for (const int64_t rows : {2, 5}) {
        std::vector<Layer> layers;
        layers.emplace_back(shape, rows, random);
        for (const int threads : {1, 2, 5, 40}) {
            SCOPED_TRACE(std::to_string(rows) + " rows, " + std::to_string(threads) + " threads");
            runLayers(shape, threads, rows, layers, {64, 96});
        }
    }
}

TEST(HostShare, ManyLayersInARow) {
    std::mt19937 random(sharpi::testSeed(13));
    const Shape shape = {DType::Q4_0, DType::Q8_0, DType::Q4_1, 64, 288};
    std::vector<Layer> layers;
    for (int i = 0; i < 60; ++i) layers.emplace_back(shape, 1, random);
    runLayers(shape, 2, 1, layers, {96, 32});
}

TEST(HostShare, NothingToComputeIsAnsweredToo) {
    std::mt19937 random(sharpi::testSeed(14));
    const Shape& shape = kShapes[1];
    std::vector<Layer> layers;
    layers.emplace_back(shape, 2, random);
    runLayers(shape, 2, 2, layers, {shape.hidden, shape.embedding});
}

TEST(HostShare, TheMailboxStartsAsZeros) {
    const Shape& shape = kShapes[1];
    const size_t bytes = HostShare::mailboxBytes(limitsOf(shape), kMostRows);
    Desk desk(shape, 1, nullptr);
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(desk.memory.get()[i], 0) << i;
    const Mailbox& box = desk.mailbox();
    EXPECT_GE(std::abs(reinterpret_cast<uint8_t*>(box.sent) - reinterpret_cast<uint8_t*>(box.returned)), 128);
    // Filling each part to its last element must not reach another part, or the end of the memory.
    desk.poisonAll();
    EXPECT_EQ(*box.sent, 0u);
    EXPECT_EQ(*box.instructed, 0u);
    EXPECT_EQ(*box.returned, 0u);
    EXPECT_LE(reinterpret_cast<uint8_t*>(box.down + kMostRows * shape.embedding), desk.memory.get() + bytes);
    expectQuantized(box.input, {}, kMostRows - 1, shape.embedding, false);
    expectQuantized(box.hidden, {}, kMostRows - 1, shape.hidden, false);
    for (int64_t i = 0; i < kMostRows * shape.hidden; ++i) ASSERT_EQ(box.hidden.floats[i], -777.0f);
    for (int64_t i = 0; i < kMostRows * shape.embedding; ++i) ASSERT_EQ(box.input.floats[i], -777.0f);
}

TEST(HostShare, ASharePassesWithoutTakingMemory) {
    std::mt19937 random(sharpi::testSeed(15));
    const Shape& shape = kShapes[0];
    for (const int64_t rows : {1, 8}) {
        const Layer layer(shape, rows, random);
        Desk desk(shape, 3, nullptr);
        copyIn(layer.input, rows, 0, shape.embedding, desk.mailbox().input);
        copyIn(layer.hidden, rows, 0, shape.hidden, desk.mailbox().hidden);
        const int64_t before = allocations;
        desk.share.begin();
        {
            const HostShare::Awake awake(desk.share);
            desk.share.gated(layer.inHost(), layer.down.matrix, rows, 32, 0, 1);
            desk.share.down(layer.down.matrix, rows, 32, 0, 2);
        }
        EXPECT_EQ(allocations, before);
        EXPECT_EQ(*desk.mailbox().returned, 2u);
    }
}

TEST(HostShare, WaitingIsToldAndMayAnswer) {
    std::mt19937 random(sharpi::testSeed(16));
    const Shape& shape = kShapes[1];
    const Layer layer(shape, 3, random);
    int calls = 0;
    const Mailbox* mailbox = nullptr;
    Desk desk(shape, 2, [&] {
        if (++calls == 1) return false;
        copyIn(layer.input, 3, 0, shape.embedding, mailbox->input);
        __atomic_store_n(mailbox->sent, 7u, __ATOMIC_RELEASE);
        return true;  // the GPU has done all its work
    });
    mailbox = &desk.mailbox();
    desk.share.begin();
    desk.poisonAll();
    desk.share.gated(layer.inHost(), layer.down.matrix, 3, 64, 6, 1);  // the counter is past 6
    EXPECT_EQ(calls, 2);
    expectHidden(desk.mailbox().hidden, layer, 3, 64);
    EXPECT_EQ(*desk.mailbox().returned, 1u);
}

TEST(HostShare, WaitingThatThrowsEndsTheWaitAndTheShareStaysUsable) {
    std::mt19937 random(sharpi::testSeed(17));
    const Shape& shape = kShapes[2];
    const Layer layer(shape, 1, random);
    bool fails = true;
    int calls = 0;
    Desk desk(shape, 2, [&] {
        ++calls;
        if (fails) throw std::runtime_error("the GPU is gone");
        return false;
    });
    HostShare& share = desk.share;
    share.begin();
    desk.poisonAll();
    HostWork work(HostWork::When::AtOnce);
    for (const bool gated : {true, false}) {
        std::string caught;
        try {
            if (gated) share.gated(layer.inHost(), layer.down.matrix, 1, 0, work.nextSent(), work.nextReturned());
            else share.down(layer.down.matrix, 1, 0, work.nextSent(), work.nextReturned());
        } catch (const std::runtime_error& e) {
            caught = e.what();
        }
        EXPECT_EQ(caught, "the GPU is gone");
    }
    EXPECT_EQ(calls, 2);
    EXPECT_EQ(*desk.mailbox().returned, 0u);
    expectHidden(desk.mailbox().hidden, layer, 1, shape.hidden);  // nothing written
    EXPECT_EQ(desk.mailbox().down[0], -777.0f);
    share.abort();
    EXPECT_EQ(*desk.mailbox().returned, kCrossingAborted);
    EXPECT_EQ(*desk.mailbox().instructed, kCrossingAborted);

    fails = false;
    *desk.mailbox().sent = 9;
    share.begin();
    EXPECT_EQ(*desk.mailbox().sent, 0u);
    EXPECT_EQ(*desk.mailbox().instructed, 0u);
    EXPECT_EQ(*desk.mailbox().returned, 0u);
    copyIn(layer.input, 1, 0, shape.embedding, desk.mailbox().input);
    share.gated(layer.inHost(), layer.down.matrix, 1, 32, 0, 1);
    expectHidden(desk.mailbox().hidden, layer, 1, 32);
}

// A ticket that can never come is not waited for.
TEST(HostShare, WaitingForAGpuThatIsDoneIsAnError) {
    std::mt19937 random(sharpi::testSeed(19));
    const Shape& shape = kShapes[3];
    const Layer layer(shape, 2, random);
    const Mailbox* mailbox = nullptr;
    int calls = 0;
    Desk desk(shape, 2, [&] {
        __atomic_store_n(mailbox->sent, 4u, __ATOMIC_RELEASE);  // an earlier ticket
        if (++calls == 3) throw std::runtime_error("waited for again");
        return true;
    });
    mailbox = &desk.mailbox();
    desk.share.begin();
    desk.poisonAll();
    try {
        desk.share.down(layer.down.matrix, 2, 0, 5, 1);
        FAIL() << "something was computed";
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::Internal);
        EXPECT_NE(std::string(error.what()).find("the GPU has finished"), std::string::npos) << error.what();
    }
    EXPECT_EQ(calls, 1);
    EXPECT_EQ(*desk.mailbox().returned, 0u);
    EXPECT_EQ(desk.mailbox().down[0], -777.0f);
}

TEST(HostShare, RefusesWhatDoesNotFitTheMailbox) {
    std::mt19937 random(sharpi::testSeed(18));
    const Shape& shape = kShapes[4];
    const Layer layer(shape, 1, random);
    const Matrix &gate = layer.gate.matrix, &up = layer.up.matrix, &down = layer.down.matrix;
    Desk desk(shape, 2, nullptr);
    HostShare& share = desk.share;
    const auto refuses = [](const std::function<void()>& body) {
        try {
            body();
        } catch (const Error& e) {
            return e.kind() == ErrorKind::Internal;
        }
        return false;
    };
    Matrix narrow = gate, shortened = up, quantized = down, tall = down;
    narrow.cols = 64;
    shortened.rows = 320;
    quantized.type = DType::Q8_0;
    tall.rows = shape.embedding + 1;
    EXPECT_TRUE(refuses([&] { share.gated({gate, up}, down, kMostRows + 1, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.gated({gate, up}, down, 0, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.gated({gate, up}, down, 1, 16, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.gated({gate, up}, down, 1, 352, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.gated({narrow, up}, down, 1, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.gated({gate, shortened}, down, 1, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.gated({gate, up}, quantized, 1, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.down(quantized, 1, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.down(tall, 1, 0, 0, 1); }));
    EXPECT_TRUE(refuses([&] { share.down(gate, 1, 0, 0, 1); }));
    EXPECT_EQ(*desk.mailbox().returned, 0u);
    EXPECT_NO_THROW(share.gated({gate, up}, down, 1, 0, 0, 1));
}

}  // namespace
