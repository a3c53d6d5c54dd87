// Measures decode's products on the GPU. Each shape of the reference models runs as a chain of launches in a graph,
// over enough copies of the weights to exceed the second-level cache. Then the products of whole models run in their
// order. "share": relative to the speed at which a kernel that only reads gets through memory on an H200.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "device/stream.h"
#include "kernels/experts/expert_down.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "timing.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

// Filled with a byte that makes every scale small and finite. The values of codes do not change the speed.
struct Buffer {
    explicit Buffer(size_t bytes) {
        require(cudaMalloc(&data, bytes));
        require(cudaMemset(data, 0x21, bytes));
    }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer&) = delete;
    template <typename T> T* as() const { return static_cast<T*>(data); }
    void* data = nullptr;
};

// The memory of one measurement.
class Arena {
public:
    template <typename T> T* take(size_t count) {
        _buffers.push_back(std::make_unique<Buffer>(count * sizeof(T)));
        return _buffers.back()->as<T>();
    }
    Matrix matrix(DType type, int64_t rows, int64_t cols) {
        const size_t bytes = packedBytes(type, rows, cols);
        weightBytes += bytes;
        return {type, rows, cols, take<uint8_t>(bytes)};
    }
    ExpertStack experts(DType type, int64_t rows, int64_t cols, int32_t count) {
        const size_t bytes = packedBytes(type, rows, cols);
        return {{type, rows, cols, take<uint8_t>(bytes * static_cast<size_t>(count))}, bytes, count};
    }
    MatvecInput input(int64_t rows, int64_t cols) {
        MatvecInput in;
        in.floats = take<float>(static_cast<size_t>(rows * cols));
        in.quantized = quantizedRowsOver(take<uint8_t>(quantizedRowsBytes(rows, cols)), rows, cols);
        in.quantized.wide.written = in.quantized.wide.codes != nullptr;  // as the engine's come
        return in;
    }
    RowOutputs output(int64_t rows, int64_t cols) {
        RowOutputs out;
        out.quantized = quantizedRowsOver(take<uint8_t>(quantizedRowsBytes(rows, cols)), rows, cols);
        return out;
    }
    size_t weightBytes = 0;

private:
    std::vector<std::unique_ptr<Buffer>> _buffers;
};

void print(const std::string& name, const char* type, int rows, double seconds, size_t bytes) {
    const double rate = static_cast<double>(bytes) / seconds;
    std::printf("%-34s %-6s %4d %9.2f %8.0f %7.1f %%\n", name.c_str(), type, rows, seconds * 1e6, rate / 1e9,
                100 * rate / kReadBytesPerSecond);
    std::fflush(stdout);
}

// Measures one kind of launch over copies of its weights. make(arena, copy) allocates a copy's weights and returns its
// launch. bytes: what a launch reads; 0: what the arena counted.
using Launch = std::function<void()>;
void measureShape(Stream& stream, const std::string& name, DType type, int rows, size_t bytes,
                  const std::function<Launch(Arena&)>& make) {
    Arena arena;
    std::vector<Launch> launches;
    do {
        launches.push_back(make(arena));
    } while ((bytes ? bytes * launches.size() : arena.weightBytes) < kBeyondCache && launches.size() < 400);
    if (bytes == 0) bytes = arena.weightBytes / launches.size();
    const double seconds = measure(stream, [&] {
        for (const Launch& launch : launches) launch();
    });
    print(name, info(type).name, rows, seconds / static_cast<double>(launches.size()), bytes);
}

struct Shape {
    const char* name;
    std::vector<int64_t> outputs;
    int64_t cols;
    enum { Plain, Add, Gated } kind;
    DType type;
};

void measureDense(Stream& stream, const Shape& shape, int rows) {
    std::string name = shape.name;
    for (size_t i = 0; i < shape.outputs.size(); ++i) name += (i ? "+" : " ") + std::to_string(shape.outputs[i]);
    name += " x " + std::to_string(shape.cols);
    measureShape(stream, name, shape.type, rows, 0, [&](Arena& arena) -> Launch {
        const MatvecInput x = arena.input(rows, shape.cols);
        if (shape.kind == Shape::Gated) {
            const Matrix gate = arena.matrix(shape.type, shape.outputs[0], shape.cols),
                         up = arena.matrix(shape.type, shape.outputs[0], shape.cols);
            const RowOutputs out = arena.output(rows, shape.outputs[0]);
            return [=, &stream] { matvecGated(stream, x, rows, gate, up, out); };
        }
        std::vector<MatvecOutput> outputs;
        for (const int64_t count : shape.outputs)
            outputs.push_back({arena.matrix(shape.type, count, shape.cols), nullptr,
                               arena.take<float>(static_cast<size_t>(rows * count))});
        if (shape.kind == Shape::Add)
            return [=, &stream] { matvecAdd(stream, x, rows, outputs[0].w, nullptr, outputs[0].y); };
        return [=, &stream] { matvec(stream, x, rows, outputs); };
    });
}

