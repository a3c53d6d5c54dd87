// See miss_share.h.
//
// The CPU's time is measured around its work. The bus's time is inferred from when the GPU asks about the next layer:
// after the slower of the two, and after the GPU's own part of a layer. That part is measured on layers for which the
// GPU fetched nothing. So each layer bounds the fetches' time from above, and measures it if the CPU was done earlier.
#include "experts/miss_share.h"

#include <algorithm>

#include "core/expert_orders.h"

namespace sharpi {

namespace {

// Measurements fade within a few times 256 layers, as the CPU's speed changes with what else runs on the machine.
constexpr double kKept = 1.0 - 1.0 / 256;
// The expectation counts as much as kExpected layers at first. A little of it is added again with every layer, so in
// the end it has the weight of an eighth of a layer.
constexpr double kExpected = 8, kExpectedAgain = 0.125 / 256;
// Measurements never fade below the weight of a part of a layer: without new ones the line stays as it is.
constexpr double kLeastWeight = 0.25;

// The number of measurements of the GPU's own part that are needed before the bus's time can be inferred.
constexpr int32_t kOwnsNeeded = 4;
// The GPU's own part is never shorter by accident, so a shorter one counts for more.
constexpr double kShorter = 1.0 / 16, kLonger = 1.0 / 64;
// If the GPU asks later than this factor times the CPU's time, it waited for the fetches.
constexpr double kLater = 1.05;
// The most seconds of allowance that are saved up for either side.
constexpr double kMostSaved = 5e-3;

}  // namespace

TimeLine::TimeLine(double start, double rate, double bytes) : _start(start), _rate(rate), _around(bytes) {
    weighExpected(kExpected);
    draw();
}

// The expectation counts as two layers, which give the line its start and its slope.
void TimeLine::weighExpected(double weight) {
    weigh(0, _start, weight / 2);
    weigh(2 * _around, _start + 2 * _around / _rate, weight / 2);
}

void TimeLine::weigh(double bytes, double seconds, double weight) {
    _weight += weight;
    _bytes += weight * bytes;
    _seconds += weight * seconds;
    _squares += weight * bytes * bytes;
    _products += weight * bytes * seconds;
}

void TimeLine::scale(double factor) {
    for (double* sum : {&_weight, &_bytes, &_seconds, &_squares, &_products}) *sum *= factor;
}

// If the start would be below 0, the line goes through the origin.
void TimeLine::draw() {
    const double spread = _weight * _squares - _bytes * _bytes;
    _lineSlope = std::max(0.0, (_weight * _products - _bytes * _seconds) / spread);
    _lineStart = (_seconds - _lineSlope * _bytes) / _weight;
    if (_lineStart >= 0) return;
    _lineStart = 0;
    _lineSlope = _products / _squares;
}

void TimeLine::add(double bytes, double seconds) {
    const double bounded = std::min(seconds, kMostSurprise * this->seconds(bytes));
    scale(kKept);
    weigh(bytes, bounded, 1);
    weighExpected(kExpectedAgain);
    draw();
}

// The line itself stays.
void TimeLine::fade() {
    if (_weight > kLeastWeight) scale(kKept);
}

MissShare::MissShare(double cpuRate, double busRate, size_t expertBytes)
    : _shares(cpuRate > 0 && busRate > 0),
      _cpu(kCpuStart, _shares ? cpuRate : 1, 2.0 * static_cast<double>(std::max<size_t>(expertBytes, 1))),
      _bus(kFetchStart, _shares ? busRate : 1, 2.0 * static_cast<double>(std::max<size_t>(expertBytes, 1))) {}

// The seconds until both are done.
double MissShare::slower(int32_t missed, int32_t fetched, double bytes) const {
    const double cpu = fetched < missed ? _cpu.seconds(bytes * (missed - fetched)) : 0;
    return fetched > 0 ? std::max(cpu, _bus.seconds(bytes * fetched)) : cpu;
}

int32_t MissShare::best(int32_t missed, size_t bytes) const {
    if (!_shares) return 0;
    int32_t best = 0;
    double least = slower(missed, 0, static_cast<double>(bytes));
    for (int32_t n = 1; n <= std::min(missed, kMaxExpertFetches); ++n) {
        const double seconds = slower(missed, n, static_cast<double>(bytes));
        if (seconds >= least) continue;
        least = seconds;
        best = n;
    }
    return best;
}

int32_t MissShare::choose(int32_t missed, size_t bytes) {
    if (!_shares || missed < 1) return 0;
    ++_cpuIdle;
    ++_busIdle;
    ++_ownIdle;
    return probe(missed, best(missed, bytes), static_cast<double>(bytes));
}

// Gives an idle side a little to do: the CPU one expert, the bus one more. The GPU's own part can be measured only if
// nothing is fetched; the bus cannot be measured without it, so it comes first.
int32_t MissShare::probe(int32_t missed, int32_t best, double bytes) {
    const auto extra = [&](int32_t fetched) { return slower(missed, fetched, bytes) - slower(missed, best, bytes); };
    if (best == missed && _cpuIdle >= kIdle && (pay(_cpuAllowance, extra(missed - 1)) || _cpuIdle >= kLongest)) {
        _cpuIdle = 0;
        return missed - 1;
    }
    const bool ownIsKnown = _owns >= kOwnsNeeded;
    if (best > 0 && (!ownIsKnown || _ownIdle >= kIdle)) {
        if (!pay(_busAllowance, extra(0)) && _ownIdle < kLongest) return best;
        _ownIdle = 0;
        return 0;
    }
    const int32_t more = std::min({best + 1, missed, kMaxExpertFetches});
    if (more > best && ownIsKnown && _busIdle >= kIdle && (pay(_busAllowance, extra(more)) || _busIdle >= kLongest)) {
        _busIdle = 0;
        return more;
    }
    return best;
}

bool MissShare::pay(double& allowance, double seconds) {
    if (seconds > allowance) return false;
    allowance -= seconds;
    return true;
}

void MissShare::done(size_t fetched, size_t computed, double seconds) {
    _fetchedBytes = fetched;
    _cpuSeconds = seconds;
    if (!_shares) return;
    if (computed > 0) {
        _cpu.add(static_cast<double>(computed), seconds);
        _cpuIdle = 0;
    } else {
        _cpu.fade();
    }
}

void MissShare::followed(double seconds) {
    if (!_shares) return;
    for (double* allowance : {&_cpuAllowance, &_busAllowance})
        *allowance = std::min(*allowance + kProbing * seconds, kMostSaved);
    if (_fetchedBytes == 0) {
        const double own = std::max(0.0, seconds - _cpuSeconds);
        _own += _owns == 0 ? own : own < _own ? kShorter * (own - _own) : kLonger * std::min(own - _own, _own);
        ++_owns;
        _ownIdle = 0;
        _bus.fade();
        return;
    }
    const auto bytes = static_cast<double>(_fetchedBytes);
    const double both = seconds - _own;  // until the slower of the two was done
    const bool waited = both > kLater * _cpuSeconds;
    if (_owns < kOwnsNeeded || both <= 0 || (!waited && both >= _bus.seconds(bytes))) return _bus.fade();
    _bus.add(bytes, both);
    _busIdle = 0;
}

}  // namespace sharpi
