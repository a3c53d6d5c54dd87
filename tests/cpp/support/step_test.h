// What tests of the CPU's part in a GPU step share: counted allocations, poisoned memory, random weights of any type.
// Only one source file of a program may include it, because it replaces operator new.
#pragma once

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "reference_matmul.h"

namespace steptest {
inline std::atomic<int64_t> allocations{0};
}

// Counts allocations, to prove that a step takes no memory. If it were inlined, compilers would warn that `new` is
// paired with free().
#define SHARPI_APART __attribute__((noinline))
SHARPI_APART void* operator new(size_t bytes) {
    steptest::allocations.fetch_add(1, std::memory_order_relaxed);
    if (void* p = std::malloc(bytes ? bytes : 1)) return p;
    throw std::bad_alloc();
}
SHARPI_APART void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    steptest::allocations.fetch_add(1, std::memory_order_relaxed);
    return std::malloc(bytes ? bytes : 1);
}
SHARPI_APART void operator delete(void* p) noexcept { std::free(p); }
SHARPI_APART void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace steptest {

struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t, Free>;

inline Bytes poisoned(size_t bytes) {
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    Bytes p(static_cast<uint8_t*>(std::aligned_alloc(4096, rounded)));
    std::memset(p.get(), 0xa5, rounded);
    return p;
}

// rows x cols random numbers in the type's format.
inline std::vector<uint8_t> randomWeights(sharpi::DType type, int64_t rows, int64_t cols, std::mt19937& random) {
    using namespace sharpi;
    if (!info(type).isFloat) return reference::randomWeights(type, rows, cols, reference::Fill::Random, random);
    std::normal_distribution<float> normal;
    const size_t size = info(type).blockBytes;
    std::vector<uint8_t> bytes(static_cast<size_t>(rows) * rowBytes(type, cols));
    for (size_t at = 0; at < bytes.size(); at += size) {
        const uint32_t bits = bitsFromFloat(normal(random));
        const uint32_t element = type == DType::F32    ? bits
                                 : type == DType::BF16 ? bits >> 16
                                                       : f16FromFloat(floatFromBits(bits));
        std::memcpy(&bytes[at], &element, size);
    }
    return bytes;
}

}  // namespace steptest
