// Rows that cross between the GPU and the CPU in the middle of a step: they arrive unchanged, and neither side reads
// them too early. The CPU's side is a thread that gives up after a while, so that a fault fails the test instead of
// hanging.
#include <memory>

#include "crossing_test.h"

namespace sharpi::cuda {
namespace {

// Wide and narrow pieces, rows that are not whole groups of blocks, and more than one block of threads can have in
// flight.
const std::vector<Range> kRanges = {{32, 0, 32},     {4096, 0, 4096},  {4096, 128, 3968}, {4096, 256, 416},
                                    {1184, 0, 1184}, {1184, 96, 1184}, {1184, 32, 64},    {25600, 12800, 25600}};

class CrossingTest : public GpuTest {
protected:
    Forms forms(int64_t rows, int64_t cols) {
        return formsOf(randomFloats(static_cast<size_t>(rows * cols)), rows, cols, cols % 32 == 0);
    }
    // A kernel that did not wait reads poison, since the data comes later.
    static void later() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
};

void expectReceived(const Forms& f, const Range& range, const DeviceRows& to, bool floats, bool quantized) {
    const DeviceRows poison(f.rows, f.cols);
    std::vector<float> wantFloats = poison.floats.read(), wantScale = poison.scale.read();
    std::vector<int8_t> wantQ = poison.q.read();
    std::vector<int32_t> wantSums = poison.sums.read();
    if (floats) putColumns(wantFloats, f.cols, f.floats, f.cols, range.begin, range.end, f.rows);
    if (quantized) {
        putColumns(wantScale, f.cols / 32, f.scale, f.cols / 32, range.begin / 32, range.end / 32, f.rows);
        putColumns(wantSums, f.cols / 32, f.deviceSums, f.cols / 32, range.begin / 32, range.end / 32, f.rows);
        // The halves of a row's blocks count as two rows with half the columns.
        putColumns(wantQ, f.cols / 2, f.deviceQ, f.cols / 2, range.begin / 2, range.end / 2, 2 * f.rows);
    }
    EXPECT_TRUE(sameBits(wantFloats, to.floats.read()));
    EXPECT_TRUE(sameBits(wantScale, to.scale.read()));
    EXPECT_TRUE(wantQ == to.q.read());
    EXPECT_TRUE(wantSums == to.sums.read());
}

TEST_F(CrossingTest, WhatIsSentIsTheCpusRows) {
    const Flags flags;
    uint32_t ticket = 0;
    for (const Range& range : kRanges) {
        for (const int64_t rows : {1, 3, 8, 9, 40, 64}) {
            const Forms f = forms(rows, range.cols);
            const DeviceRows from(f);
            for (int which = 1; which <= 3; ++which) {
                SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + " from " +
                             std::to_string(range.begin));
                const PinnedRows to(rows, range.cols);
                sendRows(stream(), from.outputs(which & 1, true), rows, range.begin, range.end,
                         to.host(true, which & 2), flags.sent(), ++ticket);
                stream().synchronize();
                EXPECT_EQ(flags.sentNow().load(), ticket);
                expectSent(f, range, to, which & 1, which & 2);
            }
        }
    }
    // Floats with any number of columns; and no columns at all, of which the CPU is told too.
    const Forms f = forms(2, 67);
    const DeviceRows from(f);
    const PinnedRows to(2, 67);
    sendRows(stream(), from.outputs(true, false), 2, 32, 67, to.host(true, false), flags.sent(), ++ticket);
    stream().synchronize();
    expectSent(f, {67, 32, 67}, to, true, false);
    sendRows(stream(), from.outputs(true, false), 2, 64, 64, to.host(true, false), flags.sent(), ++ticket);
    stream().synchronize();
    EXPECT_EQ(flags.sentNow().load(), ticket);
}

// The host checks each ticket's rows as soon as it sees the ticket.
TEST_F(CrossingTest, DataIsThereBeforeItsTicket) {
    const int64_t rows = 8, cols = 8192;
    const uint32_t tickets = 20;
    const Flags flags;
    std::vector<Forms> f;
    std::vector<std::unique_ptr<DeviceRows>> from;
    std::vector<std::unique_ptr<PinnedRows>> to;
    for (uint32_t i = 0; i < tickets; ++i) {
        f.push_back(forms(rows, cols));
        from.push_back(std::make_unique<DeviceRows>(f[i]));
        to.push_back(std::make_unique<PinnedRows>(rows, cols));
    }
    std::atomic<int> missing{0}, early{0};
    {
        const Host host([&] {
            for (uint32_t i = 0; i < tickets; ++i) {
                if (!flags.awaitSent(i + 1)) return void(++missing);
                early += to[i]->floats.read() != f[i].floats;
            }
        });
        for (uint32_t i = 0; i < tickets; ++i)
            sendRows(stream(), from[i]->outputs(true, true), rows, 0, cols, to[i]->host(true, true), flags.sent(),
                     i + 1);
    }
    EXPECT_EQ(missing.load(), 0);
    EXPECT_EQ(early.load(), 0);
    stream().synchronize();
    for (uint32_t i = 0; i < tickets; ++i) expectSent(f[i], {cols, 0, cols}, *to[i], true, true);
}

TEST_F(CrossingTest, WhatIsReceivedIsTheDevicesRows) {
    const Flags flags;
    flags.returnedNow().store(7);
    for (const Range& range : kRanges) {
        for (const int64_t rows : {1, 3, 8, 9, 40, 64}) {
            const Forms f = forms(rows, range.cols);
            const PinnedRows from(rows, range.cols);
            from.fill(f, 0, range.cols);
            for (int which = 1; which <= 3; ++which) {
                SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + " from " +
                             std::to_string(range.begin));
                const DeviceRows to(rows, range.cols);
                receiveRows(stream(), from.host(which & 1, true), rows, range.begin, range.end, flags.returned(), 7,
                            to.outputs(true, which & 2));
                expectReceived(f, range, to, which & 1, which & 2);
            }
        }
    }
}

