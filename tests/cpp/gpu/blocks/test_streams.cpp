// Hyper-connections on the GPU give the bits of the CPU's operations.
#include <algorithm>
#include <vector>

#include "cpu/operations/cpu_operations.h"
#include "gpu_test.h"
#include "kernels/streams/streams.h"

namespace sharpi::cuda {
namespace {

struct Case {
    int32_t count, iterations;
    int64_t width, rows;
    friend std::ostream& operator<<(std::ostream& out, const Case& c) {
        return out << c.count << " streams of " << c.width << ", " << c.rows << " rows, " << c.iterations
                   << " iterations";
    }
};

// The CPU's operations and their buffers.
struct OnCpu {
    HostClock clock;
    CpuWork work{2, clock};
    CpuOperations ops{work};
    Batch batch;
    std::vector<uint8_t> memory;

    explicit OnCpu(const Case& c) {
        StepLimits limits;
        limits.maxRows = c.rows;
        limits.embedding = c.width;
        limits.streams = c.count;
        limits.maxCols = c.count * c.width;
        limits.partOuts = true;
        memory.resize(CpuScratch(2, limits).total + 64);
        const auto at = reinterpret_cast<uintptr_t>(memory.data());
        work.takeBuffers(limits, memory.data() + (64 - at % 64) % 64);
        for (int32_t t = 0; t < c.rows; ++t) batch.add(RowKind::Decode, t, t, 0, false);
        work.batch = &batch;
    }
    void write(RowBuffer buffer, const std::vector<float>& values) {
        std::copy(values.begin(), values.end(), work.at(buffer));
    }
    std::vector<float> read(const float* from, int64_t count) const { return {from, from + count}; }
    std::vector<float> read(RowBuffer buffer, int64_t count) const { return read(work.at(buffer), count); }
};

class Streams : public GpuTest, public ::testing::WithParamInterface<Case> {
protected:
    // Without the first `skipped` of every `stride` numbers.
    static std::vector<float> without(const std::vector<float>& values, int64_t stride, int64_t skipped) {
        std::vector<float> rest;
        for (size_t i = 0; i < values.size(); ++i)
            if (static_cast<int64_t>(i) % stride >= skipped) rest.push_back(values[i]);
        return rest;
    }
};

TEST_P(Streams, GiveTheBitsOfTheCpu) {
    const Case c = GetParam();
    const int64_t numbers = c.count * (2 + c.count), all = c.count * c.width;
    OnCpu cpu(c);
    StreamOperations& ops = cpu.ops.streams();
    const auto base = randomFloats(numbers), scale = randomFloats(3, 2.0f);
    const DeviceArray<float> deviceBase(base), deviceScale(scale);
    const StreamsCall call{c.count, c.iterations, 1e-6f, base.data(), scale.data()};
    const StreamRule rule{c.count, c.iterations, 1e-6f, deviceBase.get(), deviceScale.get(), c.width};

    const auto x = randomFloats(c.rows * c.width);
    cpu.write(RowBuffer::Residual, x);
    const DeviceArray<float> residual(x), streams(c.rows * all);
    ops.begin();
    beginStreams(stream(), rule, residual.get(), c.rows, streams.get());
    ASSERT_TRUE(sameBits(cpu.read(RowBuffer::Streams, c.rows * all), streams.read()));

    for (int part = 0; part < 3; ++part) {
        ops.norm(1e-6f, {});
        const DeviceArray<float> normed(c.rows * all);
        rmsNorm(stream(), streams.get(), nullptr, nullptr, 1e-6f, c.rows, all, {normed.get(), {}, {}});
        ASSERT_TRUE(sameBits(cpu.read(cpu.work.floats(cpu.work.scratch().streams), c.rows * all), normed.read()));

        const auto products = randomFloats(c.rows * numbers, 3.0f), answer = randomFloats(c.rows * c.width);
        cpu.write(RowBuffer::StreamMix, products);
        cpu.write(RowBuffer::PartOut, answer);
        const DeviceArray<float> mix(products), partOut(answer);
        ops.enter(call);
        enterStreams(stream(), rule, streams.get(), mix.get(), c.rows, residual.get());
        ASSERT_TRUE(sameBits(cpu.read(RowBuffer::Residual, c.rows * c.width), residual.read()));
        ASSERT_TRUE(sameBits(without(cpu.read(RowBuffer::StreamMix, c.rows * numbers), numbers, c.count),
                             without(mix.read(), numbers, c.count)));
        ops.leave(call);
        leaveStreams(stream(), rule, mix.get(), partOut.get(), c.rows, streams.get());
        ASSERT_TRUE(sameBits(cpu.read(RowBuffer::Streams, c.rows * all), streams.read()));
    }

    const auto products = randomFloats(c.rows * c.count, 3.0f);
    cpu.write(RowBuffer::StreamMix, products);
    const DeviceArray<float> mix(products);
    ops.end(call);
    endStreams(stream(), rule, streams.get(), mix.get(), c.rows, residual.get());
    ASSERT_TRUE(sameBits(cpu.read(RowBuffer::Residual, c.rows * c.width), residual.read()));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Streams,
                         ::testing::Values(Case{4, 20, 4096, 3}, Case{4, 20, 128, 1}, Case{4, 1, 1028, 70},
                                           Case{1, 20, 64, 2}, Case{2, 3, 36, 5}, Case{5, 20, 4100, 2},
                                           Case{6, 4, 64, 3}, Case{16, 20, 260, 9}));

}  // namespace
}  // namespace sharpi::cuda
