// The CPU's part of a step that runs on a GPU, computed from the mapped file: the last rows of feed-forward matrices
// and of the output head that are not resident, while the GPU fetches and multiplies the others; and the chosen experts
// that the GPU neither has nor is told to fetch. By core/contract.h the bits are those of one processor.
//
// Rows of activations cross through a mailbox in pinned memory (kernels/rows/crossing.h). Each side waits for tickets,
// which are values of the other side's counters (HostWork::nextSent and the like). They rise through a step and start
// again with the next, so that a captured step carries the same tickets each time.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <vector>

#include "core/expert_orders.h"
#include "core/host_rows.h"
#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "cpu/share/host_experts.h"
#include "experts/miss_plan.h"
#include "operations/step_limits.h"

namespace sharpi {

struct Mailbox {
    HostRows input;                  // [rows, embedding]: a layer's normalized rows, from the GPU
    HostRows expertInput;            // in the same place, of a layer with experts: [rows, what experts read]
    HostRows hidden;                 // [rows, hidden]: each processor writes its columns
    float* down = nullptr;           // [rows, count]: what the CPU adds to the last `count` columns of x
    HostRows logits;                 // [StepLimits::headRows, vocab], as floats: the CPU writes its columns
    float* answers = nullptr;        // [rows * used, what experts give]: of each pair that the CPU computes
    ExpertOrders* orders = nullptr;  // what the GPU should fetch
    uint32_t* sent = nullptr;        // the GPU's counter
    uint32_t* instructed = nullptr;  // the CPU's counter of orders
    uint32_t* returned = nullptr;    // the CPU's counter of results

    // What the GPU says of a layer with experts. Each layer has an area of its own, since the CPU may be layers behind
    // if nothing was missed.
    HostChoices choicesOf(int32_t expertLayer) const;
    int32_t* choices = nullptr;  // [layers with experts, kChoiceLists, pairs]
    static constexpr int64_t kChoiceLists = 4;
    int64_t pairs = 0;  // rows * used
};

// The matrices of a feed-forward part, as in the file, and what joins them. A part without a gate has an `up` without
// rows. The biases are in the host's memory.
struct HostGated {
    Matrix gate, up;
    const float *gateBias = nullptr, *upBias = nullptr;  // [gate.rows]; may be nullptr
    Activation activation = {};
    bool gated() const { return up.rows > 0; }
};

class HostShare {
public:
    // Bytes of the mailbox, for steps of up to `rows` rows.
    static size_t mailboxBytes(const StepLimits& limits, int64_t rows);
    // threads: including the caller. memory: mailboxBytes() of pinned memory, aligned to 4096; zeroed here.
    // waiting: called every second while the CPU waits for the GPU. It returns true if the GPU has done all that it was
    // given; a ticket that is still missing then will never come, and the wait ends in Error(Internal). It throws if
    // the GPU has failed.
    HostShare(int threads, void* memory, const StepLimits& limits, int64_t rows, std::function<bool()> waiting);

    const Mailbox& mailbox() const { return _mailbox; }

    // Before a step, while the GPU does nothing that reads the mailbox: the counters start again at 0.
    void begin();

    // While one exists, waiting threads do not sleep. For the duration of a step.
    class Awake {
    public:
        explicit Awake(HostShare& share) : _awake(share._pool) {}

    private:
        ThreadPool::Awake _awake;
    };

