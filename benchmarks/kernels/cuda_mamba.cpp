// Measures Mamba 2 on the GPU at the shapes of nemotron-3-nano-30b and granite-4-h-small: a layer's step for some
// sequences with a row each, with and without the norm after it, and prompts, whose scan is measured row after row and
// in chunks on tensor cores. It takes no arguments. A step's layers
// follow each other in one graph, with states in more memory than the second-level cache holds. "of copy": of the rate
// at which the device copies a large array, read and written bytes counted.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/delta/mamba.h"
#include "timing.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

std::mt19937 generator(1);

template <typename T> T* onDevice(const std::vector<T>& values) {
    T* data = nullptr;
    require(cudaMalloc(reinterpret_cast<void**>(&data), values.size() * sizeof(T)));
    require(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return data;
}

std::vector<float> randomFloats(int64_t count, float scale) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(generator);
    return values;
}

// Copies within the device, in bytes a second, both ways counted.
double copyRate(Stream& stream) {
    constexpr size_t kBytes = size_t{1} << 30;
    uint8_t* data = nullptr;
    require(cudaMalloc(reinterpret_cast<void**>(&data), 2 * kBytes));
    const double seconds = measure(stream, [&] {
        require(cudaMemcpyAsync(data, data + kBytes, kBytes, cudaMemcpyDeviceToDevice, stream.handle()));
    });
    require(cudaFree(data));
    return 2.0 * static_cast<double>(kBytes) / seconds;
}

// A layer's weights and rows, and states for many layers.
struct Layer {
    MambaShape shape;
    MambaParameters parameters;
    MambaInputs in;
    DeltaStates states;
    float* out = nullptr;
    void* scratch = nullptr;

    Layer(const MambaShape& s, int64_t rows, int64_t entries) : shape(s) {
        std::vector<float> rate = randomFloats(s.heads, 0.5f);
        for (float& r : rate) r = -std::exp(r - 1.0f);
        parameters = {onDevice(randomFloats(s.convWidth * s.channels(), 0.5f)),
                      onDevice(randomFloats(s.channels(), 1)),
                      onDevice(randomFloats(s.heads, 1)),
                      onDevice(rate),
                      onDevice(randomFloats(s.heads, 1)),
                      onDevice(randomFloats(s.width(), 1)),
                      1e-5f};
        in = {onDevice(randomFloats(rows * s.channels(), 1)), onDevice(randomFloats(rows * s.width(), 1)),
              onDevice(randomFloats(rows * s.heads, 1)), onDevice(randomFloats(rows * s.heads, 1))};
        out = onDevice(randomFloats(rows * s.width(), 1));
        const size_t conv = sizeof(float) * static_cast<size_t>(entries * s.convFloats()),
                     matrix = sizeof(float) * static_cast<size_t>(entries * s.matrixFloats());
        require(cudaMalloc(reinterpret_cast<void**>(&states.conv), conv));
        require(cudaMemset(states.conv, 0, conv));
        require(cudaMalloc(reinterpret_cast<void**>(&states.matrix), matrix));
        require(cudaMemset(states.matrix, 0, matrix));
        scratch = onDevice(std::vector<uint8_t>(stepMambaBytes(64, s), 0));
    }
    ~Layer() {
        for (const void* p : {static_cast<const void*>(parameters.conv), static_cast<const void*>(in.mixed),
                              static_cast<const void*>(in.gate), static_cast<const void*>(states.conv),
                              static_cast<const void*>(states.matrix), static_cast<const void*>(out)})
            cudaFree(const_cast<void*>(p));
    }
    Layer(const Layer&) = delete;
    Layer& operator=(const Layer&) = delete;
};

// `rows` rows of each sequence, from one entry to another.
DeltaBatch batchOf(int64_t sequences, int64_t rows) {
    std::vector<int32_t> from, to, begin, end;
    for (int64_t s = 0; s < sequences; ++s) {
        begin.push_back(static_cast<int32_t>(s * rows));
        end.push_back(static_cast<int32_t>((s + 1) * rows));
        for (int64_t t = 0; t < rows; ++t) {
            from.push_back(t == 0 ? static_cast<int32_t>(2 * s) : kStateIsOfRowBefore);
            to.push_back(t + 1 == rows ? static_cast<int32_t>(2 * s + 1) : -1);
        }
    }
    return {sequences * rows, onDevice(from), onDevice(to), {onDevice(begin), onDevice(end), sequences}};
}

