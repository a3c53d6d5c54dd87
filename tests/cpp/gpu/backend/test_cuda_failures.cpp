// Steps in which the CPU's part fails while kernels wait for it. The kernels continue, the caller gets the error, and
// the next step is right.
#include <algorithm>
#include <functional>
#include <new>

#include "cpu/kernels.h"
#include "cpu/share/host_share.h"
#include "gpu_test.h"
#include "kernels/experts/expert_cache.h"

namespace sharpi::cuda {
namespace {

constexpr int64_t kRows = 3, kEmbedding = 64, kHidden = 96;
constexpr int32_t kExperts = 4, kUsed = 2;
constexpr size_t kTurns = 5;

StepLimits limits() {
    StepLimits limits;
    limits.embedding = kEmbedding;
    limits.experts = kExperts;
    limits.expertsUsed = kUsed;
    limits.expertHidden = kHidden;
    limits.expertLayers = {{0, limits.experts}};
    return limits;
}

// Leaves all misses to the CPU.
struct NoOrders : MissPlan {
    void order(int32_t, const int32_t*, const int32_t*, const int32_t*, int32_t, ExpertOrders&) override {}
    void done(int32_t, const int32_t*, const int32_t*, const int32_t*, int32_t, size_t, double) override {}
};

// A step of several turns. In each, the GPU sends rows and the experts that they chose, none of which it holds. It
// waits for orders and for answers, and adds the answers to the rows.
class CudaFailures : public GpuTest {
protected:
    struct Turn {
        std::vector<float> gate, up, down, weight;
        std::vector<int32_t> chosen;
        std::unique_ptr<DeviceArray<int32_t>> onDevice;
        std::unique_ptr<DeviceArray<float>> weightOnDevice;
    };

    void SetUp() override {
        GpuTest::SetUp();
        if (IsSkipped()) return;
        const size_t bytes = HostShare::mailboxBytes(limits(), kRows);
        _mailbox = std::make_unique<PinnedBuffer>(bytes);
        _share = std::make_unique<HostShare>(2, _mailbox->as<void>(), limits(), kRows, [this] {
            if (_givesUp || ++_looks == 20) throw std::runtime_error("given up");
            return stream().poll();
        });
        for (Turn& turn : _turns) {
            for (std::vector<float>* stack : {&turn.gate, &turn.up, &turn.down})
                *stack = randomFloats(kExperts * kHidden * kEmbedding, 0.1f);
            turn.weight = randomFloats(kRows * kUsed);
            for (int64_t row = 0; row < kRows; ++row) {
                const auto first = static_cast<int32_t>(random()() % kExperts);
                turn.chosen.push_back(first);
                turn.chosen.push_back((first + 1) % kExperts);
            }
            turn.onDevice = std::make_unique<DeviceArray<int32_t>>(turn.chosen);
            turn.weightOnDevice = std::make_unique<DeviceArray<float>>(turn.weight);
        }
        _x = std::make_unique<DeviceArray<float>>(kRows * kEmbedding);
        _table = std::make_unique<DeviceArray<int32_t>>(std::vector<int32_t>(kExperts, -1));
        _slot = std::make_unique<DeviceArray<int32_t>>(kRows * kUsed);
        _orders = std::make_unique<DeviceArray<DeviceOrders>>(1);
        _room = std::make_unique<DeviceArray<float>>(3 * kHidden * kEmbedding);
        _start = randomFloats(kRows * kEmbedding);
        computeExpected();
    }

    static MatrixStack stack(const std::vector<float>& values, int64_t rows, int64_t cols) {
        MatrixStack made;
        made.first = {DType::F32, rows, cols, reinterpret_cast<const uint8_t*>(values.data())};
        made.stride = sizeof(float) * static_cast<size_t>(rows * cols);
        made.count = kExperts;
        return made;
    }
    static void answer(HostShare& share, const Turn& turn, uint32_t after, uint32_t ticket) {
        NoOrders plan;
        const ExpertStacks file{stack(turn.gate, kHidden, kEmbedding), stack(turn.up, kHidden, kEmbedding),
                                stack(turn.down, kEmbedding, kHidden)};
        share.experts({file, {}}, 0, kRows, kUsed, false, false, plan, after, ticket, ticket);
    }

