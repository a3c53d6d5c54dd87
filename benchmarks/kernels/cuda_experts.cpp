// Measures a layer of experts at several numbers of rows on the GPU: each pair of a row and an expert alone, and
// grouped by expert, for shapes of known models. The time is that of gate and up, down and the weighted sum, and of the
// grouping itself. "experts" are those that the rows chose; GB/s counts each of them once.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "device/stream.h"
#include "kernels/experts/expert_down.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "kernels/rows/pair_groups.h"
#include "timing.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

constexpr int kLayers = 8;  // launched one after the other, each with its own choice

class Memory {
public:
    // Filled with a byte that makes every scale small and finite. The values of codes do not change the speed.
    template <typename T> T* take(size_t count) {
        void* data = nullptr;
        require(cudaMalloc(&data, count * sizeof(T)));
        _taken.emplace_back(data, &cudaFree);
        require(cudaMemset(data, 0x21, count * sizeof(T)));
        return static_cast<T*>(data);
    }
    QuantizedRows rows(int64_t rows, int64_t cols) {
        return quantizedRowsOver(take<uint8_t>(quantizedRowsBytes(rows, cols)), rows, cols);
    }

private:
    std::vector<std::unique_ptr<void, cudaError_t (*)(void*)>> _taken;
};

struct Model {
    const char* name;
    int64_t width, hidden;
    int32_t used, experts;
    DType type, downType;
    Activation activation;
    bool biased;
};

// Distinct experts for each row. skew 0: all alike; else the first ones are chosen more often.
std::vector<int32_t> choose(const Model& m, int rows, double skew, std::mt19937& random) {
    std::vector<int32_t> chosen;
    std::vector<double> key(static_cast<size_t>(m.experts));
    std::vector<int32_t> order(key.size());
    std::exponential_distribution<double> draw;
    for (int t = 0; t < rows; ++t) {
        for (size_t e = 0; e < key.size(); ++e) key[e] = draw(random) * std::pow(1.0 + static_cast<double>(e), skew);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](int32_t a, int32_t b) { return key[static_cast<size_t>(a)] < key[static_cast<size_t>(b)]; });
        chosen.insert(chosen.end(), order.begin(), order.begin() + m.used);
    }
    return chosen;
}

// A model's weights, enough of them to exceed the second-level cache, and the buffers of 64 rows.
class Bench {
public:
    Bench(Stream& stream, const Model& model)
        : _stream(stream),
          _m(model),
          _gate(stack(model.type, model.hidden, model.width)),
          _up(stack(model.type, model.hidden, model.width)),
          _down(stack(model.downType, model.width, model.hidden)) {}

    void run(int rows, double skew) {
        std::vector<const int32_t*> chosen;
        size_t distinct = 0;
        for (int l = 0; l < kLayers; ++l) {
            const std::vector<int32_t> host = choose(_m, rows, skew, _random);
            distinct += std::set<int32_t>(host.begin(), host.end()).size();
            int32_t* device = _memory.take<int32_t>(host.size());
            require(cudaMemcpy(device, host.data(), host.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
            chosen.push_back(device);
        }
        const double alone = measure(_stream, [&] { layers(rows, chosen, false); }) / kLayers,
                     grouped = measure(_stream, [&] { layers(rows, chosen, true); }) / kLayers;
        const double experts = static_cast<double>(distinct) / kLayers,
                     bytes = experts * static_cast<double>(_gate.stride + _up.stride + _down.stride);
        std::printf("%-14s %5d %5.1f %8.1f %10.1f %10.1f %8.0f\n", _m.name, rows, skew, experts, alone * 1e6,
                    grouped * 1e6, bytes / grouped / 1e9);
        std::fflush(stdout);
    }

private:
    static constexpr int64_t kRows = 64;

    ExpertStack stack(DType type, int64_t rows, int64_t cols) {
        const size_t bytes = packedBytes(type, rows, cols);
        return {{type, rows, cols, _memory.take<uint8_t>(bytes * static_cast<size_t>(_m.experts))}, bytes, _m.experts};
    }
    void layers(int rows, const std::vector<const int32_t*>& chosen, bool groups) {
        for (const int32_t* choice : chosen) {
            PairGroups made;
            if (groups) made = groupPairs(_stream, choice, int64_t{rows} * _m.used, _m.experts, _m.experts, _groups);
            GatedJoin join{_m.activation};
            if (_m.biased) join.gateBias = join.upBias = _bias, join.expert = choice;
            RowOutputs out;
            out.quantized = _hidden;
            expertGated(_stream, {nullptr, _x}, rows, _gate, _up, choice, _m.used, out, join, made);
            expertDownAdd(_stream, {nullptr, _hidden}, rows, _down, choice, _weight, _m.used, _residual, {},
                          {_m.biased ? _bias : nullptr}, made, _answers);
        }
    }

    Stream& _stream;
    const Model _m;
    Memory _memory;
    std::mt19937 _random{1};
    const ExpertStack _gate, _up, _down;
    const int64_t _pairs = kRows * _m.used;
    const QuantizedRows _x = _memory.rows(kRows, _m.width), _hidden = _memory.rows(_pairs, _m.hidden);
    uint8_t* const _groups = _memory.take<uint8_t>(pairGroupsBytes(_pairs, _m.experts));
    float* const _answers = _memory.take<float>(static_cast<size_t>(_pairs * _m.width));
    float* const _weight = _memory.take<float>(static_cast<size_t>(_pairs));
    float* const _residual = _memory.take<float>(static_cast<size_t>(kRows * _m.width));
    float* const _bias = _memory.take<float>(static_cast<size_t>(_m.experts * std::max(_m.width, _m.hidden)));
};

void measureAll(Stream& stream) {
    std::printf("%s, %d multiprocessors; us a layer\n\n%-14s %5s %5s %8s %10s %10s %8s\n", stream.device().name.c_str(),
                stream.device().multiprocessors, "model", "rows", "skew", "experts", "alone", "grouped", "GB/s");
    const Activation clamped{ActivationKind::ClampedSwiglu, 7.0f};
    const std::vector<Model> models = {
        {"qwen3-30b-a3b", 2048, 768, 8, 128, DType::Q4_K, DType::Q6_K, {}, false},
        {"qwen3.6-35b", 2048, 512, 8, 256, DType::Q4_K, DType::Q6_K, {}, false},
        {"mixtral", 4096, 14336, 2, 8, DType::Q4_K, DType::Q4_K, {}, false},
        {"gpt-oss-20b", 2880, 2880, 4, 32, DType::MXFP4, DType::MXFP4, clamped, true},
    };
    for (const Model& model : models) {
        Bench bench(stream, model);
        for (const double skew : {0.0, 0.7})
            for (const int rows : {1, 2, 4, 8, 16, 32, 64}) bench.run(rows, skew);
    }
}

}  // namespace

int main() {
    try {
        Stream stream(findDevice(0));
        measureAll(stream);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