TEST_F(CrossingTest, ReceivingWaitsForTheTicket) {
    for (const int64_t rows : {1, 8, 64}) {
        const Range range{4096, 1024, 4096};
        const Forms f = forms(rows, range.cols);
        const PinnedRows from(rows, range.cols);
        const DeviceRows to(rows, range.cols);
        const DeviceArray<float> x(f.floats);
        const PinnedArray<float> addends(static_cast<size_t>(rows * 512));
        const Flags flags;
        const std::vector<float> values = randomFloats(static_cast<size_t>(rows * 512));
        {
            const Host host([&] {
                flags.returnedNow().store(2);  // an earlier ticket
                later();
                from.fill(f, range.begin, range.end);
                flags.returnedNow().store(3, std::memory_order_release);
                later();
                std::copy(values.begin(), values.end(), addends.get());
                flags.returnedNow().store(4, std::memory_order_release);
            });
            receiveRows(stream(), from.host(true, true), rows, range.begin, range.end, flags.returned(), 3,
                        to.outputs(true, true));
            receiveProduct(stream(), addends.get(), rows, 256, 512, flags.returned(), 4, x.get(), range.cols);
            stream().synchronize();
        }
        expectReceived(f, range, to, true, true);
        std::vector<float> sum = f.floats;
        for (int64_t t = 0; t < rows; ++t)
            cpu::kernels().add(&sum[static_cast<size_t>(t * range.cols + 256)], &values[static_cast<size_t>(t * 512)],
                               512);
        EXPECT_TRUE(sameBits(sum, x.read()));
    }
}

TEST_F(CrossingTest, AddingRoundsOnce) {
    const Flags flags;
    flags.returnedNow().store(1);
    for (const Range& range :
         {Range{4096, 0, 4096}, Range{4096, 3000, 4096}, Range{67, 5, 66}, Range{64, 3, 4}, Range{16384, 4, 16384}}) {
        for (const int64_t rows : {1, 2, 8, 9, 40, 64}) {
            SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + " from " +
                         std::to_string(range.begin));
            const int64_t count = range.end - range.begin;
            const std::vector<float> before = randomFloats(static_cast<size_t>(rows * range.cols));
            const std::vector<float> values = randomFloats(static_cast<size_t>(rows * count), 1e-3f);
            const DeviceArray<float> x(before);
            const PinnedArray<float> from(values.size());
            std::copy(values.begin(), values.end(), from.get());
            receiveProduct(stream(), from.get(), rows, range.begin, count, flags.returned(), 1, x.get(), range.cols);
            std::vector<float> sum = before;
            for (int64_t t = 0; t < rows; ++t)
                cpu::kernels().add(&sum[static_cast<size_t>(t * range.cols + range.begin)],
                                   &values[static_cast<size_t>(t * count)], count);
            EXPECT_TRUE(sameBits(sum, x.read()));
        }
    }
}

