// Which experts stay in a cache: segmented LRU with admission by frequency. A new expert is on probation; when it is
// used a second time, it becomes protected. The expert that has been on probation unused for the longest is evicted
// first, but only for one that has been used more often of late. So experts that are used equally often seldom replace
// each other, and cost few copies.
//
// Another policy would keep these calls. Experts are numbered 0 to count - 1 over all layers that share the cache.
// Every call but the constructor takes bounded time and allocates nothing: some are made while a kernel waits.
// Segmented LRU: Karedla, Love, Wherry, "Caching strategies to improve disk system performance" (1994). Admission by
// frequency: Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache admission policy" (2017).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace sharpi {

class ExpertPolicy {
public:
    // The largest part of `capacity` that may be protected.
    static constexpr double kProtectedShare = 0.8;
    // Frequencies are halved after this many calls of used() for each expert that the cache can hold, or for each
    // expert that there is, whichever gives more calls: with a small cache the first alone would keep frequencies too
    // small to tell experts apart. Calls count, not their weights, or one large batch would erase all before it.
    static constexpr int64_t kAgeingUsesOfHeld = 16, kAgeingUsesOfAll = 4;
    // The most experts that victim() looks at: if few of them may leave, a longer search costs more than it gains.
    static constexpr int kMostAsked = 128;

    // count: experts. capacity: how many the cache holds.
    ExpertPolicy(int32_t count, int32_t capacity);

    // A token used an expert, in the cache or not. weight: the number of rows of a batch that used it, or of uses in a
    // saved statistic.
    void used(int32_t expert, float weight = 1.0f);
    // The expert came into the cache, on probation, or left it. Throws Error(Internal) if it comes twice, leaves
    // without having come, or comes into a full cache.
    void inserted(int32_t expert);
    void removed(int32_t expert);
    bool holds(int32_t expert) const { return _segment.at(static_cast<size_t>(expert)) != Segment::None; }

    // The first expert to evict among those that may leave, or -1 if none of the first kMostAsked may.
    int32_t victim(const std::function<bool(int32_t expert)>& may) const;
    // Whether `candidate` is worth more than `victim`. If they are worth the same, a copy would gain nothing.
    bool admits(int32_t candidate, int32_t victim) const {
        const float worth = frequency(victim);
        return frequency(candidate) > (_reluctant ? 2 * worth + kReluctance : worth);
    }
    // From now on an expert leaves only for one that is used far more often: it has to be read from the disk again,
    // which costs many times what one gains that comes from RAM.
    static constexpr float kReluctance = 4;
    void setReluctant() { _reluctant = true; }
    // How often the expert was used of late. It is halved now and then, so that old popularity fades.
    float frequency(int32_t expert) const;

private:
    enum class Segment : uint8_t { None, Probation, Protected };

    int32_t endOf(Segment segment) const { return _count + (segment == Segment::Protected ? 1 : 0); }
    void unlink(int32_t expert);
    void append(int32_t expert, Segment segment);
    void protect(int32_t expert);

    int32_t _count, _capacity, _mostProtected;
    bool _reluctant = false;
    int32_t _held = 0, _protected = 0;
    // Two rings, one for each segment, from its end (`endOf`) over the oldest to the youngest and back. _next leads to
    // the younger neighbour.
    std::vector<int32_t> _next, _previous;
    std::vector<Segment> _segment;
    std::vector<uint8_t> _usedHere;  // since it came

    // A frequency is that of its epoch. A reader halves it for each epoch since.
    std::vector<float> _frequency;
    std::vector<uint32_t> _epochOf;
    uint32_t _epoch = 0;
    int64_t _period, _usesOfEpoch = 0;
};

}  // namespace sharpi
