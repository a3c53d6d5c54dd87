// Measures in a few seconds how fast this machine does what a model's steps consist of. Plans predict speeds from these
// rates, and divide work between the processors by them. The CPU's part is here, the GPU's in cuda_probe.h.
//
// Each rate is measured in several short samples, and the rates take turns. Other work on the machine can only make a
// sample slower. So the best sample says what the machine can do, and the spread of the others says how busy it was.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "memory/allocator.h"

namespace sharpi {

// Samples of each rate, in the order in which they were taken.
using Samples = std::vector<double>;

// Rates that need a GPU.
struct GpuRates {
    Samples pcieBytesPerSecond;  // pinned memory to the device, in pieces of 8 MiB
    // What the CPU's products and such copies reach while both run. Samples with the same index were taken together.
    Samples ramBytesPerSecondShared;
    Samples pcieBytesPerSecondShared;
    Samples vramBytesPerSecond;  // weights that one-row products read, in a replayed step
    Samples kernelSeconds;       // a small kernel that waits for the one before it, in a replayed step
    Samples flops;               // of products with 2,048 rows
};

// The time in which the CPU's one-row products read a byte of weights of this type, as a multiple of that of Q4_K.
struct TypeCost {
    DType type = DType::Q4_K;
    double cost = 1;
};

struct HardwareRates {
    Samples ramBytesPerSecond;  // weights that one-row products read on the CPU, in all threads together
    Samples cpuFlops;           // of products with 256 rows
    // Of a type of each kind of kernel. Few threads, or slow ones, multiply some types slower than RAM gives them.
    std::vector<TypeCost> typeCosts;
    std::optional<GpuRates> gpu;
    std::string gpuMissing;  // why there are no rates of a GPU
};

// most: the most to take of each memory: of RAM for weights, of pinned memory, and of VRAM without the results. It
// never takes more than a quarter of the available RAM. If a memory has less, it takes a half of that, or a quarter,
// and so on. ordinal: the number of the GPU to measure. Throws Error(InvalidArgument) unless threads is 1 to 1024 and
// most is at least 1 MiB, and Error(OutOfMemory) if even the least that it needs cannot be had.
HardwareRates measureHardware(int threads, size_t most, int ordinal);

// --- what the two parts share ----------------------------------------------------------------------------------------

// Bytes that were read or copied between two moments, which are in seconds of secondsNow().
struct Span {
    double begin = 0, end = 0, bytes = 0;
};

double secondsNow();
// Bytes per second over consecutive spans; there must be at least one.
double rateOf(const std::vector<Span>& spans);

constexpr double kSampleSeconds = 0.08;
// A series has kLeastSamples to kMostSamples samples. Between these it ends after kCalmSamples samples in a row none of
// which is better than all before it by more than kRise.
constexpr size_t kLeastSamples = 5, kCalmSamples = 4, kMostSamples = 12;
constexpr double kRise = 0.01;

// For the costs of types, Q4_K and the others take turns: one sample each to warm up, then this many.
constexpr double kTypeSeconds = 0.03;
constexpr size_t kTypeSamples = 4;

// One measurement that is repeated. A sample has one rate, or the rates of several things that run at the same time.
// Higher is better.
struct Series {
    std::function<std::vector<double>()> take;
    std::vector<std::vector<double>> samples = {};

    // Whether the series can end.
    bool settled() const;
    // The samples of one of its rates.
    Samples rate(size_t index = 0) const;
};

// Takes samples of the series in turn until all have settled. By taking turns, a busy moment spoils few samples of
// each. The first sample of each series warms up and is dropped.
void sampleInTurn(const std::vector<Series*>& series);

// Bytes per second of each over the time in which both ran. The spans of a list are consecutive. Throws Error(Internal)
// if the two did not run at the same time.
std::pair<double, double> ratesTogether(const std::vector<Span>& one, const std::vector<Span>& other);
// Takes `wanted` bytes, or a half of that, or a quarter, and so on, but no less than `least`. Throws Error(OutOfMemory)
// if not even that can be had.
Buffer takeUpTo(Allocator& allocator, size_t wanted, size_t least, const std::string& name);
// Fills words with random numbers that depend on the seed alone, so that no processor can predict a weight's codes.
void fillRandom(uint64_t* words, size_t count, uint64_t seed);

}  // namespace sharpi
