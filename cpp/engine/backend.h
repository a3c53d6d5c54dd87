// The operations that ForwardPass is written in. A backend runs them on its processor, over memory that its
// processor can read; nothing above this interface knows which one it is. Rows are row-major and contiguous.
#pragma once

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "memory/device_memory.h"
#include "memory/kv_pages.h"

namespace sharpi {

// One of several products that read the same input: y[t, :] = w x[t, :] + bias.
struct Linear {
    Matrix w;
    const float* bias = nullptr;  // [w.rows], may be nullptr
    float* y = nullptr;           // [T, w.rows]
};

struct RopeTable {
    const float* cos = nullptr;  // [context, dims / 2]
    const float* sin = nullptr;
    int32_t dims = 0;
    bool adjacent = false;
};

// The rows [begin, end) of a batch that belong to one sequence.
struct SequenceRows {
    int64_t begin = 0, end = 0;
    const int32_t* pageTable = nullptr;
};

struct ExpertWeights {
    std::vector<Matrix> gate, up, down;  // one each per expert
    Matrix router;
    int32_t used = 0;
    bool renormalize = true;
    float weightScale = 1.0f;
};

class Backend {
public:
    virtual ~Backend() = default;
    virtual const char* name() const = 0;
    virtual DeviceMemory& memory() = 0;

    // out[t, :] = row tokens[t] of table, as floats
    virtual void embed(const Matrix& table, const int32_t* tokens, int64_t count, float* out) = 0;
    // Each of `rows` rows of n by itself; y may be x.
    virtual void rmsNorm(const float* x, const float* weight, float eps, int64_t rows, int64_t n, float* y) = 0;
    virtual void linear(const float* x, int64_t count, const std::vector<Linear>& outputs) = 0;
    // Rotates `heads` heads of headDim in each row, in place.
    virtual void rope(float* x, const int32_t* positions, int64_t count, int32_t heads, int32_t headDim, const RopeTable& table) = 0;
    // Writes rows of keys and values [count, kvHeads * headDim] to their positions' places.
    virtual void storeKv(const float* k, const float* v, const int32_t* positions, const SequenceRows& rows, const KvPages& pages) = 0;
    // Causal attention of all rows over their sequences. q, out: [T, heads * headDim].
    virtual void attention(const float* q, const int32_t* positions, const std::vector<SequenceRows>& sequences,
                           int32_t heads, float scale, const KvPages& pages, float* out) = 0;
    // gate = silu(gate) * up
    virtual void siluMul(float* gate, const float* up, int64_t n) = 0;
    // x += y
    virtual void add(float* x, const float* y, int64_t n) = 0;
    // y[t, :] = sum over the chosen experts of weight * down(silu(gate x) * up x), summed by rank. y may not be x.
    virtual void experts(const float* x, int64_t count, const ExpertWeights& weights, float* y) = 0;
};

}  // namespace sharpi
