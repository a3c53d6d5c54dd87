// Single experts that are loaded into slots while the GPU computes. Every type arrives packed as by packRows, and
// nothing next to it changes. A load that counts as finished has arrived. Both hold for pinned and for other memory.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda_memory.h"
#include "gpu_test.h"
#include "kernels/formats/packed.h"
#include "memory/allocator.h"
#include "reference_matmul.h"
#include "transfers/cuda_expert_loads.h"

namespace sharpi::cuda {
namespace {

// Host memory in whole pages, which it shares with nothing else.
class Pages {
public:
    explicit Pages(const std::vector<uint8_t>& bytes) : _bytes(bytes.size()) {
        void* data = ::mmap(nullptr, _bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        _data = static_cast<uint8_t*>(data);
        std::copy(bytes.begin(), bytes.end(), _data);
    }
    ~Pages() { ::munmap(_data, _bytes); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    const uint8_t* data() const { return _data; }
    size_t bytes() const { return _bytes; }

private:
    uint8_t* _data;
    size_t _bytes;
};

// Sets SHARPI_CUDA_PIN=0 while it lives.
class NoPinning {
public:
    NoPinning() { ::setenv("SHARPI_CUDA_PIN", "0", 1); }
    ~NoPinning() { ::unsetenv("SHARPI_CUDA_PIN"); }
};

// Work in a stream that does not end before it is told to.
struct WaitingStep {
    std::atomic<bool> goesOn{false};
    Stream& stream;

    explicit WaitingStep(Stream& on) : stream(on) {
        const auto wait = [](void* step) {
            while (!static_cast<WaitingStep*>(step)->goesOn) std::this_thread::yield();
        };
        require(cudaLaunchHostFunc(stream.handle(), wait, this));
    }
    ~WaitingStep() {
        goesOn = true;
        stream.synchronize();
    }
};

struct Types {
    DType gate, up, down;
};

std::vector<DType> allTypes() {
    std::vector<DType> types = reference::quantizedTypes();
    types.insert(types.end(), {DType::F32, DType::F16, DType::BF16});
    return types;
}

class CudaExpertLoadsTest : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (IsSkipped()) return;
        _memory = std::make_unique<CudaMemory>(stream());
        _allocator = std::make_unique<Allocator>(*_memory);
    }

    // Layers of experts, one after another in host memory, at addresses that are aligned as badly as a file's. `up` has
    // the shape of `gate`, `down` the transposed shape.
    void makeExperts(const std::vector<Types>& types, int32_t count, int64_t embedding,
                     const std::vector<int64_t>& hidden) {
        std::vector<uint8_t> bytes(100, 0);
        std::vector<std::pair<MatrixStack*, size_t>> places;
        _layers.resize(types.size());
        for (size_t l = 0; l < types.size(); ++l) {
            const int64_t width = hidden[l % hidden.size()];
            const auto add = [&](MatrixStack& stack, DType type, int64_t rows, int64_t cols) {
                stack = {{type, rows, cols, nullptr}, rowBytes(type, cols) * static_cast<size_t>(rows), count};
                bytes.resize((bytes.size() + 31) / 32 * 32 + 4 * (random()() % 2));
                places.emplace_back(&stack, bytes.size());
                for (int32_t e = 0; e < count; ++e) {
                    const std::vector<uint8_t> weights = someWeights(type, rows, cols);
                    bytes.insert(bytes.end(), weights.begin(), weights.end());
                }
            };
            add(_layers[l].gate, types[l].gate, width, embedding);
            add(_layers[l].up, types[l].up, width, embedding);
            add(_layers[l].down, types[l].down, embedding, width);
        }
        _file = std::make_unique<Pages>(bytes);
        for (const auto& [stack, at] : places) stack->first.data = _file->data() + at;
        for (const ExpertStacks& layer : _layers)
            for (int32_t e = 0; e < count; ++e) addExpert(layer, e);
        pack();
    }

    std::vector<uint8_t> someWeights(DType type, int64_t rows, int64_t cols) {
        if (!info(type).isFloat) return reference::randomWeights(type, rows, cols, reference::Fill::Random, random());
        std::vector<uint8_t> bytes(rowBytes(type, cols) * static_cast<size_t>(rows));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random()());
        return bytes;
    }

    void addExpert(const ExpertStacks& layer, int32_t expert) {
        Expert added;
        added.at = _bytes;
        added.file = {layer.gate.at(expert), layer.up.at(expert), layer.down.at(expert)};
        for (const Matrix& file : added.file)
            added.bytes += Allocator::aligned(packedBytes(file.type, file.rows, file.cols));
        _bytes += added.bytes;
        _experts.push_back(added);
    }

