// See expert_misses.h.
#include "engine/expert_misses.h"

#include <algorithm>
#include <utility>

namespace sharpi {

namespace {

// What the CPU did is forgotten within a few times 512 layers: its speed changes with what else runs on the machine.
constexpr double kKept = 1.0 - 1.0 / 512;
// What was expected counts as much as so many layers before anything is seen, and is weighed again with every layer: in the end a quarter
// of a layer's worth of it stays.
constexpr double kExpected = 8, kExpectedAgain = 0.25 / 512;

bool contains(const std::vector<int32_t>& list, int32_t expert) { return std::find(list.begin(), list.end(), expert) != list.end(); }

}  // namespace

TimeLine::TimeLine(double start, double rate, double bytes) : _start(start), _rate(rate), _around(bytes) { weighExpected(kExpected); }

// As two layers that tell start and slope.
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

void TimeLine::add(double bytes, double seconds) {
    for (double* sum : {&_weight, &_bytes, &_seconds, &_squares, &_products}) *sum *= kKept;
    weigh(bytes, seconds, 1);
    weighExpected(kExpectedAgain);
}

// No start below 0: then the line is the one through the origin.
double TimeLine::seconds(double bytes) const {
    const double spread = _weight * _squares - _bytes * _bytes;
    const double slope = std::max(0.0, (_weight * _products - _bytes * _seconds) / spread);
    const double start = (_seconds - slope * _bytes) / _weight;
    return start >= 0 ? start + slope * bytes : bytes * _products / _squares;
}

ExpertMisses::ExpertMisses(ExpertSlotManager& slots, ExpertPrefetcher& prefetcher, ExpertAccessProfiler& profiler, const ExpertUse& use,
                           Prefetch mode, Reachable reachable)
    : _slots(slots), _prefetcher(prefetcher), _profiler(profiler), _busRate(use.busRate), _mode(mode), _reachable(std::move(reachable)) {
    if (use.cpuRate > 0 && use.busRate > 0) _cpu.emplace(kCpuStart, use.cpuRate, 2.0 * static_cast<double>(slots.expertBytes(0)));
}

int32_t ExpertMisses::share(int32_t missed, size_t bytes) const {
    if (!_cpu) return 0;
    int32_t best = 0;
    double least = 0;
    for (int32_t n = 0; n <= std::min(missed, cuda::kMaxExpertFetches); ++n) {
        const double cpu = n < missed ? _cpu->seconds(static_cast<double>(bytes) * (missed - n)) : 0;
        const double seconds = n > 0 ? std::max(cpu, kFetchStart + static_cast<double>(bytes) * n / _busRate) : cpu;
        if (n > 0 && seconds >= least) continue;
        least = seconds;
        best = n;
    }
    return best;
}

int64_t ExpertMisses::takeFetched() { return std::exchange(_fetched, 0); }

bool ExpertMisses::fetch(int32_t layer, int32_t expert, bool ahead, cuda::ExpertFetch& to) {
    const ExpertStacks& file = _slots.file(layer);
    const auto reach = [&](const MatrixStack& stack) {
        return _reachable(stack.at(expert).data, fileBytes(stack.first));
    };
    to.expert = expert;
    to.gate = reach(file.gate);
    to.up = reach(file.up);
    to.down = reach(file.down);
    if (!to.gate || !to.up || !to.down) return false;
    const auto place = _slots.getOrLoad(layer, expert, ahead);
    if (!place || !place->fill) return false;
    to.slot = place->slot;
    return true;
}

void ExpertMisses::order(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs,
                         cuda::ExpertOrders& orders) {
    _slots.reached(layer, chosen, pairs);
    _missed.clear();
    _ordered.clear();
    for (int32_t p = 0; p < pairs; ++p) {
        if (slot[p] < 0 && !contains(_missed, chosen[p])) _missed.push_back(chosen[p]);
    }
    const int32_t wanted = share(static_cast<int32_t>(_missed.size()), _slots.expertBytes(layer));
    for (const int32_t expert : _missed) {
        if (orders.demanded == wanted) break;
        if (!fetch(layer, expert, false, orders.fetch[orders.demanded])) continue;
        ++orders.demanded;
        _ordered.push_back(expert);
    }
    if (_mode == Prefetch::NextLayer && predicted) orderAhead(layer + 1, predicted, pairs, orders);
    _fetched += orders.demanded + orders.ahead;
}

void ExpertMisses::orderAhead(int32_t layer, const int32_t* predicted, int32_t pairs, cuda::ExpertOrders& orders) {
    for (int32_t p = 0; p < pairs && orders.ahead < kMostAhead; ++p) {
        if (_slots.tryGet(layer, predicted[p]) < 0 && fetch(layer, predicted[p], true, orders.aheadFetch[orders.ahead])) ++orders.ahead;
    }
}

void ExpertMisses::done(int32_t layer, const int32_t* chosen, const int32_t* slot, const int32_t* predicted, int32_t pairs, size_t bytes,
                        double seconds) {
    using Event = ExpertAccessProfiler::Event;
    const bool missed = std::any_of(slot, slot + pairs, [](int32_t s) { return s < 0; });
    if (!missed) {
        _slots.reached(layer, chosen, pairs);
        _missed.clear();
    }
    for (int32_t p = 0; p < pairs; ++p) {
        _profiler.count(layer, chosen[p], slot[p] >= 0 ? Event::Hit : contains(_ordered, chosen[p]) ? Event::Fetched : Event::Computed);
    }
    _slots.used(layer, chosen, pairs);
    if (_mode == Prefetch::NextToken) {  // what was fetched to stay is no hint
        const auto there = [&](int32_t expert) { return _slots.tryGet(layer, expert) >= 0; };
        _missed.erase(std::remove_if(_missed.begin(), _missed.end(), there), _missed.end());
    }
    _prefetcher.chosen(layer, chosen, pairs, _missed.data(), static_cast<int32_t>(_missed.size()));
    if (predicted) _prefetcher.predicted(layer + 1, predicted, pairs);
    if (_cpu && bytes > 0) _cpu->add(static_cast<double>(bytes), seconds);
}

}  // namespace sharpi
