// How many of a layer's missed experts the GPU fetches across PCIe while the CPU computes the others: the number that
// lets the slower of the two finish soonest. Both times are measured while the model runs, beginning with the machine's
// profile.
//
// A side that is not used is not measured, so a wrong estimate would stay: one thread that loses its core for 10 ms
// makes the CPU look useless, and a CPU that gets no experts can never show that it is fast. Therefore:
// - one layer counts for no more than kMostSurprise times what was expected of it;
// - measurements lose weight with every layer that adds none, so that the next one counts more;
// - now and then a layer is shared in a way that does not look best, to measure the side that the best share leaves
//   idle. Such probes are paid from an allowance, a small part of the time that layers take, however slow the probed
//   side is; after kLongest layers without a measurement one probe needs no allowance.
// So a wrong estimate is corrected within a few times kLongest layers at the very most, and a side that really is slow
// costs little.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpi {

// The seconds that bytes take: a line through recent measurements. Neither its start nor its slope is ever negative.
class TimeLine {
public:
    static constexpr double kMostSurprise = 8;

    // What is expected before anything is measured: `start` seconds, then `rate` bytes per second, around `bytes` > 0.
    // A trace of it stays, and gives the line its slope if all measurements are of one size.
    TimeLine(double start, double rate, double bytes);
    // Adds a layer's measurement, bounded by kMostSurprise times what the line says.
    void add(double bytes, double seconds);
    // A layer went by without a measurement.
    void fade();
    double seconds(double bytes) const { return _lineStart + _lineSlope * bytes; }

private:
    void weigh(double bytes, double seconds, double weight);
    void weighExpected(double weight);
    void scale(double factor);
    void draw();
    double _start, _rate, _around;  // as expected
    // Weighted sums of the measurements; older ones count less and less.
    double _weight = 0, _bytes = 0, _seconds = 0, _squares = 0, _products = 0;
    double _lineStart = 0, _lineSlope = 0;  // the line through them
};

class MissShare {
public:
    // The seconds that the CPU is expected to take besides those for the bytes: giving a layer's work to threads, and
    // joining them.
    static constexpr double kCpuStart = 15e-6;
    // The same for fetches: sending the orders to the GPU, and the products that follow.
    static constexpr double kFetchStart = 20e-6;
    // The part of the layers' time that probes of one side may add, and the layers with misses without a measurement
    // after which a side is probed.
    static constexpr double kProbing = 0.005;
    static constexpr int32_t kIdle = 64, kLongest = 4096;

    // The rates in bytes per second, from the profile, and the bytes of an expert. If a rate is missing, the CPU
    // computes all experts.
    MissShare(double cpuRate, double busRate, size_t expertBytes);

    // How many of `missed` experts of `bytes` bytes each the GPU should fetch. The smallest of equally good numbers,
    // since a fetch may evict another expert.
    int32_t best(int32_t missed, size_t bytes) const;
    // The same for a layer that is about to be shared; now and then another number, as a probe.
    int32_t choose(int32_t missed, size_t bytes);

    // What became of the layer that was shared last: the bytes of experts that the GPU fetched, those that the CPU
    // read, and the seconds that the CPU took. The last two are 0 if the CPU computed none.
    void done(size_t fetched, size_t computed, double seconds);
    // The seconds from that layer's orders until the GPU asked about the next layer. Not called if other work came
    // between.
    void followed(double seconds);

private:
    double slower(int32_t missed, int32_t fetched, double bytes) const;
    int32_t probe(int32_t missed, int32_t best, double bytes);
    static bool pay(double& allowance, double seconds);

    bool _shares;
    TimeLine _cpu, _bus;
    // The GPU's own part: the seconds from the end of a layer's experts to the next layer's question, if the CPU ended
    // last; from _owns measurements.
    double _own = 0;
    int32_t _owns = 0;
    // Layers with misses since each was measured.
    int32_t _cpuIdle = 0, _busIdle = 0, _ownIdle = 0;
    double _cpuAllowance = 0, _busAllowance = 0;  // seconds that probes may add now
    // About the layer that was shared last.
    size_t _fetchedBytes = 0;
    double _cpuSeconds = 0;
};

}  // namespace sharpi
