// Measures the quantized matmul kernels on one thread, by type and instruction set:
//   matmul_kernels [type] [isa]
// "GB/s": weight bytes read per second with one token, on a matrix too large for any cache. "GOP/s": 2 * rows * cols *
// tokens per second on 4096 x 4096, for several token counts.
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

static double timeOf(const Kernels& table, const MatmulArgs& args, void* scratch, double budget) {
    return bestTime(budget, [&] { table.matmul(args, 0, args.w.rows, scratch); });
}

static void measure(const DTypeInfo& type, const Kernels& table) {
    const int64_t cols = 4096, maxTokens = 512;
    const size_t rowSize = rowBytes(type.type, cols);
    const int64_t bigRows = static_cast<int64_t>((size_t{256} << 20) / rowSize);
    uint8_t* weights = static_cast<uint8_t*>(alignedBytes(static_cast<size_t>(bigRows) * rowSize));
    // This makes all scales small and finite. The values of quants do not change the speed.
    std::memset(weights, 0x21, static_cast<size_t>(bigRows) * rowSize);

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(cols));
    void* buffer = alignedBytes(quantizedRowsBytes(maxTokens, cols));
    QuantizedRows rows = quantizedRowsOver(buffer, maxTokens, cols);
    for (int64_t t = 0; t < maxTokens; ++t) {
        for (float& v : x) v = normal(random);
        table.quantizeRow(x.data(), cols, rows.q + t * rows.qStride, rows.scale + t * rows.scaleStride,
                          rows.sums + t * rows.sumStride);
    }
    void* scratch = alignedBytes(matmulScratchBytes(cols));
    std::vector<float> y(static_cast<size_t>(bigRows > 4096 * maxTokens ? bigRows : 4096 * maxTokens));
    MatmulArgs args;
    args.w = {type.type, bigRows, cols, weights};
    args.xQuant = &rows;
    args.y = y.data();
    args.count = 1;
    args.yStride = bigRows;
    const double once = timeOf(table, args, scratch, 0.4);
    std::printf("%-7s %-7s %6.2f GB/s |", type.name, table.name,
                static_cast<double>(bigRows) * static_cast<double>(rowSize) / once / 1e9);
    args.w.rows = args.yStride = 4096;
    for (const int64_t count : {1, 2, 4, 8, 32, 512}) {
        if (count > 32 && !std::strcmp(table.name, "scalar")) continue;
        args.count = count;
        const double took = timeOf(table, args, scratch, 0.3);
        std::printf(" %4d: %6.1f", static_cast<int>(count),
                    2.0 * 4096 * 4096 * static_cast<double>(count) / took / 1e9);
    }
    std::printf(" GOP/s\n");
    std::fflush(stdout);
    std::free(weights);
    std::free(buffer);
    std::free(scratch);
}

int main(int argc, char** argv) {
    for (uint32_t number = 0; number < 64; ++number) {
        const DTypeInfo* type = findDType(number);
        if (!type || type->isFloat || (argc > 1 && std::strcmp(argv[1], "all") && std::strcmp(argv[1], type->name)))
            continue;
        for (const char* name : {"scalar", "avx2", "avx512", "amx"}) {
            const Kernels* table = kernelsFor(name);
            if (table && (argc > 2 ? !std::strcmp(argv[2], name) : std::strcmp(name, "scalar") != 0))
                measure(*type, *table);
        }
    }
    return 0;
}
