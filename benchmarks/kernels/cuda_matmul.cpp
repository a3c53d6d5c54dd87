// Measures prefill's matrix products on the GPU by shape: those of Qwen3-8B, SmolLM2-1.7B and Qwen3-30B-A3B for 2,048
// rows, and the experts of the last with 8 of 128 for each row, chosen at random. Then the products of Qwen3-8B and the
// experts for short prompts; with the argument "short", these alone. "of limit": relative to 790 TFLOP/s, which bf16
// products of 8192 x 8192 reach on an H200. The weights take turns in more memory than the second-level cache holds.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/half.h"
#include "kernels/formats/packed.h"
#include "kernels/matmul/matmul.h"
#include "timing.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

constexpr int64_t kRows = 2048;
constexpr int kRuns = 20;
constexpr double kLimit = 790e12;
constexpr size_t kRotation = size_t{256} << 20;

template <typename T> T* onDevice(const std::vector<T>& values) {
    T* data = nullptr;
    require(cudaMalloc(reinterpret_cast<void**>(&data), values.size() * sizeof(T)));
    require(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return data;
}

std::mt19937 generator(1);

// Packed bytes below 0x40: codes vary, and whichever bytes make an f16 scale, it is finite.
uint8_t* randomWeights(size_t bytes) {
    std::vector<uint32_t> words(bytes / 4 + 1);
    for (uint32_t& word : words) word = static_cast<uint32_t>(generator()) & 0x3f3f3f3fu;
    return reinterpret_cast<uint8_t*>(onDevice(words));
}

HalfRows randomRows(int64_t rows, int64_t cols) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
    for (uint16_t& value : values) value = bf16FromFloat(normal(generator));
    return {onDevice(values), nullptr};
}

template <typename Launch> double milliseconds(Stream& stream, const Launch& run) {
    cudaEvent_t begin, end;
    require(cudaEventCreate(&begin));
    require(cudaEventCreate(&end));
    for (int i = 0; i < 3; ++i) run(i);
    require(cudaEventRecord(begin, stream.handle()));
    for (int i = 0; i < kRuns; ++i) run(i);
    require(cudaEventRecord(end, stream.handle()));
    require(cudaEventSynchronize(end));
    float time = 0;
    require(cudaEventElapsedTime(&time, begin, end));
    require(cudaEventDestroy(begin));
    require(cudaEventDestroy(end));
    return time / kRuns;
}

void report(const char* name, DType type, int64_t outputs, int64_t cols, int64_t rows, double ms) {
    const double speed =
        2.0 * static_cast<double>(outputs) * static_cast<double>(cols) * static_cast<double>(rows) / (ms * 1e-3);
    std::printf("%-28s %-5s %6d x %5d  %5d rows  %8.4f ms  %6.1f TFLOP/s  %5.1f %% of limit\n", name, info(type).name,
                static_cast<int>(outputs), static_cast<int>(cols), static_cast<int>(rows), ms, speed / 1e12,
                100 * speed / kLimit);
    std::fflush(stdout);
}

void dense(Stream& stream, const char* name, DType type, int64_t outputs, int64_t cols,
           const std::vector<int64_t>& eachRows = {kRows}) {
    const size_t bytes = packedBytes(type, outputs, cols), copies = kRotation / bytes + 1;
    uint8_t* weights = randomWeights(bytes * copies);
    for (const int64_t rows : eachRows) {
        const HalfRows x = randomRows(rows, cols);
        float* y = onDevice(std::vector<float>(static_cast<size_t>(rows * outputs)));
        const double ms = milliseconds(stream, [&](int run) {
            const Matrix w{type, outputs, cols, weights + bytes * (static_cast<size_t>(run) % copies)};
            matmul(stream, w, x, rows, nullptr, y, Store::Write);
        });
        report(name, type, outputs, cols, rows, ms);
        require(cudaFree(x.hi));
        require(cudaFree(y));
    }
    require(cudaFree(weights));
}

