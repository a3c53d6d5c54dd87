// How many of a layer's missed experts the GPU fetches across PCIe while the CPU computes the others: as many as let
// the slower of the two finish soonest. How long each takes is measured while it runs, from the machine's profile on.
//
// What is not used is not measured, so an estimate that is wrong would stay wrong: one thread that loses its core for
// 10 ms makes the CPU look useless, and a CPU that gets no experts can never show that it is fast. Therefore:
// - one layer counts for no more than kMostSurprise times what was expected of it;
// - what was measured counts less with every layer that goes by without a measurement, so that the next one counts
// more;
// - now and then a layer is shared otherwise than looks best, to measure what the best share leaves idle. Such probes
// are paid from an
//   allowance, a small part of the time that layers take, however slow the probed side is; after kLongest layers one
//   needs no allowance.
// So a wrong estimate is corrected within a few times kLongest layers at the very most, and a side that really is slow
// costs little.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpi {

// The seconds that bytes take: a line through what was seen of late. Neither its start nor its slope is ever negative.
class TimeLine {
public:
    static constexpr double kMostSurprise = 8;

    // What is expected before anything is seen: `start` seconds, then `rate` bytes per second, around `bytes` > 0. A
    // trace of it stays: it gives the line its slope if all that was seen is of one size.
    TimeLine(double start, double rate, double bytes);
    // What a layer took. More than kMostSurprise times what the line says counts as kMostSurprise times that.
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
    // Weighted sums, of which older ones count less and less.
    double _weight = 0, _bytes = 0, _seconds = 0, _squares = 0, _products = 0;
    double _lineStart = 0, _lineSlope = 0;  // the line through them
};

class MissShare {
public:
    // Seconds that the CPU takes beside those for the bytes, before anything was seen: sharing a layer out to threads,
    // and joining them.
    static constexpr double kCpuStart = 15e-6;
    // Those of fetches: the orders' way to the GPU, and the products that follow.
    static constexpr double kFetchStart = 20e-6;
    // The part of the layers' time that probes of either side may add, and the layers with misses after which it is
    // probed.
    static constexpr double kProbing = 0.005;
    static constexpr int32_t kIdle = 64, kLongest = 4096;

    // Bytes per second by the profile, and of an expert. Without both rates all experts are the CPU's.
    MissShare(double cpuRate, double busRate, size_t expertBytes);

    // How many of `missed` experts of `bytes` bytes each the GPU should fetch. If several numbers are as good, the
    // least: what is fetched may drive others out.
    int32_t best(int32_t missed, size_t bytes) const;
    // The same for a layer that is about to be shared: now and then another number, to measure by.
    int32_t choose(int32_t missed, size_t bytes);

    // What became of the layer that was shared last. computed: bytes that the CPU read of experts, in how many seconds;
    // 0 and 0 if none.
    void done(size_t fetched, size_t computed, double seconds);
    // And how many seconds after its orders the GPU asked about the next layer. Not called if something else came
    // between.
    void followed(double seconds);

private:
    double slower(int32_t missed, int32_t fetched, double bytes) const;
    int32_t probe(int32_t missed, int32_t best, double bytes);
    static bool pay(double& allowance, double seconds);

    const bool _shares;
    TimeLine _cpu, _bus;
    // Seconds from the end of a layer's experts to the next layer's question, if the CPU ended last; from _owns
    // measurements.
    double _own = 0;
    int32_t _owns = 0;
    // Layers with misses since each was measured.
    int32_t _cpuIdle = 0, _busIdle = 0, _ownIdle = 0;
    double _cpuAllowance = 0, _busAllowance = 0;  // seconds that probes may add now
    // Of the layer that was shared last.
    size_t _fetchedBytes = 0;
    double _cpuSeconds = 0;
};

}  // namespace sharpi