// 8 of 128 experts of 2048 -> 768 -> 2048, others each time.
void measureExperts(Stream& stream, int rows) {
    const int32_t used = 8, count = 128;
    const int64_t width = 2048, hidden = 768;
    Arena shared;
    const ExpertStack gate = shared.experts(DType::Q4_K, hidden, width, count),
                      up = shared.experts(DType::Q4_K, hidden, width, count);
    const ExpertStack down4 = shared.experts(DType::Q4_K, width, hidden, count),
                      down6 = shared.experts(DType::Q6_K, width, hidden, count);
    const MatvecInput x = shared.input(rows, width), y = shared.input(rows * used, hidden);
    const RowOutputs out = shared.output(rows * used, hidden);
    float* weight = shared.take<float>(static_cast<size_t>(rows * used));
    float* residual = shared.take<float>(static_cast<size_t>(rows * width));
    int turn = 0;
    const auto chosen = [&](Arena& arena) {
        std::vector<int32_t> host(static_cast<size_t>(rows * used));
        for (int32_t& e : host) e = turn++ * 37 % count;
        int32_t* device = arena.take<int32_t>(host.size());
        require(cudaMemcpy(device, host.data(), host.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
        return device;
    };
    const size_t pairs = static_cast<size_t>(rows * used);
    measureShape(stream, "experts' gate, up 768 x 2048", DType::Q4_K, rows, 2 * pairs * gate.stride,
                 [&](Arena& arena) -> Launch {
                     const int32_t* experts = chosen(arena);
                     return [=, &stream] { expertGated(stream, x, rows, gate, up, experts, used, out); };
                 });
    for (const ExpertStack& down : {down4, down6})
        measureShape(stream, "experts' down 2048 x 768", down.first.type, rows, pairs * down.stride,
                     [&](Arena& arena) -> Launch {
                         const int32_t* experts = chosen(arena);
                         return [=, &stream] { expertDownAdd(stream, y, rows, down, experts, weight, used, residual); };
                     });
    // A router.
    measureShape(stream, "router 128 x 2048", DType::F32, rows, 0, [&](Arena& arena) -> Launch {
        const MatvecOutput output{arena.matrix(DType::F32, 128, width), nullptr,
                                  arena.take<float>(static_cast<size_t>(rows * 128))};
        return [=, &stream] { matvec(stream, x, rows, {output}); };
    });
}

// All products of a token in their order, without the kernels between them.
void measureModel(Stream& stream, const char* name, int layers, int64_t width, int64_t kv, int64_t hidden,
                  int64_t vocab, int rows) {
    Arena arena;
    const MatvecInput x = arena.input(rows, width);
    const MatvecInput inner = arena.input(rows, hidden);
    RowOutputs out;
    out.quantized = inner.quantized;
    float* y = arena.take<float>(static_cast<size_t>(rows * (vocab + 3 * width)));
    std::vector<Launch> launches;
    for (int l = 0; l < layers; ++l) {
        // Half the layers of a Q4_K_M file have value and down in Q6_K.
        const DType large = l % 2 ? DType::Q6_K : DType::Q4_K;
        const std::vector<MatvecOutput> qkv = {{arena.matrix(DType::Q4_K, width, width), nullptr, y},
                                               {arena.matrix(DType::Q4_K, kv, width), nullptr, y + rows * width},
                                               {arena.matrix(large, kv, width), nullptr, y + 2 * rows * width}};
        const Matrix o = arena.matrix(DType::Q4_K, width, width), gate = arena.matrix(DType::Q4_K, hidden, width);
        const Matrix up = arena.matrix(DType::Q4_K, hidden, width), down = arena.matrix(large, width, hidden);
        launches.push_back([=, &stream] {
            matvec(stream, x, rows, qkv);
            matvecAdd(stream, x, rows, o, nullptr, y);
            matvecGated(stream, x, rows, gate, up, out);
            matvecAdd(stream, inner, rows, down, nullptr, y);
        });
    }
    const Matrix head = arena.matrix(DType::Q6_K, vocab, width);
    const double seconds = measure(stream, [&] {
        for (const Launch& launch : launches) launch();
        matvec(stream, x, rows, {{head, nullptr, y}});
    });
    print(std::string(name) + ", all products", "mixed", rows, seconds, arena.weightBytes);
}

// The products of an 8B model by the rows of a step.
void measureRows(Stream& stream, const std::vector<int>& counts) {
    for (const Shape& shape : std::vector<Shape>{{"q, k", {4096, 1024}, 4096, Shape::Plain, DType::Q4_K},
                                                 {"o", {4096}, 4096, Shape::Add, DType::Q4_K},
                                                 {"gate, up", {12288}, 4096, Shape::Gated, DType::Q4_K},
                                                 {"down", {4096}, 12288, Shape::Add, DType::Q4_K},
                                                 {"down", {4096}, 12288, Shape::Add, DType::Q6_K},
                                                 {"head", {151936}, 4096, Shape::Plain, DType::Q6_K}})
        for (const int rows : counts) measureDense(stream, shape, rows);
    for (const int rows : counts) measureModel(stream, "qwen3-8b", 36, 4096, 1024, 12288, 151936, rows);
}

void printHeader(const Stream& stream) {
    std::printf("%s, %d multiprocessors\n\n%-34s %-6s %4s %9s %8s %9s\n", stream.device().name.c_str(),
                stream.device().multiprocessors, "shape", "type", "rows", "us", "GB/s", "share");
}

void measureAll(Stream& stream) {
    const std::vector<Shape> shapes = {
        {"q, k, v", {4096, 1024, 1024}, 4096, Shape::Plain, DType::Q4_K},
        {"o", {4096}, 4096, Shape::Add, DType::Q4_K},
        {"gate, up", {12288}, 4096, Shape::Gated, DType::Q4_K},
        {"down", {4096}, 12288, Shape::Add, DType::Q4_K},
        {"down", {4096}, 12288, Shape::Add, DType::Q6_K},
        {"head", {151936}, 4096, Shape::Plain, DType::Q6_K},
        {"q, k, v", {2048, 2048, 2048}, 2048, Shape::Plain, DType::Q4_K},
        {"o", {2048}, 2048, Shape::Add, DType::Q4_K},
        {"gate, up", {8192}, 2048, Shape::Gated, DType::Q4_K},
        {"down", {2048}, 8192, Shape::Add, DType::Q4_K},
        {"down", {2048}, 8192, Shape::Add, DType::Q6_K},
        {"head", {49152}, 2048, Shape::Plain, DType::Q6_K},
    };
    for (const Shape& shape : shapes) measureDense(stream, shape, 1);
    measureExperts(stream, 1);
    for (const int rows : {2, 4, 8}) {
        measureDense(stream, shapes[2], rows);
        measureDense(stream, shapes[4], rows);
    }
    measureExperts(stream, 4);
    for (const DType type :
         {DType::Q4_0,    DType::Q4_1,   DType::Q5_0,   DType::Q5_1,  DType::Q8_0,    DType::Q2_K,   DType::Q3_K,
          DType::Q5_K,    DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4, DType::IQ2_XXS, DType::IQ2_XS, DType::IQ2_S,
          DType::IQ3_XXS, DType::IQ3_S,  DType::IQ1_S,  DType::IQ1_M, DType::TQ1_0,   DType::TQ2_0,  DType::NVFP4,
          DType::Q1_0,    DType::F32,    DType::F16,    DType::BF16})
        measureDense(stream, {"any", {16384}, 4096, Shape::Plain, type}, 1);
    for (const int rows : {1, 4, 8}) measureModel(stream, "qwen3-8b", 36, 4096, 1024, 12288, 151936, rows);
    measureModel(stream, "smollm2-1.7b", 24, 2048, 2048, 8192, 49152, 1);
}

}  // namespace

// The argument "rows" measures the products of an 8B model for 1 to 64 rows, and nothing else. Numbers after it choose
// the rows.
int main(int count, char** arguments) {
    try {
        Stream stream(findDevice(0));
        printHeader(stream);
        if (count == 1 || std::string(arguments[1]) != "rows") {
            measureAll(stream);
            return 0;
        }
        std::vector<int> counts;
        for (int i = 2; i < count; ++i) counts.push_back(std::stoi(arguments[i]));
        measureRows(stream, counts.empty() ? std::vector<int>{1, 2, 4, 8, 9, 16, 32, 64} : counts);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