void steps(Stream& stream, const char* name, const MambaShape& shape, int64_t sequences, int64_t rows, double copy) {
    const double bytes = 8.0 * static_cast<double>(sequences * (shape.matrixFloats() + shape.convFloats()));
    const auto layers = std::max<int64_t>(8, static_cast<int64_t>(static_cast<double>(kBeyondCache) / bytes));
    const Layer layer(shape, sequences * rows, 2 * sequences * layers);
    const DeltaBatch batch = batchOf(sequences, rows);
    const auto seconds = [&](bool norms) {
        return measure(stream,
                       [&] {
                           for (int64_t i = 0; i < layers; ++i) {
                               const DeltaStates states = {
                                   layer.states.conv + 2 * sequences * i * shape.convFloats(),
                                   layer.states.matrix + 2 * sequences * i * shape.matrixFloats()};
                               stepMamba(stream, layer.in, layer.parameters, shape, states, batch, layer.scratch);
                               if (norms)
                                   normMamba(stream, layer.in.gate, layer.parameters, shape, batch.rows,
                                             {layer.out, {}, {}});
                           }
                       }) /
               static_cast<double>(layers);
    };
    const double step = seconds(false), all = seconds(true);
    std::printf("%-18s %2d sequences, %d rows: %7.2f us, %6.0f GB/s, %5.1f %% of copy; with norm %7.2f us\n", name,
                static_cast<int>(sequences), static_cast<int>(rows), step * 1e6, bytes / step / 1e9,
                100 * bytes / step / copy, all * 1e6);
    std::fflush(stdout);
}

// Rows cut into tiles of kDeltaChunk.
RowRanges tilesOf(int64_t sequences, int64_t rows) {
    std::vector<int32_t> begin, end;
    for (int64_t s = 0; s < sequences; ++s) {
        for (int64_t t = 0; t < rows; t += kDeltaChunk) {
            begin.push_back(static_cast<int32_t>(s * rows + t));
            end.push_back(static_cast<int32_t>(s * rows + std::min(rows, t + kDeltaChunk)));
        }
    }
    return {onDevice(begin), onDevice(end), static_cast<int64_t>(begin.size())};
}

void prompt(Stream& stream, const char* name, const MambaShape& shape, int64_t sequences, int64_t rows) {
    const Layer layer(shape, sequences * rows, 2 * sequences);
    const DeltaBatch batch = batchOf(sequences, rows);
    void* windows = nullptr;
    require(cudaMalloc(&windows, mambaWindowBytes(batch.rows, sequences, shape)));
    const double convolution = measure(
        stream, [&] { prepareMamba(stream, layer.in, layer.parameters, shape, layer.states, batch, rows, windows); });
    const double scan =
        measure(stream, [&] { scanMamba(stream, layer.in, layer.parameters, shape, layer.states, batch); });
    const RowRanges tiles = tilesOf(sequences, rows);
    void* chunks = nullptr;
    require(cudaMalloc(&chunks, mambaChunkBytes(batch.rows, tiles.count, shape)));
    const double inChunks = measure(stream, [&] {
        scanMambaInChunks(stream, layer.in, layer.parameters, shape, layer.states, batch, tiles, chunks);
    });
    const double norm = measure(
        stream, [&] { normMamba(stream, layer.in.gate, layer.parameters, shape, batch.rows, {layer.out, {}, {}}); });
    std::printf("%-18s %2d prompts of %5d: convolution %8.1f us, scan %8.1f us, in chunks %8.1f us, norm %8.1f us\n",
                name, static_cast<int>(sequences), static_cast<int>(rows), convolution * 1e6, scan * 1e6,
                inChunks * 1e6, norm * 1e6);
    std::fflush(stdout);
    for (void* p : {windows, chunks, const_cast<void*>(static_cast<const void*>(tiles.begin)),
                    const_cast<void*>(static_cast<const void*>(tiles.end))})
        require(cudaFree(p));
}

}  // namespace

int main() {
    Stream stream(findDevice(0));
    const double copy = copyRate(stream);
    std::printf("%s, copies %.0f GB/s\n", stream.device().name.c_str(), copy / 1e9);
    const struct {
        const char* name;
        MambaShape shape;
    } models[] = {{"nemotron-3-nano", {64, 8, 64, 128, 4}}, {"granite-4-h-small", {128, 1, 64, 128, 4}}};
    for (const auto& [name, shape] : models) {
        for (const int64_t sequences : {1, 2, 4, 8, 16, 64}) steps(stream, name, shape, sequences, 1, copy);
        for (const int64_t rows : {4, 8}) steps(stream, name, shape, 1, rows, copy);
        prompt(stream, name, shape, 1, 2048);
        prompt(stream, name, shape, 4, 512);
        prompt(stream, name, shape, 1, 512);
    }
    return 0;
}
