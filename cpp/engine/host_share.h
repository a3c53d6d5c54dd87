// The CPU's part of a step that runs on a GPU, computed from the mapped file: the last rows of feed-forward matrices and of the
// output head that are not resident, while the GPU brings over and multiplies the others; and the experts that a layer's tokens
// chose, where its stacks are not resident. By core/contract.h the bits are those of one processor.
//
// Rows of activations cross through a mailbox in pinned memory (kernels/crossing.h). Who waits for what is numbered: each
// direction's tickets rise through a step, so that a captured step carries the same numbers each time.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "engine/backend.h"
#include "kernels/crossing.h"

namespace sharpi {

struct Mailbox {
    cuda::HostRows input;   // [rows, embedding]: a layer's normalized rows, from the GPU
    cuda::HostRows hidden;  // [rows, hidden]: each processor writes its columns
    float* down = nullptr;  // [rows, count]: what the CPU adds to the last `count` columns of x
    int32_t* chosen = nullptr;  // [rows, used]: the experts of each row by rank, from the GPU
    float* weight = nullptr;    // [rows, used]: and what their answers are multiplied with
    cuda::HostRows logits;  // [rows, vocab], as floats: the CPU writes its columns
    uint32_t* sent = nullptr;      // the GPU's counter
    uint32_t* returned = nullptr;  // the CPU's
};

class HostShare {
public:
    // Bytes of the mailbox, for steps of up to `rows` rows.
    static size_t mailboxBytes(const StepLimits& limits, int64_t rows);
    // memory: pinned, mailboxBytes() of it, aligned to 4096; zeroed here. threads: the caller included.
    // waiting: called every second while the CPU waits for the GPU. True: the GPU has done all that it was given, so that a ticket
    // which is still missing then will never come, and the wait ends in Error(Internal). Throws if the GPU has failed.
    HostShare(int threads, void* memory, const StepLimits& limits, int64_t rows, std::function<bool()> waiting);

    const Mailbox& mailbox() const { return _mailbox; }

    // Before a step, while the GPU does nothing that reads the mailbox: counters and tickets start again.
    void begin();
    uint32_t nextSent() { return ++_lastSent; }
    uint32_t nextReturned() { return ++_lastReturned; }

    // While one lives, waiting threads do not sleep. For the length of a step.
    class Awake {
    public:
        explicit Awake(HostShare& share) : _awake(share._pool) {}
    private:
        ThreadPool::Awake _awake;
    };

    // Waits for `after` from the GPU, then writes columns [begin, gate.rows) of silu(gate x) * (up x), x the mailbox's input, to its
    // hidden rows, in the form that `reader` (the matrix that reads them) wants, and returns `ticket`. gate and up: as in the file.
    void gated(const Matrix& gate, const Matrix& up, const Matrix& reader, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket);
    // Waits for `after` (0: nothing), then writes rows [begin, w.rows) of w hidden to the mailbox's `down`, and returns `ticket`.
    void down(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket);
    // Waits for `after`, then writes rows [begin, w.rows) of w input to the mailbox's `logits`, and returns `ticket`.
    void head(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket);
    // Waits for `after`, then writes to the mailbox's `down` [rows, embedding] what the experts make of its input: for each row the sum
    // over its `used` choices by rank of weight * down(silu(gate x) * (up x)), and returns `ticket`. The stacks: as in the file. An
    // expert that is read is read once, whatever the number of rows that chose it. Throws Error(Internal) where a choice is no expert.
    void experts(const MatrixStack& gate, const MatrixStack& up, const MatrixStack& down, int64_t rows, int32_t used, uint32_t after,
                 uint32_t ticket);
    // After a failure: every kernel that waits goes on.
    void abort() noexcept;

private:
    struct Release {
        void operator()(uint8_t* bytes) const { ::operator delete(bytes, std::align_val_t{64}); }
    };

    // An expert that was chosen, and its pairs (a row that chose it, at some rank): [begin, end) in the order of experts.
    struct ChosenExpert {
        int32_t index, begin, end;
    };

    void awaitSent(uint32_t ticket);
    void giveBack(uint32_t ticket);
    // Rows [begin, w.rows) of w x, once `after` has come: row t at y + t * yStride.
    void multiply(const Matrix& w, const cuda::HostRows& x, int64_t rows, int64_t begin, float* y, int64_t yStride, uint32_t after);
    // w's product with rows of the mailbox; y is left to the caller.
    cpu::MatmulArgs product(const Matrix& w, const cuda::HostRows& x, const cpu::QuantizedRows& xQuant, int64_t rows) const;
    void finishBlock(int64_t first, int64_t last, const Matrix& reader, int64_t rows);
    void requireFit(const MatrixStack& gate, const MatrixStack& up, const MatrixStack& down, int64_t rows, int32_t used) const;
    void takeChoices(int32_t experts, int64_t rows, int32_t used);
    void expertsGated(const MatrixStack& gate, const MatrixStack& up, bool quantized, int64_t rows, int32_t used);
    void expertRows(const MatrixStack& gate, const MatrixStack& up, const cpu::QuantizedRows& input, const ChosenExpert& expert,
                    int64_t first, int64_t last, int worker);
    void finishExpertBlock(const ChosenExpert& expert, int64_t first, int64_t last, int64_t hidden, bool quantized);
    void expertsDown(const MatrixStack& down, int64_t rows, int32_t used);
    bool fewPairs() const;  // for each expert: products are not blocked
    uint8_t* threadScratch(int worker) const { return _scratch.get() + static_cast<size_t>(worker) * _threadScratchBytes; }

    const cpu::Kernels& _kernels;
    ThreadPool _pool;
    std::function<bool()> _waiting;
    Mailbox _mailbox;
    int64_t _maxRows;
    uint32_t _lastSent = 0, _lastReturned = 0;

    // Taken once, so that a step allocates nothing: each thread's scratch for products, then gate and up.
    size_t _threadScratchBytes = 0;
    std::unique_ptr<uint8_t, Release> _scratch;
    float* _gate = nullptr;  // [rows, hidden], or [pairs, an expert's hidden]
    float* _up = nullptr;
    std::unique_ptr<std::atomic<int32_t>[]> _computed;  // hidden rows computed so far of each block of 32, expert by expert

    // Experts. A pair's place is its index in the order of experts.
    int64_t _maxPairs = 0, _maxExpertHidden = 0;
    void* _hiddenBuffer = nullptr;
    cpu::QuantizedRows _hidden;    // [pairs, hidden] of the layer at work, where its down is quantized
    float* _expertOut = nullptr;   // [pairs, embedding]
    std::vector<int32_t> _choice;  // by row and rank
    std::vector<int32_t> _place;   // of the pair of each row and rank
    std::vector<int32_t> _rowOf;   // each pair's row
    std::vector<int32_t> _next;    // of each expert: where its next pair goes
    std::vector<ChosenExpert> _chosen;
};

}  // namespace sharpi
