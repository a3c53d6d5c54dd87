// Layers of experts for tests of the CPU's part in a GPU step: random layers with the answers that they must give, and
// the other participants of a step: a plan that gives each layer its orders, and a thread that plays the GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cpu/share/host_share.h"
#include "cpu/share/host_work.h"
#include "step_test.h"

namespace steptest {

using namespace sharpi;

constexpr float kPoison = -777.0f;
constexpr int64_t kMostRows = 65;  // one more than is used; the last must stay untouched

struct Shape {
    DType gate, up, down;
    int64_t embedding, hidden;
    int32_t experts, used;
    Activation activation = {};
    bool biases = false, weightsInput = false, gated = true;
};

inline std::string nameOf(const Shape& s) {
    return std::string(info(s.gate).name) + " " + info(s.up).name + " " + info(s.down).name + ", " +
           std::to_string(s.embedding) + " x " + std::to_string(s.hidden) + ", " + std::to_string(s.used) + " of " +
           std::to_string(s.experts) + (s.biases ? ", biased" : "") + (s.weightsInput ? ", weighted inputs" : "") +
           (s.gated ? "" : ", no gate") + ", activation " + std::to_string(static_cast<int>(s.activation.kind));
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

inline std::vector<float> multiply(const Matrix& w, const Row& x) {
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

enum class Routing {
    Random,  // different experts at the ranks of a row
    Same,    // all rows the same, in turned orders
    Twice,   // one expert at several ranks of a row
};

// The part of a layer's chosen experts that the GPU has, and the part of the others that it is told to fetch.
struct Share {
    double inSlots = 0, fetched = 0;
};

// A layer, its input and choices, and their answers, pair by pair. `dense`: a layer of one expert that is always
// chosen.
struct Layer {
    Stack gate, up, down;
    bool dense, gated;
    int32_t used;
    Activation activation;
    std::vector<float> gateBias, upBias;  // [experts, hidden], or empty
    bool weightsInput;
    std::vector<float> weight;  // by pair
    std::vector<Row> input;
    std::vector<int32_t> chosen, slot, predicted;
    ExpertOrders orders;
    std::set<int32_t> ours;                   // the experts that are left to the CPU
    std::vector<std::vector<float>> answers;  // of all pairs
    RamExperts* ram = nullptr;                // where the experts are, if not in memory

    Layer(const Shape& s, int64_t rows, Routing choice, Share share, std::mt19937& random)
        : gate(s.gate, s.experts, s.hidden, s.embedding, random),
          up(s.up, s.experts, s.hidden, s.embedding, random),
          down(s.down, s.experts, s.embedding, s.hidden, random),
          dense(s.experts == 1),
          gated(s.gated),
          used(s.used),
          activation(s.activation),
          gateBias(s.biases ? static_cast<size_t>(s.experts * s.hidden) : 0),
          upBias(gateBias.size()),
          weightsInput(s.weightsInput) {
        std::normal_distribution<float> normal;
        for (std::vector<float>* bias : {&gateBias, &upBias})
            for (float& v : *bias) v = normal(random);
        std::vector<int32_t> order(static_cast<size_t>(s.experts));
        for (int32_t e = 0; e < s.experts; ++e) order[static_cast<size_t>(e)] = e;
        std::shuffle(order.begin(), order.end(), random);
        for (int64_t t = 0; t < rows; ++t) {
            std::vector<float> values(static_cast<size_t>(s.embedding));
            for (float& v : values) v = normal(random) * 0.1f;
            input.emplace_back(std::move(values));
            if (choice == Routing::Random) std::shuffle(order.begin(), order.end(), random);
            for (int32_t k = 0; k < used; ++k) {
                const int64_t at = choice == Routing::Same    ? (k + t) % used
                                   : choice == Routing::Twice ? (t + k / 2) % s.experts
                                                              : k;
                chosen.push_back(order[static_cast<size_t>(at)]);
                predicted.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(s.experts)));
                weight.push_back(weightsInput ? 0.5f + 0.1f * normal(random) : 1.0f);
                answers.push_back(answer(chosen.back(), weight.back(), input.back()));
            }
        }
        if (!dense) place(share, random);
    }

    std::vector<float> answer(int32_t expert, float factor, const Row& x) const {
        std::vector<float> hidden = multiply(gate.matrices.at(expert), x);
        std::vector<float> upped = multiply(up.matrices.at(expert), x);
        for (size_t i = 0; i < hidden.size(); ++i) {
            hidden[i] *= factor;
            upped[i] *= factor;
            if (gateBias.empty()) continue;
            hidden[i] += gateBias[static_cast<size_t>(expert) * hidden.size() + i];
            upped[i] += upBias[static_cast<size_t>(expert) * hidden.size() + i];
        }
        const float* const ups = gated ? upped.data() : nullptr;
        cpu::kernels().gatedActivation(activation, {hidden.data(), ups}, static_cast<int64_t>(hidden.size()));
        return multiply(down.matrices.at(expert), Row(hidden));
    }

    ExpertFetch fetch(int32_t expert, int32_t toSlot) const {
        return {expert, toSlot, gate.matrices.at(expert).data, up.matrices.at(expert).data,
                down.matrices.at(expert).data};
    }

    void place(Share share, std::mt19937& random) {
        std::uniform_real_distribution<double> part;
        std::vector<int32_t> slotOf(static_cast<size_t>(gate.matrices.count), -1);
        int32_t nextSlot = static_cast<int32_t>(random() % 5);
        std::vector<int32_t> missed;
        for (const int32_t expert : std::set<int32_t>(chosen.begin(), chosen.end())) {
            if (part(random) < share.inSlots) slotOf[static_cast<size_t>(expert)] = nextSlot++;
            else missed.push_back(expert);
        }
        std::shuffle(missed.begin(), missed.end(), random);
        for (const int32_t expert : missed) {
            if (orders.demanded < kMaxExpertFetches && part(random) < share.fetched) {
                orders.fetch[orders.demanded++] = fetch(expert, nextSlot++);
            } else {
                ours.insert(expert);
            }
        }
        if (!missed.empty() && share.fetched > 0) {
            const auto most = static_cast<uint32_t>(std::min(gate.matrices.count, kMaxFetchesAhead));
            const auto count = static_cast<int32_t>(random() % (most + 1));
            while (orders.ahead < count)
                orders.aheadFetch[orders.ahead] = fetch(orders.ahead, nextSlot++), ++orders.ahead;
        }
        for (const int32_t expert : chosen) slot.push_back(slotOf[static_cast<size_t>(expert)]);
    }

    int64_t rows() const { return static_cast<int64_t>(input.size()); }
    int32_t pairs() const { return static_cast<int32_t>(chosen.size()); }
    ExpertStacks file() const { return {gate.matrices, gated ? up.matrices : MatrixStack(), down.matrices}; }
    HostExpertLayer inHost() const {
        if (gateBias.empty()) return {file(), activation, nullptr, nullptr, ram};
        return {file(), activation, gateBias.data(), gated ? upBias.data() : nullptr, ram};
    }
    bool anyMissed() const {
        return std::any_of(slot.begin(), slot.end(), [](int32_t s) { return s < 0; });
    }
    size_t bytesRead() const {
        return ours.size() * (gate.matrices.stride + (gated ? up.matrices.stride : 0) + down.matrices.stride);
    }
    bool predicts() const { return orders.ahead > 0 || chosen.front() % 2 == 0; }
};

inline StepLimits limitsOf(const std::vector<Shape>& shapes, size_t layers) {
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
    for (int32_t layer = 0; layer < static_cast<int32_t>(layers); ++layer)
        limits.expertLayers.emplace_back(layer, limits.experts);
    return limits;
}

// Gives the present layer its orders, and checks all that it is told.
class PlayedPlan : public MissPlan {
public:
    void begin(const Mailbox& mailbox, const Layer& layer, int32_t number, uint32_t ticket) {
        _mailbox = &mailbox, _layer = &layer, _number = number, _ticket = ticket;
        orders = layer.orders;
        ordered = told = 0;
    }
    void order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs,
               ExpertOrders& out) override {
        ++ordered;
        if (thrown == Thrown::ByOrder) throw std::runtime_error("no orders");
        if (meanwhile) meanwhile();
        expectTold(layer, chosen, slot, predicted, pairs);
        EXPECT_TRUE(out.demanded == 0 && out.ahead == 0 && out.fetch[0].expert == -1);
        out = orders;
    }
    void done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs,
              size_t bytes, double seconds) override {
        ++told;
        expectTold(layer, chosen, slot, predicted, pairs);
        EXPECT_EQ(__atomic_load_n(_mailbox->returned, __ATOMIC_RELAXED), _ticket)
            << "told before the answers were returned";
        // Of those that had to be read, the plan is not told.
        if (_layer->ram) EXPECT_LE(bytes, _layer->bytesRead());
        else EXPECT_EQ(bytes, _layer->bytesRead());
        EXPECT_EQ(seconds > 0, bytes > 0);
        EXPECT_GE(seconds, 0);
        if (thrown == Thrown::ByDone) throw std::runtime_error("not to be told");
    }
    void followed(double seconds) override { turns.push_back(seconds); }

    enum class Thrown { No, ByOrder, ByDone };
    Thrown thrown = Thrown::No;
    std::function<void()> meanwhile;  // called before orders are made
    ExpertOrders orders;
    int ordered = 0, told = 0;
    std::vector<double> turns;  // what followed() told of all layers

