// Rows that cross between the GPU and the CPU in the middle of a step: what arrives, and that nobody looks too early.
// The CPU's side is a thread that gives up after a while, so that a fault fails and does not hang.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/crossing.h"

namespace sharpi::cuda {
namespace {

// Memory of the host that the device reads and writes. Poisoned as DeviceArray is.
template <typename T> class PinnedArray {
public:
    explicit PinnedArray(size_t count) : _count(count) {
        void* data = nullptr;
        require(cudaHostAlloc(&data, std::max<size_t>(count, 1) * sizeof(T), cudaHostAllocDefault));
        _data = static_cast<T*>(data);
        std::memset(data, 0xff, count * sizeof(T));
    }
    ~PinnedArray() { cudaFreeHost(_data); }
    PinnedArray(const PinnedArray&) = delete;
    PinnedArray& operator=(const PinnedArray&) = delete;

    T* get() const { return _data; }
    T& operator[](size_t i) const { return _data[i]; }
    std::vector<T> read() const { return {_data, _data + _count}; }

private:
    T* _data = nullptr;
    size_t _count;
};

// The two counters, as each side sees them.
class Flags {
public:
    Flags() { reset(); }
    void reset() { sentNow().store(0), returnedNow().store(0); }
    uint32_t* sent() const { return _words.get(); }
    uint32_t* returned() const { return _words.get() + 32; }
    std::atomic<uint32_t>& sentNow() const { return *reinterpret_cast<std::atomic<uint32_t>*>(sent()); }
    std::atomic<uint32_t>& returnedNow() const { return *reinterpret_cast<std::atomic<uint32_t>*>(returned()); }
    // False, with the device let go, if the ticket does not come.
    bool awaitSent(uint32_t ticket) const {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (sentNow().load(std::memory_order_acquire) < ticket) {
            if (std::chrono::steady_clock::now() < end) continue;
            returnedNow().store(kCrossingAborted);
            return false;
        }
        return true;
    }

private:
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
    PinnedArray<uint32_t> _words{64};
};

// A thread that is joined whatever happens.
class Host {
public:
    explicit Host(std::function<void()> work) : _thread(std::move(work)) {}
    ~Host() { _thread.join(); }

private:
    std::thread _thread;
};

// Random rows in all forms of both sides, as one quantization by the CPU gives them.
struct Forms {
    int64_t rows, cols;
    std::vector<float> floats;
    std::vector<int8_t> q, deviceQ;      // a row's elements in order; and halves of blocks apart
    std::vector<float> scale;
    std::vector<int16_t> sums;
    std::vector<int32_t> deviceSums;
};

Forms formsOf(std::vector<float> floats, int64_t rows, int64_t cols, bool quantized) {
    Forms f{rows, cols, std::move(floats), {}, {}, {}, {}, {}};
    if (!quantized) return f;
    const int64_t blocks = cols / 32;
    f.q.resize(static_cast<size_t>(rows * cols)), f.deviceQ.resize(f.q.size());
    f.scale.resize(static_cast<size_t>(rows * blocks)), f.sums.resize(f.scale.size() * 2);
    // The kernel may write whole groups of 8 blocks.
    const int64_t padded = (cols + 255) / 256 * 256;
    std::vector<int8_t> q(static_cast<size_t>(padded));
    std::vector<float> scale(static_cast<size_t>(padded / 32));
    std::vector<int16_t> sums(static_cast<size_t>(padded / 16));
    for (int64_t t = 0; t < rows; ++t) {
        cpu::kernels().quantizeRow(&f.floats[static_cast<size_t>(t * cols)], cols, q.data(), scale.data(), sums.data());
        std::copy_n(q.begin(), cols, f.q.begin() + t * cols);
        std::copy_n(scale.begin(), blocks, f.scale.begin() + t * blocks);
        std::copy_n(sums.begin(), 2 * blocks, f.sums.begin() + t * 2 * blocks);
        for (int64_t i = 0; i < cols; ++i)
            f.deviceQ[static_cast<size_t>(((t * 2 + i % 32 / 16) * blocks + i / 32) * 16 + i % 16)] = q[static_cast<size_t>(i)];
    }
    for (size_t b = 0; b < f.scale.size(); ++b) {
        const uint32_t low = static_cast<uint16_t>(f.sums[2 * b]), high = static_cast<uint16_t>(f.sums[2 * b + 1]);
        f.deviceSums.push_back(static_cast<int32_t>(low | high << 16));
    }
    return f;
}

// The device's arrays: those of `forms`, or poisoned.
struct DeviceRows {
    DeviceRows(int64_t rows, int64_t cols)
        : floats(static_cast<size_t>(rows * cols)), q(floats.size()), scale(static_cast<size_t>(rows * (cols / 32))), sums(scale.size()) {}
    explicit DeviceRows(const Forms& f) : floats(f.floats), q(f.deviceQ), scale(f.scale), sums(f.deviceSums) {}
    RowOutputs outputs(bool withFloats, bool withQuantized) const {
        RowOutputs out;
        if (withFloats) out.floats = floats.get();
        if (withQuantized) out.quantized = {q.get(), scale.get(), sums.get()};
        return out;
    }
    DeviceArray<float> floats;
    DeviceArray<int8_t> q;
    DeviceArray<float> scale;
    DeviceArray<int32_t> sums;
};

// The host's, laid out as the CPU's own rows are, with a stride that is more than the columns.
struct PinnedRows {
    PinnedRows(int64_t count, int64_t columns)
        : rows(count), cols(columns), stride((columns + 255) / 256 * 256 + 256), floats(static_cast<size_t>(count * columns)),
          q(static_cast<size_t>(count * stride)), scale(static_cast<size_t>(count * stride / 32)), sums(static_cast<size_t>(count * stride / 16)) {}
    HostRows host(bool withFloats, bool withQuantized) const {
        HostRows h;
        if (withFloats) h.floats = floats.get();
        if (withQuantized) h.q = q.get(), h.scale = scale.get(), h.sums = sums.get(), h.qStride = stride;
        h.cols = cols;
        return h;
    }
    void fill(const Forms& f, int64_t begin, int64_t end) const {
        for (int64_t t = 0; t < rows; ++t) {
            std::copy_n(&f.floats[static_cast<size_t>(t * cols + begin)], end - begin, floats.get() + t * cols + begin);
            if (f.q.empty()) continue;
            std::copy_n(&f.q[static_cast<size_t>(t * cols + begin)], end - begin, q.get() + t * stride + begin);
            std::copy_n(&f.scale[static_cast<size_t>((t * cols + begin) / 32)], (end - begin) / 32, scale.get() + (t * stride + begin) / 32);
            std::copy_n(&f.sums[static_cast<size_t>((t * cols + begin) / 16)], (end - begin) / 16, sums.get() + (t * stride + begin) / 16);
        }
    }
    const int64_t rows, cols, stride;
    PinnedArray<float> floats;
    PinnedArray<int8_t> q;
    PinnedArray<float> scale;
    PinnedArray<int16_t> sums;
};

struct Range {
    int64_t cols, begin, end;
};
// Wide pieces and narrow ones, rows that are no whole groups of blocks, more than one block of threads can have on its way.
const std::vector<Range> kRanges = {{32, 0, 32},      {4096, 0, 4096},  {4096, 128, 3968}, {4096, 256, 416},
                                    {1184, 0, 1184}, {1184, 96, 1184}, {1184, 32, 64},    {25600, 12800, 25600}};

class CrossingTest : public GpuTest {
protected:
    Forms forms(int64_t rows, int64_t cols) { return formsOf(randomFloats(static_cast<size_t>(rows * cols)), rows, cols, cols % 32 == 0); }
    // Data that was not there yet, seen by a kernel that did not wait, is poison.
    static void later() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
};

// Columns [begin, end) of every row of `from` to `to`, whose rows are so many elements apart.
template <typename T>
void putColumns(std::vector<T>& to, int64_t toRow, const std::vector<T>& from, int64_t fromRow, int64_t begin, int64_t end, int64_t rows) {
    for (int64_t t = 0; t < rows; ++t)
        std::copy(from.begin() + t * fromRow + begin, from.begin() + t * fromRow + end, to.begin() + t * toRow + begin);
}

// What `to` must hold after columns of f were sent there.
void expectSent(const Forms& f, const Range& range, const PinnedRows& to, bool floats, bool quantized) {
    const PinnedRows poison(f.rows, f.cols);
    std::vector<float> wantFloats = poison.floats.read(), wantScale = poison.scale.read();
    std::vector<int8_t> wantQ = poison.q.read();
    std::vector<int16_t> wantSums = poison.sums.read();
    if (floats) putColumns(wantFloats, f.cols, f.floats, f.cols, range.begin, range.end, f.rows);
    if (quantized) {
        putColumns(wantQ, to.stride, f.q, f.cols, range.begin, range.end, f.rows);
        putColumns(wantScale, to.stride / 32, f.scale, f.cols / 32, range.begin / 32, range.end / 32, f.rows);
        putColumns(wantSums, to.stride / 16, f.sums, f.cols / 16, range.begin / 16, range.end / 16, f.rows);
    }
    EXPECT_TRUE(sameBits(wantFloats, to.floats.read()));
    EXPECT_TRUE(sameBits(wantScale, to.scale.read()));
    EXPECT_TRUE(wantQ == to.q.read());
    EXPECT_TRUE(wantSums == to.sums.read());
}

void expectReceived(const Forms& f, const Range& range, const DeviceRows& to, bool floats, bool quantized) {
    const DeviceRows poison(f.rows, f.cols);
    std::vector<float> wantFloats = poison.floats.read(), wantScale = poison.scale.read();
    std::vector<int8_t> wantQ = poison.q.read();
    std::vector<int32_t> wantSums = poison.sums.read();
    if (floats) putColumns(wantFloats, f.cols, f.floats, f.cols, range.begin, range.end, f.rows);
    if (quantized) {
        putColumns(wantScale, f.cols / 32, f.scale, f.cols / 32, range.begin / 32, range.end / 32, f.rows);
        putColumns(wantSums, f.cols / 32, f.deviceSums, f.cols / 32, range.begin / 32, range.end / 32, f.rows);
        // A row's halves of blocks are two rows of half the columns.
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
        for (const int64_t rows : {1, 3, 8}) {
            const Forms f = forms(rows, range.cols);
            const DeviceRows from(f);
            for (int which = 1; which <= 3; ++which) {
                SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + " from " + std::to_string(range.begin));
                const PinnedRows to(rows, range.cols);
                sendRows(stream(), from.outputs(which & 1, true), rows, range.begin, range.end, to.host(true, which & 2), flags.sent(), ++ticket);
                stream().synchronize();
                EXPECT_EQ(flags.sentNow().load(), ticket);
                expectSent(f, range, to, which & 1, which & 2);
            }
        }
    }
    // Floats of any number of columns; and nothing at all, for which the CPU is told all the same.
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

// The host looks at each ticket's rows as soon as it sees the ticket.
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
            sendRows(stream(), from[i]->outputs(true, true), rows, 0, cols, to[i]->host(true, true), flags.sent(), i + 1);
    }
    EXPECT_EQ(missing.load(), 0);
    EXPECT_EQ(early.load(), 0);
    stream().synchronize();
    for (uint32_t i = 0; i < tickets; ++i) expectSent(f[i], {cols, 0, cols}, *to[i], true, true);
}

