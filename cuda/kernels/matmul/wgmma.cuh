// Hopper's warpgroup products: 64 rows of one operand by up to 256 of the other. The tensor cores read both from shared
// memory while the threads do other work. Tiles are laid out as in mma.cuh, which the hardware calls 128-byte swizzled.
#pragma once

#include <cstdint>

#include "kernels/matmul/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SHARPI_WGMMA 1
#elif defined(__CUDA_ARCH__) && defined(SHARPI_HOPPER)
#error "the build promises code for 90a (SHARPI_HOPPER) and compiles for something else"
#endif

namespace sharpi::cuda {

// Tells the hardware where the rows of a tile are. `address` is the first of a group of 8 rows. Groups of 8 rows are
// contiguous and 128-byte swizzled. The next 16 elements along k are kNextProduct further.
constexpr uint64_t kNextProduct = 16 * 2 / 16;  // shared memory is too small for a carry out of the field
__device__ __forceinline__ uint64_t tileDescriptor(uint32_t address) {
    constexpr uint64_t kSwizzled = uint64_t{1} << 62, kGroupBytes = uint64_t{8 * kTileRowBytes / 16} << 32,
                       kUnused = uint64_t{1} << 16;
    return kSwizzled | kGroupBytes | kUnused | (address >> 4 & 0x3fff);
}

#ifdef SHARPI_WGMMA

// Makes writes to shared memory visible to the tensor cores: those of this thread after the next barrier, and those
// that it has synchronized with. It waits for all loads that this thread has begun.
__device__ __forceinline__ void publishToTensorCores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void beginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void closeProducts() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `Pending` groups of products are in flight.
template <int Pending> __device__ __forceinline__ void waitForProducts() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// sum += a b for 16 elements along k; a has 64 rows, b has kN. A warp has 16 rows of a. Lane l has rows l / 4 and
// l / 4 + 8 of a and, of each group j of 8 rows of b, row 2 (l mod 4) and the next. They are in
// sum[4 j + 2 (second row of a) + (second row of b)].
template <int kN> struct WarpgroupProduct;

#define SHARPI_F8(c, i)                                                                                         \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define SHARPI_F32(c, i) SHARPI_F8(c, i), SHARPI_F8(c, i + 8), SHARPI_F8(c, i + 16), SHARPI_F8(c, i + 24)

// The names of the first registers of an instruction.
#define SHARPI_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SHARPI_NAMES_32 \
    SHARPI_NAMES_16     \
    ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SHARPI_NAMES_64 \
    SHARPI_NAMES_32     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SHARPI_NAMES_96 \
    SHARPI_NAMES_64     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SHARPI_NAMES_128 \
    SHARPI_NAMES_96      \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SHARPI_NAMES_160 \
    SHARPI_NAMES_128     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SHARPI_NAMES_256                                                                           \
    SHARPI_NAMES_160                                                                               \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// first, second: the numbers of the descriptors, behind those of the sums.
#define SHARPI_PRODUCT(n, first, second, ...)                                                                      \
    template <> struct WarpgroupProduct<n> {                                                                       \
        static __device__ __forceinline__ void add(float (&sum)[n / 2], uint64_t a, uint64_t b) {                  \
            asm volatile("{ .reg .pred yes; setp.ne.b32 yes, 1, 0; wgmma.mma_async.sync.aligned.m64n" #n           \
                         "k16.f32.bf16.bf16 {" SHARPI_NAMES_##n "}, %" #first ", %" #second ", yes, 1, 1, 0, 0; }" \
                         : __VA_ARGS__                                                                             \
                         : "l"(a), "l"(b));                                                                        \
        }                                                                                                          \
    };

SHARPI_PRODUCT(16, 8, 9, SHARPI_F8(sum, 0))
SHARPI_PRODUCT(32, 16, 17, SHARPI_F8(sum, 0), SHARPI_F8(sum, 8))
SHARPI_PRODUCT(64, 32, 33, SHARPI_F32(sum, 0))
SHARPI_PRODUCT(96, 48, 49, SHARPI_F32(sum, 0), SHARPI_F8(sum, 32), SHARPI_F8(sum, 40))
SHARPI_PRODUCT(128, 64, 65, SHARPI_F32(sum, 0), SHARPI_F32(sum, 32))
SHARPI_PRODUCT(160, 80, 81, SHARPI_F32(sum, 0), SHARPI_F32(sum, 32), SHARPI_F8(sum, 64), SHARPI_F8(sum, 72))
SHARPI_PRODUCT(256, 128, 129, SHARPI_F32(sum, 0), SHARPI_F32(sum, 32), SHARPI_F32(sum, 64), SHARPI_F32(sum, 96))

#undef SHARPI_PRODUCT
#undef SHARPI_NAMES_16
#undef SHARPI_NAMES_32
#undef SHARPI_NAMES_64
#undef SHARPI_NAMES_96
#undef SHARPI_NAMES_128
#undef SHARPI_NAMES_160
#undef SHARPI_NAMES_256
#undef SHARPI_F32
#undef SHARPI_F8

#endif

}  // namespace sharpi::cuda
