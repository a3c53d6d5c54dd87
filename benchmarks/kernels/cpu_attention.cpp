// Measures attention's kernel on one thread, by instruction set, element type and shape:
//   cpu_attention [isa]              all but scalar without an argument
// "GB/s": bytes of keys and values a second of one row, in shuffled pages too large for any cache: decode. "GFLOP/s":
// 4 * keys * headDim * heads a second of the last 128 of 8,192 rows: a prompt.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "core/half.h"
#include "cpu/kernels.h"
#include "cpu_timing.h"

using namespace sharpi;
using namespace sharpi::cpu;

namespace {

constexpr int64_t kCacheBytes = int64_t{256} << 20, kPromptTokens = 8192, kRows = 128;
constexpr int32_t kPageTokens = 64;

struct Shape {
    KvType type;
    const char* name;
    int32_t heads, kvHeads, headDim;
};

// All KV heads, one after another.
double timeOf(const Kernels& table, const AttentionArgs& args, int64_t rows, void* scratch) {
    return bestTime(0.5, [&] {
        for (int32_t head = 0; head < args.pages.kvHeads; ++head) table.attention(args, head, 0, rows, scratch);
    });
}

void measure(const Shape& shape, const Kernels& table) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const size_t element = kvElementBytes(shape.type);
    const int64_t pageElements = int64_t{shape.kvHeads} * kPageTokens * shape.headDim;
    const auto pages = static_cast<int32_t>(kCacheBytes / 2 / pageElements / static_cast<int64_t>(element));
    const int64_t elements = pages * pageElements;
    const size_t bytes = static_cast<size_t>(elements) * element;
    std::vector<uint8_t> keys(bytes), values(bytes);
    std::vector<float> line(static_cast<size_t>(shape.headDim));
    for (int64_t at = 0; at < elements; at += shape.headDim) {
        for (std::vector<uint8_t>* to : {&keys, &values}) {
            for (float& x : line) x = normal(random);
            table.storeKv(line.data(), shape.headDim, shape.type, to->data() + static_cast<size_t>(at) * element);
        }
    }
    std::vector<int32_t> pageTable(static_cast<size_t>(pages)), positions(kRows);
    for (int32_t i = 0; i < pages; ++i) pageTable[static_cast<size_t>(i)] = i;
    std::shuffle(pageTable.begin(), pageTable.end(), random);
    const int64_t width = int64_t{shape.heads} * shape.headDim;
    std::vector<float> q(static_cast<size_t>(kRows * width)), out(q.size());
    for (float& x : q) x = normal(random);
    void* scratch = alignedBytes(attentionScratchBytes(shape.heads, shape.kvHeads, shape.headDim, kPageTokens));
    AttentionArgs args;
    args.q = q.data();
    args.out = out.data();
    args.rowStride = args.outStride = width;
    args.heads = shape.heads;
    args.scale = 0.1f;
    args.pages.k = keys.data();
    args.pages.v = values.data();
    args.pages.type = shape.type;
    args.pages.kvHeads = shape.kvHeads;
    args.pages.headDim = shape.headDim;
    args.pages.pageTokens = kPageTokens;
    args.pageTable = pageTable.data();
    args.positions = positions.data();
    positions[0] = pages * kPageTokens - 1;
    const double one = timeOf(table, args, 1, scratch);
    for (int32_t i = 0; i < kRows; ++i)
        positions[static_cast<size_t>(i)] = static_cast<int32_t>(kPromptTokens - kRows) + i;
    const double many = timeOf(table, args, kRows, scratch);
    std::printf("%-7s %-5s %2d heads, %d KV heads of %3d: %6.2f GB/s | %6.1f GFLOP/s\n", table.name, shape.name,
                shape.heads, shape.kvHeads, shape.headDim, 2 * static_cast<double>(bytes) / one / 1e9,
                4.0 * static_cast<double>(kPromptTokens * width * kRows) / many / 1e9);
    std::fflush(stdout);
    std::free(scratch);
}

}  // namespace

int main(int argc, char** argv) {
    const Shape shapes[] = {
        {KvType::BF16, "bf16", 16, 8, 128}, {KvType::BF16, "bf16", 32, 8, 128}, {KvType::BF16, "bf16", 32, 4, 128},
        {KvType::BF16, "bf16", 32, 32, 64}, {KvType::BF16, "bf16", 16, 2, 256}, {KvType::F16, "fp16", 32, 8, 128},
        {KvType::F32, "fp32", 32, 8, 128},  {KvType::BF16, "bf16", 64, 4, 128},
    };
    for (const char* name : {"scalar", "avx2", "avx512", "amx"}) {
        const Kernels* table = kernelsFor(name);
        if (!table || (argc > 1 ? std::strcmp(argv[1], name) != 0 : !std::strcmp(name, "scalar"))) continue;
        for (const Shape& shape : shapes) measure(shape, *table);
    }
    return 0;
}