    // Computes the step without a GPU.
    void computeExpected() {
        const size_t bytes = HostShare::mailboxBytes(limits(), kRows);
        std::unique_ptr<uint8_t, void (*)(uint8_t*)> memory(
            static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{4096})),
            [](uint8_t* p) { ::operator delete(p, std::align_val_t{4096}); });
        HostShare share(1, memory.get(), limits(), kRows, nullptr);
        const Mailbox& mail = share.mailbox();
        _expected = _start;
        for (const Turn& turn : _turns) {
            std::copy(_expected.begin(), _expected.end(), mail.input.floats);
            std::copy(turn.chosen.begin(), turn.chosen.end(), mail.choicesOf(0).chosen);
            std::fill_n(mail.choicesOf(0).slot, turn.chosen.size(), -1);
            answer(share, turn, 0, 1);
            for (int64_t row = 0; row < kRows; ++row) {
                std::vector<float> sum(kEmbedding, 0.0f);
                for (int64_t p = row * kUsed; p < (row + 1) * kUsed; ++p) {
                    cpu::kernels().addScaled(sum.data(), mail.answers + p * kEmbedding,
                                             turn.weight[static_cast<size_t>(p)], kEmbedding);
                }
                cpu::kernels().add(&_expected[static_cast<size_t>(row * kEmbedding)], sum.data(), kEmbedding);
            }
        }
        ASSERT_FALSE(sameBits(_start, _expected));
    }

    // The two halves of the GPU's part of a turn.
    void send(size_t turn) {
        const Mailbox& mail = _share->mailbox();
        RowOutputs rows;
        rows.floats = _x->get();
        const int32_t* chosen = _turns[turn].onDevice->get();
        const auto slots = [this](int64_t rows, int64_t cols) {
            return MatrixStack{{DType::F32, rows, cols, reinterpret_cast<const uint8_t*>(_room->get())},
                               3 * sizeof(float) * kHidden * kEmbedding,
                               1};
        };
        sendExperts(stream(), rows, kRows, kUsed, chosen, _table->get(), nullptr, _slot->get(), _orders->get(),
                    mail.input, mail.choicesOf(0), mail.sent, ticketOf(turn));
        fetchExperts(stream(), {slots(kHidden, kEmbedding), slots(kHidden, kEmbedding), slots(kEmbedding, kHidden)},
                     mail.orders, mail.instructed, ticketOf(turn), _orders->get(), kRows * kUsed, chosen, _slot->get());
    }
    void receive(size_t turn) {
        const Mailbox& mail = _share->mailbox();
        combineAnswers(stream(), _room->get(), mail.answers, _slot->get(), _turns[turn].weightOnDevice->get(), kRows,
                       kUsed, kEmbedding, mail.returned, ticketOf(turn), _x->get());
    }
    void answer(size_t turn) { answer(*_share, _turns[turn], ticketOf(turn), ticketOf(turn)); }
    static uint32_t ticketOf(size_t turn) { return static_cast<uint32_t>(turn + 1); }

