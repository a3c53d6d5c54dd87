// Which experts stay in a cache: segmented LRU with frequency as a second voice. An expert that comes in is on
// probation; used a second time since it came, it is protected. Who was on probation for longest without use goes
// first, but only for one that has been used more often of late: experts that everybody uses alike then change little,
// and cost few copies.
//
// To replace it, keep these calls. Experts are numbered 0 to count - 1 over all layers that share the cache. Every call
// but the constructor takes bounded time and allocates nothing: some are made while a kernel waits. Segmented LRU:
// Karedla, Love, Wherry, "Caching strategies to improve disk system performance" (1994); frequency to admit: Einziger,
// Friedman, Manes, "TinyLFU: a highly efficient cache admission policy" (2017).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace sharpi {

class ExpertPolicy {
public:
    // The most of `capacity` that may be protected.
    static constexpr double kProtectedShare = 0.8;
    // Frequencies are halved after every so many calls of used() for each expert that the cache holds, or for each that
    // there is, whichever is more: with a small cache alone they would be too small to tell experts apart. The calls
    // count, not their weights: else one large batch would make everything before it forgotten.
    static constexpr int64_t kAgeingUsesOfHeld = 16, kAgeingUsesOfAll = 4;
    // The most experts that victim() looks at: in a layer of which few may leave, the search would otherwise cost more
    // than it finds.
    static constexpr int kMostAsked = 128;

    // count: experts. capacity: how many the cache holds.
    ExpertPolicy(int32_t count, int32_t capacity);

    // A token used an expert, in the cache or not. weight: by how many rows of a batch, or how often according to a
    // saved statistic.
    void used(int32_t expert, float weight = 1.0f);
    // It came into the cache, on probation; or left it. Throws Error(Internal) if it was there already, or was not; or
    // if there are more than `capacity` then.
    void inserted(int32_t expert);
    void removed(int32_t expert);
    bool holds(int32_t expert) const { return _segment.at(static_cast<size_t>(expert)) != Segment::None; }

    // The first to leave among those that may, or -1: none of the first kMostAsked may.
    int32_t victim(const std::function<bool(int32_t expert)>& may) const;
    // Whether `candidate` is worth more than `victim`. Not if it is worth the same: a copy would gain nothing.
    bool admits(int32_t candidate, int32_t victim) const { return frequency(candidate) > frequency(victim); }
    // How often it was used of late: halved now and then, so that what was once popular can be forgotten.
    float frequency(int32_t expert) const;

private:
    enum class Segment : uint8_t { None, Probation, Protected };

    int32_t endOf(Segment segment) const { return _count + (segment == Segment::Protected ? 1 : 0); }
    void unlink(int32_t expert);
    void append(int32_t expert, Segment segment);
    void protect(int32_t expert);

    int32_t _count, _capacity, _mostProtected;
    int32_t _held = 0, _protected = 0;
    // Two rings, from each one's end (`endOf`) over the oldest to the youngest and back: _next leads to the younger
    // neighbour.
    std::vector<int32_t> _next, _previous;
    std::vector<Segment> _segment;
    std::vector<uint8_t> _usedHere;  // since it came

    // A frequency is as old as its epoch; it is halved for each epoch since when it is looked at.
    std::vector<float> _frequency;
    std::vector<uint32_t> _epochOf;
    uint32_t _epoch = 0;
    int64_t _period, _usesOfEpoch = 0;
};

}  // namespace sharpi
