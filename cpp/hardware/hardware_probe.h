// Measures how fast this machine does what a model's steps are made of, in a few seconds: what plans predict speed
// from, and share work between the processors by. The CPU's part is here, the GPU's in cuda_probe.h.
//
// Each rate is measured by several short samples, the samples of all rates in turn. What else the machine does only
// ever makes a sample slower, so the best one says what the machine can do, and how far the others fall short says how
// busy it was.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/allocator.h"

namespace sharpi {

// Samples of each rate, in the order in which they were taken.
using Samples = std::vector<double>;

// Rates that need a GPU.
struct GpuRates {
    Samples pcieBytesPerSecond;  // pinned memory to the device, in pieces of 8 MiB
    // The CPU's products and such copies at once: what each then reaches. Samples of one index are of one moment.
    Samples ramBytesPerSecondShared;
    Samples pcieBytesPerSecondShared;
    Samples vramBytesPerSecond;  // weights that products with one row read, in a replayed step
    Samples kernelSeconds;       // a small kernel that waits for the one before it, in a replayed step
    Samples flops;               // products with 2,048 rows
};

struct HardwareRates {
    Samples ramBytesPerSecond;  // weights that products with one row read on the CPU, by all threads
    Samples cpuFlops;           // products with 256 rows
    std::optional<GpuRates> gpu;
    std::string gpuMissing;  // why there are no such rates
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
// Bytes per second over spans that follow one another, at least one.
double rateOf(const std::vector<Span>& spans);

constexpr double kSampleSeconds = 0.08;
// A series has at least the first number of samples and at most the last. It ends when this many have passed without
// one that is better than all before it by more than kRise.
constexpr size_t kLeastSamples = 5, kCalmSamples = 4, kMostSamples = 12;
constexpr double kRise = 0.01;

// One measurement that is taken again and again. A sample has one rate, or those of things that work at the same time;
// more is better.
struct Series {
    std::function<std::vector<double>()> take;
    std::vector<std::vector<double>> samples = {};

    // Whether further samples would hardly tell more.
    bool settled() const;
    // The samples of one of its rates.
    Samples rate(size_t index = 0) const;
};

// Takes a sample of each series in turn until all have settled, so that a busy moment spoils few samples of each. The
// first sample of each warms up and is dropped.
void sampleInTurn(const std::vector<Series*>& series);

// Bytes per second of each over the time in which both went on; a list's spans follow one another.
// Throws Error(Internal) where there is no such time.
std::pair<double, double> ratesTogether(const std::vector<Span>& one, const std::vector<Span>& other);
// `wanted` bytes, or a half, a quarter, ... of them, but at least `least`; throws Error(OutOfMemory) below that.
Buffer takeUpTo(Allocator& allocator, size_t wanted, size_t least, const std::string& name);
// The same words for the same seed: codes that a processor cannot foresee.
void fillRandom(uint64_t* words, size_t count, uint64_t seed);

}  // namespace sharpi