// Many round trips in one captured step, which is replayed. The CPU changes what it received, and the device adds it.
TEST_F(CrossingTest, ABiasIsAddedFirstAndRowsMayBeReplaced) {
    const Flags flags;
    flags.returnedNow().store(1);
    for (const Range& range : {Range{4096, 3000, 4096}, Range{67, 5, 66}, Range{64, 3, 4}}) {
        for (const int64_t rows : {1, 8, 40}) {
            for (int variant = 0; variant < 4; ++variant) {
                const bool biased = variant & 1, adds = variant & 2;
                SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + ", variant " +
                             std::to_string(variant));
                const int64_t count = range.end - range.begin;
                const std::vector<float> before = randomFloats(static_cast<size_t>(rows * range.cols)),
                                         values = randomFloats(static_cast<size_t>(rows * count)),
                                         bias = randomFloats(static_cast<size_t>(range.cols));
                const DeviceArray<float> x(before), biasOnDevice(bias);
                const PinnedArray<float> from(values.size());
                std::copy(values.begin(), values.end(), from.get());
                receiveProduct(stream(), from.get(), rows, range.begin, count, flags.returned(), 1, x.get(), range.cols,
                               biased ? biasOnDevice.get() : nullptr, adds);
                std::vector<float> expected = before;
                for (int64_t t = 0; t < rows; ++t) {
                    std::vector<float> y(values.begin() + t * count, values.begin() + (t + 1) * count);
                    if (biased) cpu::kernels().add(y.data(), &bias[static_cast<size_t>(range.begin)], count);
                    float* const to = &expected[static_cast<size_t>(t * range.cols + range.begin)];
                    if (adds) cpu::kernels().add(to, y.data(), count);
                    else std::copy(y.begin(), y.end(), to);
                }
                EXPECT_TRUE(sameBits(expected, x.read()));
            }
        }
    }
}

TEST_F(CrossingTest, AStepIsReplayed) {
    const int64_t cols = 1024, begin = 256, end = 768, count = end - begin;
    const uint32_t turns = 10;
    std::vector<float> x = randomFloats(static_cast<size_t>(cols));
    const DeviceArray<float> onDevice(x);
    const PinnedArray<float> sent(static_cast<size_t>(cols)), back(static_cast<size_t>(count));
    Flags flags;
    HostRows to;
    to.floats = sent.get();
    to.cols = cols;
    RowOutputs rows;
    rows.floats = onDevice.get();
    const auto graph = stream().capture([&] {
        for (uint32_t turn = 1; turn <= turns; ++turn) {
            sendRows(stream(), rows, 1, begin, end, to, flags.sent(), turn);
            receiveProduct(stream(), back.get(), 1, begin, count, flags.returned(), turn, onDevice.get(), cols);
        }
    });
    for (int step = 0; step < 3; ++step) {
        flags.reset();
        std::atomic<int> missing{0};
        {
            const Host host([&] {
                for (uint32_t turn = 1; turn <= turns; ++turn) {
                    if (!flags.awaitSent(turn)) return void(++missing);
                    for (int64_t i = 0; i < count; ++i)
                        back[static_cast<size_t>(i)] = sent[static_cast<size_t>(begin + i)] * 0.5f;
                    flags.returnedNow().store(turn, std::memory_order_release);
                }
            });
            stream().replay(*graph);
            stream().synchronize();
        }
        ASSERT_EQ(missing.load(), 0);
        for (uint32_t turn = 0; turn < turns; ++turn)
            for (int64_t i = begin; i < end; ++i) x[static_cast<size_t>(i)] += x[static_cast<size_t>(i)] * 0.5f;
        EXPECT_TRUE(sameBits(x, onDevice.read()));
    }
}

TEST_F(CrossingTest, AbortingLetsEverythingGoOn) {
    const Flags flags;
    const PinnedRows from(8, 4096);
    const DeviceRows to(8, 4096);
    {
        const Host host([&] {
            later();
            flags.returnedNow().store(kCrossingAborted);
        });
        for (uint32_t ticket = 1; ticket < 5; ++ticket) {
            receiveRows(stream(), from.host(true, true), 8, 0, 4096, flags.returned(), ticket, to.outputs(true, true));
            receiveProduct(stream(), from.floats.get(), 8, 0, 4096, flags.returned(), ticket, to.floats.get(), 4096);
        }
        stream().synchronize();
    }
    EXPECT_EQ(flags.returnedNow().load(), kCrossingAborted);
}

TEST_F(CrossingTest, RefusesWhatCannotCross) {
    const Flags flags;
    flags.returnedNow().store(1);
    const PinnedRows host(2, 96);
    const DeviceRows device(2, 96);
    const RowOutputs out = device.outputs(true, true);
    for (const Range& range :
         {Range{96, 16, 96}, Range{96, 0, 48}, Range{96, 64, 32}, Range{96, 0, 128}, Range{96, -32, 32}})
        EXPECT_THROW(sendRows(stream(), out, 2, range.begin, range.end, host.host(true, true), flags.sent(), 1), Error)
            << range.begin;
    HostRows shifted = host.host(true, true);
    shifted.q += 4;
    EXPECT_THROW(receiveRows(stream(), shifted, 2, 0, 96, flags.returned(), 1, out), Error);
    EXPECT_THROW(receiveProduct(stream(), host.floats.get(), 2, 32, 96, flags.returned(), 1, device.floats.get(), 96),
                 Error);
}

}  // namespace
}  // namespace sharpi::cuda