private:
    void expectTold(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted,
                    int32_t pairs) const {
        EXPECT_EQ(layer, _number);
        ASSERT_EQ(pairs, _layer->pairs());
        EXPECT_TRUE(std::equal(chosen, chosen + pairs, _layer->chosen.begin()));
        EXPECT_TRUE(std::equal(slot, slot + pairs, _layer->slot.begin()));
        ASSERT_EQ(predicted != nullptr, _layer->predicts());
        EXPECT_TRUE(!predicted || std::equal(predicted, predicted + pairs, _layer->predicted.begin()));
    }

    const Mailbox* _mailbox = nullptr;
    const Layer* _layer = nullptr;
    int32_t _number = -1;
    uint32_t _ticket = 0;
};

struct Desk {
    StepLimits limits;
    Bytes memory;
    HostShare share;
    HostWork work{HostWork::When::AtOnce};
    PlayedPlan plan;

    Desk(const std::vector<Shape>& shapes, size_t layers, int threads, std::function<bool()> waiting)
        : Desk(limitsOf(shapes, layers), threads, std::move(waiting)) {}
    Desk(const StepLimits& wanted, int threads, std::function<bool()> waiting)
        : limits(wanted),
          memory(poisoned(HostShare::mailboxBytes(limits, kMostRows))),
          share(threads, memory.get(), limits, kMostRows, std::move(waiting)) {
        poison();
        poisonChoices();
    }
    const Mailbox& mailbox() const { return share.mailbox(); }
    int64_t mostPairs() const { return kMostRows * limits.expertsUsed; }
    void poison() const {
        const Mailbox& box = mailbox();
        std::fill_n(box.input.floats, kMostRows * box.input.cols, kPoison);
        for (int64_t t = 0; box.input.q && t < kMostRows; ++t) {
            std::fill_n(box.input.q + t * box.input.qStride, box.input.cols, static_cast<int8_t>(-128));
            std::fill_n(box.input.scale + t * (box.input.qStride / 32), box.input.cols / 32, kPoison);
            std::fill_n(box.input.sums + t * (box.input.qStride / 16), box.input.cols / 16,
                        static_cast<int16_t>(-7777));
        }
        std::fill_n(box.down, kMostRows * box.input.cols, kPoison);
        std::fill_n(box.answers, mostPairs() * limits.expertWidth(), kPoison);
    }
    void poisonChoices() const {
        for (int32_t layer = 0; layer < limits.expertLayerCount(); ++layer) {
            const HostChoices to = mailbox().choicesOf(layer);
            for (int32_t* list : {to.chosen, to.slot, to.predicted}) std::fill_n(list, mostPairs(), -1000 - layer);
            std::fill_n(to.weight, mostPairs(), kPoison);
        }
    }
    const HostRows& inputOf(const Layer& layer) const { return layer.dense ? mailbox().input : mailbox().expertInput; }
    // What the GPU sends. It sends rows only if something is missed.
    void give(const Layer& layer, int32_t number) const {
        const Mailbox& box = mailbox();
        if (!layer.dense) {
            const HostChoices to = box.choicesOf(number);
            std::copy(layer.chosen.begin(), layer.chosen.end(), to.chosen);
            std::copy(layer.slot.begin(), layer.slot.end(), to.slot);
            if (layer.weightsInput) std::copy(layer.weight.begin(), layer.weight.end(), to.weight);
            if (layer.predicts()) std::copy(layer.predicted.begin(), layer.predicted.end(), to.predicted);
            if (!layer.anyMissed()) return;
        }
        const HostRows& to = inputOf(layer);
        for (int64_t t = 0; t < layer.rows(); ++t) {
            const Row& row = layer.input[static_cast<size_t>(t)];
            const int64_t blocks = to.cols / 32;
            std::copy(row.floats.begin(), row.floats.end(), to.floats + t * to.cols);
            if (!to.q) continue;
            std::copy_n(row.quantized.q, to.cols, to.q + t * to.qStride);
            std::copy_n(row.quantized.scale, blocks, to.scale + t * (to.qStride / 32));
            std::copy_n(row.quantized.sums, 2 * blocks, to.sums + t * (to.qStride / 16));
        }
    }
    void expectAnswers(const Layer& layer) const {
        const float* got = layer.dense ? mailbox().down : mailbox().answers;
        const auto width = static_cast<size_t>(inputOf(layer).cols);
        for (size_t p = 0; p < layer.chosen.size(); ++p) {
            const bool ours = layer.dense || layer.ours.count(layer.chosen[p]);
            for (size_t i = 0; i < width; ++i) {
                const float want = ours ? layer.answers[p][i] : kPoison;
                ASSERT_EQ(bitsFromFloat(got[p * width + i]), bitsFromFloat(want)) << "pair " << p << ", " << i;
            }
        }
        ASSERT_EQ(got[layer.chosen.size() * width], kPoison) << "written past the end";
    }
    void expectUntouched() const {
        const float* answers = mailbox().answers;
        EXPECT_TRUE(
            std::all_of(answers, answers + mostPairs() * limits.expertWidth(), [](float v) { return v == kPoison; }));
        EXPECT_EQ(*mailbox().returned, 0u);
    }
    void beginStep() {
        share.begin();
        work = HostWork(HostWork::When::AtOnce);
    }
    // The CPU's part of a layer.
    void compute(const Layer& layer, int32_t number, uint32_t after) {
        if (layer.dense) {
            const ExpertStacks file = layer.file();
            const HostExpertLayer only = layer.inHost();
            share.gated({file.gate.first, file.up.first, only.gateBias, only.upBias, only.activation}, file.down.first,
                        layer.rows(), 0, after, work.nextReturned());
            share.down(file.down.first, layer.rows(), 0, 0, work.nextReturned());
            return;
        }
        const uint32_t instructed = work.nextInstructed(), returned = work.nextReturned();
        plan.begin(mailbox(), layer, number, returned);
        share.experts(layer.inHost(), number, layer.rows(), layer.used, layer.predicts(), layer.weightsInput, plan,
                      after, instructed, returned);
        EXPECT_EQ(plan.ordered, layer.anyMissed() ? 1 : 0);
        EXPECT_EQ(plan.told, 1);
    }
    // Both parts, one after the other.
    void pass(const Layer& layer, int32_t number) {
        give(layer, number);
        compute(layer, number, 0);
    }
};