    // Waits for the ticket `after`, then writes columns [begin, gate.rows) of activation(gate x, up x), where x is the
    // mailbox's input, to the mailbox's hidden rows, in the form that `reader` (the matrix that reads them) needs, and
    // returns `ticket`.
    void gated(const HostGated& layer, const Matrix& reader, int64_t rows, int64_t begin, uint32_t after,
               uint32_t ticket);
    // Waits for `after` (0: nothing), then writes rows [begin, w.rows) of w hidden to the mailbox's `down`, and returns
    // `ticket`.
    void down(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket);
    // Waits for `after`, then writes rows [begin, w.rows) of w input to the mailbox's `logits`, and returns `ticket`.
    void head(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket);
    // A layer with experts. Waits for `after` and reads the layer's choices, with predictions if `predicted`. If an
    // expert is missed, sends the plan's orders with the ticket `instructed`. For each pair whose expert the GPU does
    // not fetch either, writes the row down(activation(gate x, up x)), where x is the pair's row of the mailbox's
    // input, to the mailbox's `answers`; the GPU adds down's bias, weighs and sums them. weightsInput: the GPU sends
    // the pairs' weights, which multiply the experts' input. Returns `ticket`, and tells the plan. Experts that the
    // layer's RAM does not have are read from the disk, and computed as they come. Throws Error(Internal) if a choice
    // is no expert or an order would do harm, and what the plan and RamExperts::await() throw.
    void experts(const HostExpertLayer& layer, int32_t expertLayer, int64_t rows, int32_t used, bool predicted,
                 bool weightsInput, MissPlan& plan, uint32_t after, uint32_t instructed, uint32_t ticket);
    // After a failure: every kernel that waits for the CPU goes on.
    void abort() noexcept;

private:
    struct Release {
        void operator()(uint8_t* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }
    };

    bool awaitSent(uint32_t ticket);
    void giveBack(uint32_t ticket);
    // Waits for `after`, then computes rows [begin, w.rows) of w x: row t at y + t * yStride.
    void multiply(const Matrix& w, const HostRows& x, int64_t rows, int64_t begin, float* y, int64_t yStride,
                  uint32_t after);
    // w's product with rows of the mailbox; the caller sets y.
    cpu::MatmulArgs product(const Matrix& w, const HostRows& x, const cpu::QuantizedRows& xQuant, int64_t rows) const;
    void finishBlock(const HostGated& layer, int64_t first, int64_t last, const Matrix& reader, int64_t rows);
    void tellTurn(bool waited, MissPlan& plan);
    void findInRam(RamExperts& ram, int32_t expertLayer, int32_t experts, int32_t pairs);
    size_t computeOurs(const HostExpertLayer& layer, int64_t rows, int32_t used, bool weightsInput, double& seconds);
    void awaitRead(RamExperts& ram, int32_t pairs);
    bool takeChoices(int32_t expertLayer, int32_t experts, int32_t pairs, bool predicted, bool weightsInput);
    void instruct(int32_t expertLayer, int32_t pairs, bool predicted, MissPlan& plan, uint32_t ticket);
    void leaveToGpu(int32_t pairs);
    void checkAhead() const;
    uint8_t* threadScratch(int worker) const {
        return _scratch.get() + static_cast<size_t>(worker) * _threadScratchBytes;
    }

    const cpu::Kernels& _kernels;
    ThreadPool _pool;
    std::function<bool()> _waiting;
    Mailbox _mailbox;
    int64_t _maxRows, _headRows;

    // Taken once, so that a step allocates nothing: each thread's scratch for products, then gate and up.
    size_t _threadScratchBytes = 0;
    std::unique_ptr<uint8_t, Release> _scratch;
    float* _gate = nullptr;  // [rows, hidden]
    float* _up = nullptr;
    std::unique_ptr<std::atomic<int32_t>[]> _computed;  // by block of 32: the hidden rows computed so far

    HostExperts _experts;
    int32_t _expertLayers, _mostExperts;
    std::vector<int32_t> _chosen, _slot, _predicted;  // by pair: the layer's choices, read once
    std::vector<int32_t> _ours;                       // by pair: its expert if the CPU computes it, else -1
    std::vector<int32_t> _there;                      // by pair: the same of those in memory, while others are read
    std::vector<int32_t> _expertBegin;                // see RamExperts::find()
    std::vector<float> _weight;                       // by pair, if weights multiply the input
    ExpertOrders _orders;
    std::vector<int32_t> _ordered;    // their slots, sorted
    std::vector<uint8_t> _isOrdered;  // by expert: 1, or 2 if it was found among the missed ones
    // When the last layer's orders were sent; nothing if that layer missed nothing.
    std::optional<std::chrono::steady_clock::time_point> _instructedAt;
};

}  // namespace sharpi