// A router's choices have no ticket: the host reads them when it sees that of the rows sent after them.
TEST_F(CrossingTest, ChoicesAreThereBeforeTheTicketOfTheRows) {
    constexpr size_t kGuard = 16;
    const int64_t cols = 4096, counts[] = {1, 2, 8, 31, 64, 80, 511, 1300, 0, 10};
    const Flags flags;
    struct Turn {
        Turn(std::vector<int32_t> experts, std::vector<float> factors, Forms rows)
            : chosen(std::move(experts)), weight(std::move(factors)), f(std::move(rows)), onDevice(chosen), weightOnDevice(weight), from(f),
              hostChosen(chosen.size() + kGuard), hostWeight(weight.size() + kGuard), to(1, f.cols) {}
        // What must have come, and the poison behind it.
        bool isThere() const {
            std::vector<int32_t> wantChosen = chosen;
            wantChosen.resize(chosen.size() + kGuard, -1);
            std::vector<float> wantWeight = weight;
            wantWeight.resize(weight.size() + kGuard);
            std::memset(wantWeight.data() + weight.size(), 0xff, kGuard * sizeof(float));
            return wantChosen == hostChosen.read() && sameBits(wantWeight, hostWeight.read()) && f.floats == to.floats.read();
        }
        std::vector<int32_t> chosen;
        std::vector<float> weight;
        Forms f;
        DeviceArray<int32_t> onDevice;
        DeviceArray<float> weightOnDevice;
        DeviceRows from;
        PinnedArray<int32_t> hostChosen;
        PinnedArray<float> hostWeight;
        PinnedRows to;
    };
    std::vector<std::unique_ptr<Turn>> turns;
    for (const int64_t count : counts) {
        std::vector<int32_t> chosen(static_cast<size_t>(count));
        for (int32_t& expert : chosen) expert = static_cast<int32_t>(random()() % 256);
        turns.push_back(std::make_unique<Turn>(std::move(chosen), randomFloats(static_cast<size_t>(count)), forms(1, cols)));
    }
    std::atomic<int> missing{0}, early{0};
    {
        const Host host([&] {
            for (uint32_t i = 0; i < turns.size(); ++i) {
                if (!flags.awaitSent(i + 1)) return void(++missing);
                early += !turns[i]->isThere();
            }
        });
        for (uint32_t i = 0; i < turns.size(); ++i) {
            const Turn& turn = *turns[i];
            sendChoices(stream(), turn.onDevice.get(), turn.weightOnDevice.get(), static_cast<int64_t>(turn.chosen.size()), turn.hostChosen.get(),
                        turn.hostWeight.get());
            sendRows(stream(), turn.from.outputs(true, true), 1, 0, cols, turn.to.host(true, true), flags.sent(), i + 1);
        }
    }
    EXPECT_EQ(missing.load(), 0);
    EXPECT_EQ(early.load(), 0);
    stream().synchronize();
    for (const auto& turn : turns) EXPECT_TRUE(turn->isThere()) << turn->chosen.size() << " choices";
    const Turn& any = *turns[0];
    EXPECT_THROW(sendChoices(stream(), any.onDevice.get(), any.weightOnDevice.get(), -1, any.hostChosen.get(), any.hostWeight.get()), Error);
}

