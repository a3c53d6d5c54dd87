// Measures how fast this machine does what a model's steps are made of, in a few seconds: what plans predict speed from,
// and share work between the processors by. The CPU's part is here, the GPU's in cuda_probe.h.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/allocator.h"

namespace sharpi {

// Rates that need a GPU.
struct GpuRates {
    double pcieBytesPerSecond = 0;  // pinned memory to the device, in pieces of 8 MiB
    // The CPU's products and such copies at once: what each then reaches.
    double ramBytesPerSecondShared = 0;
    double pcieBytesPerSecondShared = 0;
    double vramBytesPerSecond = 0;  // weights that products with one row read, in a replayed step
    double kernelSeconds = 0;       // a small kernel that waits for the one before it, in a replayed step
    double flops = 0;               // products with 2,048 rows
};

struct HardwareRates {
    double ramBytesPerSecond = 0;  // weights that products with one row read on the CPU, by all threads
    double cpuFlops = 0;           // products with 256 rows
    std::optional<GpuRates> gpu;
    std::string gpuMissing;        // why there are no such rates
};

// The most that is taken of each memory for measuring: several times any cache.
constexpr size_t kProbeBytes = size_t{1} << 30;

// most: takes no more than that of each memory (weights in RAM, pinned memory, VRAM but for what results need), and no
// more than a quarter of the RAM that is available; where less can be had it takes a half, a quarter, ...
// Throws Error(InvalidArgument) for fewer threads than 1 or more than 1024, or less memory than 1 MiB, and
// Error(OutOfMemory) where not even little memory can be had.
HardwareRates measureHardware(int threads, size_t most = kProbeBytes);

// --- what the two parts share ----------------------------------------------------------------------------------------

// Bytes that were read or copied between two moments, in seconds of secondsNow().
struct Span {
    double begin = 0, end = 0, bytes = 0;
};

double secondsNow();
// Of at least one value.
double median(std::vector<double> values);
// Bytes per second: the median of the spans, so that one that was held up does not count.
double medianRate(const std::vector<Span>& spans);
// Bytes per second of each over the time in which both went on; a list's spans follow one another.
// Throws Error(Internal) where there is no such time.
std::pair<double, double> ratesTogether(const std::vector<Span>& one, const std::vector<Span>& other);
// `wanted` bytes, or a half, a quarter, ... of them, but at least `least`; throws Error(OutOfMemory) below that.
Buffer takeUpTo(Allocator& allocator, size_t wanted, size_t least, const std::string& name);
// The same words for the same seed: codes that a processor cannot foresee.
void fillRandom(uint64_t* words, size_t count, uint64_t seed);

}  // namespace sharpi