inline bool same(const ExpertFetch& a, const ExpertFetch& b) {
    return a.expert == b.expert && a.slot == b.slot && a.gate == b.gate && a.up == b.up && a.down == b.down;
}

inline bool same(const ExpertOrders& a, const ExpertOrders& b) {
    const auto equal = [](const ExpertFetch& x, const ExpertFetch& y) { return same(x, y); };
    return a.demanded == b.demanded && a.ahead == b.ahead &&
           std::equal(a.fetch, a.fetch + a.demanded, b.fetch, equal) &&
           std::equal(a.aheadFetch, a.aheadFetch + a.ahead, b.aheadFetch, equal);
}

// What the GPU does in a step of some layers. It waits only for what it needs, so the CPU may be layers behind. If no
// answer comes it gives up and fails the test.
class PlayedGpu {
public:
    PlayedGpu(const Desk& desk, const std::vector<Layer>& layers)
        : _desk(desk), _layers(layers), _thread([this] { play(); }) {}
    ~PlayedGpu() { _thread.join(); }
    bool failed() const { return _failed; }

private:
    void play() {
        const Mailbox& box = _desk.mailbox();
        uint32_t sent = 0, instructed = 0, returned = 0;
        for (const Layer& layer : _layers) {
            // A side that reads before the counter allows it reads poison.
            if (sent % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
            _desk.give(layer, static_cast<int32_t>(sent));
            __atomic_store_n(box.sent, ++sent, __ATOMIC_RELEASE);
            returned += layer.dense ? 2 : 1;
            if (!layer.dense) {
                ++instructed;
                if (layer.anyMissed()) {
                    if (!receive(box.instructed, instructed)) return;
                    EXPECT_TRUE(same(*box.orders, layer.orders));
                }
                if (layer.ours.empty()) continue;
            }
            if (!receive(box.returned, returned)) return;
            _desk.expectAnswers(layer);
            _desk.poison();
        }
        receive(box.returned, returned);
    }
    bool receive(const uint32_t* counter, uint32_t ticket) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        for (;;) {
            const uint32_t value = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
            if (value == ticket) return true;
            if (value > ticket || std::chrono::steady_clock::now() > deadline) {
                _failed = true;
                return false;
            }
            std::this_thread::yield();
        }
    }

    const Desk& _desk;
    const std::vector<Layer>& _layers;
    std::atomic<bool> _failed{false};
    std::thread _thread;  // the last member: it uses the others
};

inline void runLayers(const std::vector<Shape>& shapes, int threads, const std::vector<Layer>& layers) {
    PlayedGpu* gpu = nullptr;
    Desk desk(shapes, layers.size(), threads, [&] {
        if (gpu->failed()) throw Error(ErrorKind::Internal, "the GPU has failed");
        return false;  // it may be about to send
    });
    for (int step = 0; step < 2; ++step) {
        desk.beginStep();
        desk.poison();
        desk.poisonChoices();
        const HostShare::Awake awake(desk.share);
        PlayedGpu played(desk, layers);
        gpu = &played;
        try {
            for (size_t i = 0; i < layers.size(); ++i)
                desk.compute(layers[i], static_cast<int32_t>(i), desk.work.nextSent());
        } catch (...) {
            desk.share.abort();
            throw;
        }
    }
}

}  // namespace steptest