// A captured step that is replayed with other choices: nothing of the last replay may be read in the next.
TEST_F(CrossingTest, ChoicesAreSentAnewInEveryReplay) {
    const int64_t count = 24, cols = 256;
    const uint32_t layers = 6, steps = 4;
    const size_t all = static_cast<size_t>(count * layers);
    Flags flags;
    const DeviceRows rows(forms(1, cols));
    const PinnedRows to(1, cols);
    const DeviceArray<int32_t> chosen(all);
    const DeviceArray<float> weight(all);
    const PinnedArray<int32_t> hostChosen(static_cast<size_t>(count));
    const PinnedArray<float> hostWeight(static_cast<size_t>(count)), none(1);
    const DeviceArray<float> x(1);
    const auto graph = stream().capture([&] {
        for (uint32_t layer = 0; layer < layers; ++layer) {
            sendChoices(stream(), chosen.get() + layer * count, weight.get() + layer * count, count, hostChosen.get(), hostWeight.get());
            sendRows(stream(), rows.outputs(true, false), 1, 0, cols, to.host(true, false), flags.sent(), layer + 1);
            receiveAdd(stream(), none.get(), 1, 0, 0, flags.returned(), layer + 1, x.get(), 1);  // the mailbox is the next layer's now
        }
    });
    for (uint32_t step = 0; step < steps; ++step) {
        std::vector<int32_t> wantChosen(all), gotChosen;
        for (int32_t& expert : wantChosen) expert = static_cast<int32_t>(random()() % 128);
        const std::vector<float> wantWeight = randomFloats(all);
        std::vector<float> gotWeight;
        stream().upload(chosen.get(), wantChosen.data(), all * sizeof(int32_t));
        stream().upload(weight.get(), wantWeight.data(), all * sizeof(float));
        flags.reset();
        {
            const Host host([&] {
                for (uint32_t layer = 1; layer <= layers; ++layer) {
                    if (!flags.awaitSent(layer)) return;
                    gotChosen.insert(gotChosen.end(), hostChosen.get(), hostChosen.get() + count);
                    gotWeight.insert(gotWeight.end(), hostWeight.get(), hostWeight.get() + count);
                    flags.returnedNow().store(layer, std::memory_order_release);
                }
            });
            stream().replay(*graph);
            stream().synchronize();
        }
        EXPECT_EQ(wantChosen, gotChosen);
        EXPECT_TRUE(sameBits(wantWeight, gotWeight));
    }
}

