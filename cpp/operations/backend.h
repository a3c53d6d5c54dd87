// A processor as the engine sees it: its memory, the batches it computes, and the operations it computes them with.
// Nothing above this interface knows which processor it is. Activations are floats, row-major and contiguous.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/rules/sampling_rule.h"
#include "core/score.h"
#include "experts/expert_profiler.h"
#include "experts/expert_use.h"
#include "memory/kv_cache.h"
#include "model/weights.h"
#include "operations/batch.h"
#include "operations/host_clock.h"
#include "operations/operations.h"
#include "placement/placer.h"

namespace sharpi {

// What a pass goes through.
enum class Pass {
    Model,       // the model's layers
    Draft,       // its prediction layer, continuing from rows of the model
    DraftAgain,  // its prediction layer, continuing from its own rows
};

// The weights that are used.
inline WeightStream::Part partOf(Pass pass) {
    return pass == Pass::Model ? WeightStream::Part::Model : WeightStream::Part::Prediction;
}

// A token to be chosen by core/rules/sampling_rule.h.
struct Choice {
    int64_t row = 0;  // of the last head()
    SamplingRule rule;
    std::vector<TokenAdjustment> adjustments;  // by ascending token
    double draw = 0;                           // in [0, 1)
    std::vector<uint32_t> mask;                // the tokens that may be chosen; empty: all
    int32_t best = -1;  // the number of likeliest tokens in the score, up to kMostBest; -1: no score is wanted
};

struct Chosen {
    int32_t token = -1;  // -1: no token may be chosen
    Score score;         // if it is wanted
};

// A token whose score is wanted.
struct ScoredToken {
    int64_t row = 0;  // of the last head()
    int32_t token = 0;
    int32_t best = 0;
};

// What crosses the bus to a device.
struct BusUse {
    bool streams = false;    // weights come over in every pass
    size_t pinnedBytes = 0;  // RAM that is pinned so that the device reads weights there
};

// Tells the profiler which layers have experts.
inline void profileLayers(ExpertAccessProfiler& profiler, const StepLimits& limits) {
    for (const auto& [layer, experts] : limits.expertLayers) profiler.addLayer(layer, experts);
}

// Whether passes are recorded and replayed.
class Recording {
public:
    virtual ~Recording() = default;
    virtual bool replays() const = 0;
    virtual void setReplays(bool replay) = 0;
    virtual int64_t kernelsPerStep() const = 0;  // launched by the last pass through the model
};

class Backend {
public:
    virtual ~Backend() = default;
    virtual const char* name() const = 0;  // the instruction set, or the GPU's name
    virtual Allocator& allocator() = 0;
    virtual Placer& placer() = 0;
    virtual BusUse bus() const = 0;
    // Messages for people: what has not gone as planned so far.
    virtual std::vector<std::string> notes() const { return {}; }
    // To be called before weights are placed. `told` is called once all resident weights have arrived; if weights stay
    // in the mapped file, it is never called.
    virtual void whenUploaded(std::function<void(double seconds)> /*told*/) {}
    // The files that weights are placed from. Call it before anything is placed; they must outlive the backend.
    // expertRamBytes: see EngineOptions.
    virtual void readFrom(const std::vector<MappedFile>&, size_t /*expertRamBytes*/) {}
    // Gives everything back that was placed or taken. Only allocator() may be asked afterwards.
    virtual void unload() = 0;
    // How the experts have been used so far. forget: counts begin at 0 again, but for the disk's.
    virtual ExpertCounts expertCounts(bool forget) = 0;
    // How the threads that ran passes have spent their time. Any thread may ask.
    HostTimes hostTimes() const { return _clock.times(); }
    // Takes all scratch. To be called once, after weights and KV cache are placed. Throws Error(OutOfMemory).
    virtual void takeScratch(const StepLimits& limits) = 0;
    // How to use experts that are not resident, and which of them slots in VRAM and in RAM hold first. Call it after
    // takeScratch(); it returns once they are loaded.
    virtual void startExperts(const ExpertUse&) {}

    // The most decode rows of a batch.
    virtual int64_t decodeRows() const = 0;
    // Whether prompt rows are computed as decode rows are. A row's kind then makes no difference to its bits.
    virtual bool oneArithmetic() const = 0;
    // A sequence's prompt rows must begin at a position that is a multiple of this: a recurrent layer takes them in
    // whole tiles.
    virtual int64_t promptStep() const = 0;

    // Everything below works on the batch given here; its tokens have room in the cache.
    virtual void begin(const Batch& batch, const KvCache& kv) = 0;
    // Runs body. body calls operations only, and the same ones for every batch of one shape, so that its launches can
    // be recorded and replayed.
    virtual void region(Pass pass, const std::function<void()>& body) = 0;
    // nullptr if there is nothing to record.
    virtual Recording* recording() { return nullptr; }

    // For the batch given to begin(); head() also after region().
    virtual Operations& operations() = 0;
    // The most rows of one head().
    virtual int64_t headRows() const = 0;

    // Row i of the last head(): [vocab] floats to host memory.
    virtual void readLogits(int64_t row, int64_t count, float* out) = 0;
    // The scores of tokens in rows of the last head(), which stay as they are.
    virtual std::vector<Score> score(const std::vector<ScoredToken>& tokens) = 0;
    // Chooses a token from each of these rows. This changes the row, so each can be used only once.
    virtual std::vector<Chosen> sample(const std::vector<Choice>& choices) = 0;

protected:
    HostClock _clock;
};

}  // namespace sharpi