    // Every expert as it should arrive, packed from device memory. The bytes between the planes stay poisoned.
    void pack() {
        const DeviceArray<uint8_t> file(std::vector<uint8_t>(_file->data(), _file->data() + _file->bytes())),
            packed(_bytes);
        for (const Expert& expert : _experts)
            for (const StreamPart& part : partsOf(expert, packed.get() + expert.at))
                packRows(stream(), part.to, 0, part.rows, file.get() + (part.file - _file->data()));
        stream().synchronize();
        _expected = packed.read();
    }

    struct Expert {
        std::array<Matrix, 3> file;
        size_t at = 0, bytes = 0;  // its offset among all experts, and its size
    };
    static std::array<StreamPart, 3> partsOf(const Expert& expert, const uint8_t* at) {
        std::array<StreamPart, 3> parts;
        for (size_t i = 0; i < 3; ++i) {
            const Matrix& file = expert.file[i];
            parts[i] = {{file.type, file.rows, file.cols, at}, 0, file.rows, file.data, 0};
            at += Allocator::aligned(packedBytes(file.type, file.rows, file.cols));
        }
        return parts;
    }

    void pinAll(PinnedFiles& files) const {
        HostRanges ranges;
        ranges.always = {{_file->data(), _file->bytes()}};
        files.pin(ranges);
    }
    size_t held(const std::string& name) const {
        for (const Holding& holding : _allocator->holdings())
            if (holding.name == name) return holding.bytes;
        return 0;
    }

    // Loads all of them in random order, as many at once as is allowed.
    void expectAllArrive(const PinnedFiles& files) {
        const DeviceArray<uint8_t> slots(_bytes);
        CudaExpertLoads loads(*_allocator, stream(), files, _layers);
        EXPECT_EQ(held("staging for experts"), expertStaging(_layers).bytes());
        std::vector<Expert> order = _experts;
        std::shuffle(order.begin(), order.end(), random());
        uint64_t number = 0, last = 0;
        EXPECT_EQ(loads.finished(), 0u);
        for (const Expert& expert : order) {
            while (number - loads.finished() >= static_cast<uint64_t>(loads.depth())) std::this_thread::yield();
            ASSERT_EQ(loads.start(partsOf(expert, slots.get() + expert.at)), ++number);
            const uint64_t now = loads.finished();
            ASSERT_GE(now, last);
            ASSERT_LE(now, number);
            last = now;
        }
        loads.settle();
        EXPECT_EQ(loads.finished(), number);
        std::vector<uint8_t> arrived(_bytes);
        Stream(stream().device())
            .download(arrived.data(), slots.get(), _bytes);  // a stream of its own waits for no other
        for (size_t i = 0; i < _experts.size(); ++i) {
            const Expert& expert = _experts[i];
            ASSERT_EQ(std::memcmp(&_expected[expert.at], &arrived[expert.at], expert.bytes), 0)
                << "expert " << i << ": " << info(expert.file[0].type).name << ", " << info(expert.file[1].type).name
                << ", " << info(expert.file[2].type).name;
        }
    }