TEST_F(CrossingTest, WhatIsReceivedIsTheDevicesRows) {
    const Flags flags;
    flags.returnedNow().store(7);
    for (const Range& range : kRanges) {
        for (const int64_t rows : {1, 3, 8}) {
            const Forms f = forms(rows, range.cols);
            const PinnedRows from(rows, range.cols);
            from.fill(f, 0, range.cols);
            for (int which = 1; which <= 3; ++which) {
                SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + " from " + std::to_string(range.begin));
                const DeviceRows to(rows, range.cols);
                receiveRows(stream(), from.host(which & 1, true), rows, range.begin, range.end, flags.returned(), 7, to.outputs(true, which & 2));
                expectReceived(f, range, to, which & 1, which & 2);
            }
        }
    }
}

TEST_F(CrossingTest, ReceivingWaitsForTheTicket) {
    for (const int64_t rows : {1, 8}) {
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
                flags.returnedNow().store(2);  // an earlier one's
                later();
                from.fill(f, range.begin, range.end);
                flags.returnedNow().store(3, std::memory_order_release);
                later();
                std::copy(values.begin(), values.end(), addends.get());
                flags.returnedNow().store(4, std::memory_order_release);
            });
            receiveRows(stream(), from.host(true, true), rows, range.begin, range.end, flags.returned(), 3, to.outputs(true, true));
            receiveAdd(stream(), addends.get(), rows, 256, 512, flags.returned(), 4, x.get(), range.cols);
            stream().synchronize();
        }
        expectReceived(f, range, to, true, true);
        std::vector<float> sum = f.floats;
        for (int64_t t = 0; t < rows; ++t)
            cpu::kernels().add(&sum[static_cast<size_t>(t * range.cols + 256)], &values[static_cast<size_t>(t * 512)], 512);
        EXPECT_TRUE(sameBits(sum, x.read()));
    }
}