    // What a backend does between steps.
    void begin() {
        stream().synchronize();
        _share->begin();
        _looks = 0;
        stream().upload(_x->get(), _start.data(), _start.size() * sizeof(float));
    }
    void launch() {
        for (size_t turn = 0; turn < kTurns; ++turn) {
            send(turn);
            answer(turn);
            receive(turn);
        }
    }
    void replay(const Graph& graph) {
        stream().replay(graph);
        for (size_t turn = 0; turn < kTurns; ++turn) answer(turn);
    }
    std::unique_ptr<Graph> record() {
        return stream().capture([&] {
            for (size_t turn = 0; turn < kTurns; ++turn) send(turn), receive(turn);
        });
    }
    void run(const std::function<void()>& step) {
        begin();
        try {
            step();
        } catch (...) {
            _share->abort();
            throw;
        }
    }
    // Then the GPU ends the step without help.
    template <typename Failure> void expectFailure(const std::function<void()>& step) {
        try {
            run(step);
            FAIL() << "the step succeeded";
        } catch (const Failure&) {
        }
        uint32_t* returned = _share->mailbox().returned;
        EXPECT_EQ(__atomic_exchange_n(_share->mailbox().instructed, kCrossingAborted, __ATOMIC_RELEASE),
                  kCrossingAborted);
        EXPECT_EQ(__atomic_exchange_n(returned, kCrossingAborted, __ATOMIC_RELEASE),
                  kCrossingAborted);  // so that a failing test ends too
        stream().synchronize();
    }
    void expectRight(const std::function<void()>& step) {
        run(step);
        EXPECT_TRUE(sameBits(_expected, _x->read()));
    }
    void choose(size_t turn, int32_t last) {
        std::vector<int32_t> chosen = _turns[turn].chosen;
        chosen.back() = last;
        stream().upload(_turns[turn].onDevice->get(), chosen.data(), chosen.size() * sizeof(int32_t));
    }

    bool _givesUp = false;
    int _looks = 0;
    std::unique_ptr<PinnedBuffer> _mailbox;
    std::unique_ptr<HostShare> _share;
    Turn _turns[kTurns];
    std::unique_ptr<DeviceArray<float>> _x, _room;
    std::unique_ptr<DeviceArray<int32_t>> _table, _slot;
    std::unique_ptr<DeviceArray<DeviceOrders>> _orders;
    std::vector<float> _start, _expected;
};

// The CPU refuses what the GPU chose, in each turn of the step.
TEST_F(CudaFailures, AStepThatFailsIsFollowedByRightOnes) {
    expectRight([&] { launch(); });
    const std::unique_ptr<Graph> graph = record();
    expectRight([&] { replay(*graph); });
    for (size_t turn = 0; turn < kTurns; ++turn) {
        SCOPED_TRACE("turn " + std::to_string(turn));
        for (const bool replayed : {true, false}) {
            SCOPED_TRACE(replayed ? "replayed" : "launched");
            const auto step = [&] { replayed ? replay(*graph) : launch(); };
            choose(turn, turn % 2 ? -1 : kExperts);
            expectFailure<Error>(step);
            choose(turn, _turns[turn].chosen.back());
            expectRight(step);
            expectRight([&] { replayed ? launch() : replay(*graph); });
        }
    }
}

// The CPU waits for something that a waiting kernel holds up.
TEST_F(CudaFailures, AWaitThatIsGivenUpLetsTheGpuGoOn) {
    expectRight([&] { launch(); });
    const std::unique_ptr<Graph> graph = record();
    _givesUp = true;
    expectFailure<std::runtime_error>([&] {
        stream().replay(*graph);
        answer(0);
        answer(2);
    });
    _givesUp = false;
    expectRight([&] { replay(*graph); });
}

// Work that was not launched never sends anything. The CPU waits for a stream that has more to do, and not for one that
// is done.
TEST_F(CudaFailures, AnIdleGpuIsNotWaitedFor) {
    expectRight([&] { launch(); });
    EXPECT_TRUE(stream().poll());
    expectFailure<Error>([&] {
        send(0);
        answer(0);
        receive(1);
        EXPECT_FALSE(stream().poll());
        __atomic_store_n(_share->mailbox().returned, ticketOf(1), __ATOMIC_RELEASE);
        answer(2);
    });
    EXPECT_TRUE(stream().poll());
    expectRight([&] { launch(); });
}

}  // namespace
}  // namespace sharpi::cuda