// Each row goes to `used` different experts.
ExpertGroups randomGroups(const DeviceInfo& device, int64_t rows, int experts, int used) {
    std::vector<std::vector<int32_t>> tokens(static_cast<size_t>(experts));
    std::vector<int> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    for (int32_t t = 0; t < rows; ++t) {
        std::shuffle(order.begin(), order.end(), generator);
        for (int i = 0; i < used; ++i) tokens[static_cast<size_t>(order[static_cast<size_t>(i)])].push_back(t);
    }
    std::vector<int32_t> begin{0}, pairToken, tileExpert, tileBegin;
    ExpertGroups groups;
    groups.tilePairs = expertTilePairs(device);
    for (int e = 0; e < experts; ++e) {
        const std::vector<int32_t>& mine = tokens[static_cast<size_t>(e)];
        pairToken.insert(pairToken.end(), mine.begin(), mine.end());
        begin.push_back(static_cast<int32_t>(pairToken.size()));
        for (int32_t p = begin[static_cast<size_t>(e)]; p < begin.back(); p += groups.tilePairs)
            tileExpert.push_back(e), tileBegin.push_back(p);
    }
    groups.pairs = static_cast<int64_t>(pairToken.size());
    groups.tiles = maxExpertTiles(groups.pairs, experts);
    tileExpert.resize(static_cast<size_t>(groups.tiles), -1);
    tileBegin.resize(static_cast<size_t>(groups.tiles), -1);
    groups.begin = onDevice(begin);
    groups.pairToken = onDevice(pairToken);
    groups.tileExpert = onDevice(tileExpert);
    groups.tileBegin = onDevice(tileBegin);
    return groups;
}

void expertProducts(Stream& stream, const char* name, DType type, int64_t outputs, int64_t cols, bool gather,
                    int64_t rows = kRows) {
    constexpr int kExperts = 128, kUsed = 8;
    const ExpertGroups groups = randomGroups(stream.device(), rows, kExperts, kUsed);
    const size_t bytes = packedBytes(type, outputs, cols);
    uint8_t* weights = randomWeights(bytes * kExperts);
    const HalfRows x = randomRows(gather ? rows : groups.pairs, cols);
    float* y = onDevice(std::vector<float>(static_cast<size_t>(groups.pairs * outputs)));
    const double ms = milliseconds(stream, [&](int) {
        matmulExperts(stream, {{type, outputs, cols, weights}, bytes, kExperts}, x, groups, gather, y);
    });
    report(name, type, outputs, cols, groups.pairs, ms);
    require(cudaFree(weights));
    require(cudaFree(x.hi));
    require(cudaFree(y));
}

void shortPrompts(Stream& stream) {
    const std::vector<int64_t> rows = {1, 16, 17, 64, 65, 128, 129, 192, 256, 257, 384, 512, 1024};
    for (const DType type : {DType::Q4_K, DType::Q6_K}) {
        dense(stream, "qwen3-8b q, o", type, 4096, 4096, rows);
        dense(stream, "qwen3-8b k, v", type, 1024, 4096, rows);
        dense(stream, "qwen3-8b gate, up", type, 12288, 4096, rows);
        dense(stream, "qwen3-8b down", type, 4096, 12288, rows);
    }
    for (const int64_t few : {1, 8, 64, 128, 256, 512, 1024}) {
        expertProducts(stream, "qwen3-30b-a3b gate, up", DType::Q4_K, 768, 2048, true, few);
        expertProducts(stream, "qwen3-30b-a3b down", DType::Q6_K, 2048, 768, false, few);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Stream stream(findDevice(0));
    std::printf("%s\n", stream.device().name.c_str());
    if (argc > 1 && std::strcmp(argv[1], "short") == 0) {
        shortPrompts(stream);
        return 0;
    }
    for (const DType type : {DType::Q4_K, DType::Q6_K}) {
        dense(stream, "qwen3-8b q, o", type, 4096, 4096);
        dense(stream, "qwen3-8b k, v", type, 1024, 4096);
        dense(stream, "qwen3-8b gate, up", type, 12288, 4096);
        dense(stream, "qwen3-8b down", type, 4096, 12288);
        dense(stream, "smollm2-1.7b q, k, v, o", type, 2048, 2048);
        dense(stream, "smollm2-1.7b gate, up", type, 8192, 2048);
        dense(stream, "smollm2-1.7b down", type, 2048, 8192);
        dense(stream, "qwen3-30b-a3b q", type, 4096, 2048);
        dense(stream, "qwen3-30b-a3b k, v", type, 512, 2048);
        dense(stream, "qwen3-30b-a3b o", type, 2048, 4096);
        expertProducts(stream, "qwen3-30b-a3b gate, up", type, 768, 2048, true);
        expertProducts(stream, "qwen3-30b-a3b down", type, 2048, 768, false);
    }
    for (const DType type :
         {DType::Q8_0, DType::Q5_K, DType::Q3_K, DType::Q2_K, DType::IQ4_XS, DType::MXFP4, DType::IQ2_XXS,
          DType::IQ3_XXS, DType::IQ3_S, DType::IQ1_M, DType::NVFP4, DType::BF16, DType::F16, DType::F32})
        dense(stream, "other types", type, 4096, 4096);
    shortPrompts(stream);
    return 0;
}