TEST_F(CrossingTest, AddingRoundsOnce) {
    const Flags flags;
    flags.returnedNow().store(1);
    for (const Range& range : {Range{4096, 0, 4096}, Range{4096, 3000, 4096}, Range{67, 5, 66}, Range{64, 3, 4}, Range{16384, 4, 16384}}) {
        for (const int64_t rows : {1, 2, 8}) {
            SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(range.cols) + " from " + std::to_string(range.begin));
            const int64_t count = range.end - range.begin;
            const std::vector<float> before = randomFloats(static_cast<size_t>(rows * range.cols));
            const std::vector<float> values = randomFloats(static_cast<size_t>(rows * count), 1e-3f);
            const DeviceArray<float> x(before);
            const PinnedArray<float> from(values.size());
            std::copy(values.begin(), values.end(), from.get());
            receiveAdd(stream(), from.get(), rows, range.begin, count, flags.returned(), 1, x.get(), range.cols);
            std::vector<float> sum = before;
            for (int64_t t = 0; t < rows; ++t)
                cpu::kernels().add(&sum[static_cast<size_t>(t * range.cols + range.begin)], &values[static_cast<size_t>(t * count)], count);
            EXPECT_TRUE(sameBits(sum, x.read()));
        }
    }
}

// There and back many times in one captured step, which is replayed: the CPU changes what it got, the device adds it.
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
            receiveAdd(stream(), back.get(), 1, begin, count, flags.returned(), turn, onDevice.get(), cols);
        }
    });
    for (int step = 0; step < 3; ++step) {
        flags.reset();
        std::atomic<int> missing{0};
        {
            const Host host([&] {
                for (uint32_t turn = 1; turn <= turns; ++turn) {
                    if (!flags.awaitSent(turn)) return void(++missing);
                    for (int64_t i = 0; i < count; ++i) back[static_cast<size_t>(i)] = sent[static_cast<size_t>(begin + i)] * 0.5f;
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
            receiveAdd(stream(), from.floats.get(), 8, 0, 4096, flags.returned(), ticket, to.floats.get(), 4096);
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
    for (const Range& range : {Range{96, 16, 96}, Range{96, 0, 48}, Range{96, 64, 32}, Range{96, 0, 128}, Range{96, -32, 32}})
        EXPECT_THROW(sendRows(stream(), out, 2, range.begin, range.end, host.host(true, true), flags.sent(), 1), Error) << range.begin;
    HostRows shifted = host.host(true, true);
    shifted.q += 4;
    EXPECT_THROW(receiveRows(stream(), shifted, 2, 0, 96, flags.returned(), 1, out), Error);
    EXPECT_THROW(receiveAdd(stream(), host.floats.get(), 2, 32, 96, flags.returned(), 1, device.floats.get(), 96), Error);
}

}  // namespace
}  // namespace sharpi::cuda