    std::unique_ptr<CudaMemory> _memory;
    std::unique_ptr<Allocator> _allocator;
    std::vector<ExpertStacks> _layers;
    std::unique_ptr<Pages> _file;
    std::vector<Expert> _experts;
    size_t _bytes = 0;
    std::vector<uint8_t> _expected;
};

// Each type as gate, up and down, beside any other type.
class CudaExpertLoadsOfAllTypes : public CudaExpertLoadsTest {
protected:
    void SetUp() override {
        CudaExpertLoadsTest::SetUp();
        if (IsSkipped()) return;
        std::array<std::vector<DType>, 3> drawn;
        for (std::vector<DType>& types : drawn) {
            types = allTypes();
            std::shuffle(types.begin(), types.end(), random());
        }
        std::vector<Types> layers;
        for (size_t i = 0; i < drawn[0].size(); ++i) layers.push_back({drawn[0][i], drawn[1][i], drawn[2][i]});
        layers.push_back({DType::F32, DType::F16, DType::BF16});
        makeExperts(layers, 5, 512, {256, 768, 1024});
    }
};

TEST_F(CudaExpertLoadsOfAllTypes, ArrivePackedFromPinnedPages) {
    PinnedFiles files(stream().device());
    pinAll(files);
    expectAllArrive(files);
}

TEST_F(CudaExpertLoadsOfAllTypes, ArrivePackedFromAPinnedCopy) {
    const NoPinning refused;
    PinnedFiles files(stream().device());
    pinAll(files);
    ASSERT_FALSE(files.notes().empty());
    expectAllArrive(files);
}

TEST_F(CudaExpertLoadsOfAllTypes, ArrivePackedFromPagesThatNobodyPinned) {
    expectAllArrive(PinnedFiles(stream().device()));
}

// Loads large experts into a few slots that are used again and again. Before reading one, it waits for finished()
// alone.
TEST_F(CudaExpertLoadsTest, WhatHasArrivedIsThere) {
    makeExperts({{DType::Q4_K, DType::Q6_K, DType::Q4_K}, {DType::Q8_0, DType::F16, DType::Q5_K}}, 4, 2048,
                {1024, 1536});
    PinnedFiles files(stream().device());
    pinAll(files);
    const auto places = static_cast<size_t>(expertStaging(_layers).depth);
    ASSERT_GT(places, static_cast<size_t>(expertStaging(_layers).stages)) << "experts wait for a staging buffer";
    size_t largest = 0;
    for (const Expert& expert : _experts) largest = std::max(largest, expert.bytes);
    const DeviceArray<uint8_t> slots(places * largest);
    CudaExpertLoads loads(*_allocator, stream(), files, _layers);
    ASSERT_EQ(static_cast<size_t>(loads.depth()), places);
    Stream reading(stream().device());
    std::vector<uint8_t> arrived(largest);
    std::vector<Expert> started;
    constexpr size_t kLoads = 100;
    for (size_t checked = 0; checked < kLoads;) {
        while (started.size() < kLoads && started.size() - checked < places) {
            const Expert& expert = _experts[random()() % _experts.size()];
            uint8_t* const place = slots.get() + started.size() % places * largest;
            require(cudaMemsetAsync(place, 0xff, largest, reading.handle()));
            reading.synchronize();
            started.push_back(expert);
            ASSERT_EQ(loads.start(partsOf(expert, place)), started.size());
        }
        for (const uint64_t finished = loads.finished(); checked < finished; ++checked) {
            const Expert& expert = started[checked];
            reading.download(arrived.data(), slots.get() + checked % places * largest, expert.bytes);
            ASSERT_EQ(std::memcmp(&_expected[expert.at], arrived.data(), expert.bytes), 0) << "load " << checked + 1;
        }
    }
}

// A step may be waiting for the CPU while experts are loaded, so no part of a load may wait for the step.
TEST_F(CudaExpertLoadsTest, LoadsArriveWhileAStepWaits) {
    makeExperts({{DType::Q4_K, DType::Q6_K, DType::Q5_0}}, 3, 512, {256});
    PinnedFiles files(stream().device());
    pinAll(files);
    const DeviceArray<uint8_t> slots(_bytes);
    CudaExpertLoads loads(*_allocator, stream(), files, _layers);
    WaitingStep step(stream());
    for (const Expert& expert : _experts) loads.start(partsOf(expert, slots.get() + expert.at));
    const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (loads.finished() < _experts.size() && std::chrono::steady_clock::now() < patience) std::this_thread::yield();
    EXPECT_EQ(loads.finished(), _experts.size());
    EXPECT_FALSE(stream().poll()) << "the step should still be waiting";
    step.goesOn = true;
    EXPECT_EQ(slots.read(), _expected);
}

// For example, clearing memory that was just allocated.
TEST_F(CudaExpertLoadsTest, LoadsComeAfterWhatWasBegunBefore) {
    makeExperts({{DType::F32, DType::Q6_K, DType::BF16}}, 3, 512, {256});
    PinnedFiles files(stream().device());
    pinAll(files);
    const DeviceArray<uint8_t> slots(_bytes);
    WaitingStep step(stream());
    require(cudaMemsetAsync(slots.get(), 0xff, _bytes, stream().handle()));
    std::thread later([&step] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        step.goesOn = true;
    });
    CudaExpertLoads loads(*_allocator, stream(), files, _layers);
    for (const Expert& expert : _experts) loads.start(partsOf(expert, slots.get() + expert.at));
    later.join();
    EXPECT_EQ(slots.read(), _expected);
}

TEST_F(CudaExpertLoadsTest, AnExpertThatIsTooLargeIsRefused) {
    makeExperts({{DType::Q4_K, DType::Q4_K, DType::Q4_K}, {DType::Q8_0, DType::Q8_0, DType::Q8_0}}, 1, 512, {256});
    const PinnedFiles files(stream().device());
    const DeviceArray<uint8_t> slots(_bytes);
    CudaExpertLoads loads(*_allocator, stream(), files, {_layers[0]});
    EXPECT_THROW(loads.start(partsOf(_experts[1], slots.get() + _experts[1].at)), Error);
    EXPECT_EQ(loads.finished(), 0u);
    EXPECT_EQ(loads.start(partsOf(_experts[0], slots.get() + _experts[0].at)), 1u);
    loads.settle();
    std::vector<uint8_t> expected = _expected;
    std::fill(expected.begin() + static_cast<std::ptrdiff_t>(_experts[1].at), expected.end(), uint8_t{0xff});
    EXPECT_EQ(slots.read(), expected);
}

TEST_F(CudaExpertLoadsTest, FloatsNeedNoStages) {
    makeExperts({{DType::F32, DType::F16, DType::BF16}}, 7, 512, {256});
    EXPECT_EQ(expertStaging(_layers).bytes(), 0u);
    expectAllArrive(PinnedFiles(stream().device()));
    EXPECT_EQ(_allocator->held(), 0u);
}

}  // namespace
}  // namespace sharpi::cuda
