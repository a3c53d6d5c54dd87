// Chooses the kernel table for this machine and lays out the buffers that kernels share.
#include "cpu/kernels.h"

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(SHARPI_WITH_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "core/error.h"

namespace sharpi::cpu {

namespace scalar {
const Kernels& table();
size_t attentionScratch(int32_t heads, int32_t kvHeads, int32_t headDim, int32_t pageTokens);
}  // namespace scalar

#if defined(__x86_64__)
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
#if defined(SHARPI_WITH_AMX)
namespace amx {
const Kernels& table();
}
#endif

static bool hasAvx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

static bool hasAvx512() {
    return hasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni");
}

#if defined(SHARPI_WITH_AMX)
// Linux gives a process the registers of tiles when it asks for them.
static bool askForTiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

static bool hasAmx() {
    constexpr unsigned kTiles = 1u << 24, kInt8 = 1u << 25;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!hasAvx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) == 0 || (d & kInt8) == 0) return false;
    static const bool allowed = askForTiles();
    return allowed;
}
#endif
#endif

const Kernels* kernelsFor(const char* name) {
    if (!std::strcmp(name, "scalar")) return &scalar::table();
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!std::strcmp(name, "avx2") && hasAvx2()) return &avx2::table();
    if (!std::strcmp(name, "avx512") && hasAvx512()) return &avx512::table();
#if defined(SHARPI_WITH_AMX)
    if (!std::strcmp(name, "amx") && hasAmx()) return &amx::table();
#endif
#endif
    return nullptr;
}

static const Kernels& chooseKernels() {
    if (const char* wanted = std::getenv("SHARPI_CPU_ISA"); wanted && *wanted) {
        if (const Kernels* found = kernelsFor(wanted)) return *found;
        throw Error(ErrorKind::InvalidArgument, std::string("SHARPI_CPU_ISA=") + wanted +
                                                    " cannot run on this processor (known: scalar, avx2, avx512, amx)");
    }
    for (const char* name : {"amx", "avx512", "avx2"})
        if (const Kernels* found = kernelsFor(name)) return *found;
    return scalar::table();
}

const Kernels& kernels() {
    static const Kernels& chosen = chooseKernels();
    return chosen;
}

static int64_t roundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

size_t quantizedRowsBytes(int64_t rows, int64_t cols) {
    const int64_t padded = roundUp(cols, 256);
    const int64_t q = rows * padded;
    const int64_t scales = rows * (padded / 32) * static_cast<int64_t>(sizeof(float));
    const int64_t sums = rows * (padded / 16) * static_cast<int64_t>(sizeof(int16_t));
    return static_cast<size_t>(roundUp(q, 64) + roundUp(scales, 64) + roundUp(sums, 64));
}

QuantizedRows quantizedRowsOver(void* buffer, int64_t rows, int64_t cols) {
    const int64_t padded = roundUp(cols, 256);
    QuantizedRows view;
    view.rows = rows;
    view.cols = cols;
    view.qStride = padded;
    view.scaleStride = padded / 32;
    view.sumStride = padded / 16;
    uint8_t* at = static_cast<uint8_t*>(buffer);
    view.q = reinterpret_cast<int8_t*>(at);
    at += roundUp(rows * view.qStride, 64);
    view.scale = reinterpret_cast<float*>(at);
    at += roundUp(rows * view.scaleStride * static_cast<int64_t>(sizeof(float)), 64);
    view.sums = reinterpret_cast<int16_t*>(at);
    return view;
}

size_t matmulScratchBytes(int64_t cols) {
    // The repacked tile (struct TileBlock in tile_pack.h): for each block of 32 elements, 32 rows of one byte an
    // element and at most four factors. Then up to 16 tokens (struct TokenGroup), and room for the float kernels.
    const int64_t groups = roundUp(cols, 256) / 256, blocks = roundUp(cols, 1024) / 32;
    return static_cast<size_t>(blocks * kMatmulTileRows * (32 + 4 * 4) + 16 * groups * 448 + 65536);
}

size_t attentionScratchBytes(int32_t heads, int32_t kvHeads, int32_t headDim, int32_t pageTokens) {
    return scalar::attentionScratch(heads, kvHeads, headDim, pageTokens);
}

// Sixteen rows, the scores, and as many numbers.
size_t indexScratchBytes(int32_t dim, int64_t blocks) {
    const int32_t rounded = (dim + 15) / 16 * 16;
    return (16 * static_cast<size_t>(rounded) + 2 * static_cast<size_t>(blocks + 16)) * sizeof(float);
}

// Sixteen columns of a head's matrix.
size_t stateScratchBytes(int32_t rows) { return static_cast<size_t>(rows) * 16 * sizeof(float); }

}  // namespace sharpi::cpu
