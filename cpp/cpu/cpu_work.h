// What the CPU's operations share: the kernels, the threads, the buffers and the batch at hand; and how matrices are
// multiplied wherever they are.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "core/thread_pool.h"
#include "cpu/kernels.h"
#include "memory/kv_cache.h"
#include "memory/stream/weight_stream.h"
#include "operations/batch.h"
#include "operations/host_clock.h"
#include "operations/operations.h"

namespace sharpi {

// Where the CPU's buffers lie in its working memory, in bytes. Made from the limits alone, so that planning counts the
// same.
struct CpuScratch {
    CpuScratch(int threads, const StepLimits& limits);

    RowBuffers rows;
    size_t normed = 0, block = 0;  // [rows, embedding]
    size_t attended = 0;           // [rows, width of a mixer's output]
    size_t queryGate = 0;          // [rows, width of the queries]
    size_t plainQueries = 0;       // of latent attention: [rows * heads, elements that are not rotated]
    size_t streams = 0;            // of hyper-connections, normalized: [rows, streams * embedding]
    size_t joined = 0;             // [rows, 2 * embedding]
    size_t sharedScale = 0;        // [rows]
    size_t logits = 0;             // [headRows, vocab]
    size_t quantized = 0;          // the int8 form of the rows at hand
    size_t quantizedHidden = 0;    // that of the pairs' hidden rows
    size_t threads = 0, threadStride = 0;
    int64_t headRows = 0;
    size_t total = 0;
};

// The rows [begin, end) of the batch that belong to one sequence.
struct SequenceRows {
    int64_t begin = 0, end = 0;
    std::vector<const int32_t*> pageTables;  // by KvPages::list
    std::vector<StateStep> steps;            // in rows of the sequence; none if the model has no recurrent state
};

class CpuWork {
public:
    CpuWork(int threads, HostClock& ofBackend) : kernels(cpu::kernels()), pool(threads), clock(ofBackend) {}

    const cpu::Kernels& kernels;
    ThreadPool pool;
    HostClock& clock;
    WeightStream* stream = nullptr;  // if weights are not in the mapped file
    StepLimits limits;
    const Batch* batch = nullptr;
    std::vector<SequenceRows> sequences;

    // memory: CpuScratch(threads, limits).total bytes.
    void takeBuffers(const StepLimits& limits, uint8_t* memory);
    void begin(const Batch& batch, const KvCache& kv);
    int64_t rows() const { return batch->size(); }
    const CpuScratch& scratch() const { return *_scratch; }
    float* at(RowBuffer buffer) const { return floats(_scratch->rows[buffer]); }
    float* floats(size_t offset) const { return reinterpret_cast<float*>(_memory + offset); }
    void* threadScratch(int worker) const {
        return _memory + _scratch->threads + static_cast<size_t>(worker) * _scratch->threadStride;
    }

    // The batch's tokens' rows of a table.
    void readRows(const Weight& table, float* out, int64_t outStride);
    void norm(const float* x, const NormCall& norm, int64_t rows, int64_t n, float* y);
    // An RMS norm.
    void norm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y);
    void gatedActivation(Activation activation, float* gate, const float* up, int64_t n);
    // Over n floats: x += y, x *= factor, x = portableSoftcap(x, cap).
    void add(float* x, const float* y, int64_t n);
    void multiplyRows(float* x, float factor, int64_t n);
    void softcap(float* x, float cap, int64_t n);
    // The int8 form of rows, in the buffer at `offset`.
    cpu::QuantizedRows quantize(const float* x, int64_t count, int64_t cols, size_t offset);
    // One of several products that read the same input: y[t, :] = w x[t, :] + bias.
    struct Output {
        const Weight& w;
        const float* bias = nullptr;
        float* y = nullptr;  // [count, w.rows]
    };
    void linear(const float* x, int64_t count, const std::vector<Output>& outputs);
    // Of a matrix with the same number of rows for each head: row t's piece of head h is x[t * heads + h], and row i of
    // the head's gives y[(t * heads + h) * stride + i].
    struct HeadOutput {
        const Weight& w;
        int32_t heads = 0;
        float* y = nullptr;
        int64_t stride = 0;
    };
    void linearByHead(const float* x, int64_t count, const HeadOutput& output);
    void multiply(const std::vector<cpu::MatmulArgs>& jobs);
    // Calls body(part, first) for each part of a stack that is in memory at once: element i is expert first + i.
    template <typename Body> void forExperts(const WeightStack& stack, const Body& body) {
        if (!stack.resident()) return stream->forExperts(stack.group, body);
        if (stream) stream->arrive(stack.group);
        body(stack, 0);
    }
    // Runs body(begin, end) over [0, n) in pieces of at least `grain`.
    template <typename Body> void forRanges(int64_t n, int64_t grain, const Body& body) {
        const int64_t pieces = std::clamp<int64_t>(n / grain, 1, pool.threads());
        pool.run(pieces, [&](int64_t piece, int) { body(n * piece / pieces, n * (piece + 1) / pieces); });
    }
    static constexpr int64_t kElementGrain = 8192;  // below this a loop is not worth waking threads for

private:
    // Calls body(part, rowBegin) for each part of a matrix that is in memory at once.
    template <typename Body> void forParts(const Weight& w, const Body& body) {
        if (!w.resident()) return stream->forPieces(w.group, w.member, body);
        if (stream) stream->arrive(w.group);
        body(w, 0);
    }
    std::unique_ptr<CpuScratch> _scratch;
    uint8_t* _memory = nullptr;
};

}  // namespace sharpi
