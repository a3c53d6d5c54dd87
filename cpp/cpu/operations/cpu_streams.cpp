// See cpu_streams.h.
#include "cpu/operations/cpu_streams.h"

#include <algorithm>
#include <cstring>

#include "core/rules/streams.h"

namespace sharpi {

namespace {

// Calls body(t, worker) for each row of the batch.
template <typename Body> void forRows(CpuWork& work, const Body& body) {
    const int64_t grain = std::max<int64_t>(1, CpuWork::kElementGrain / (work.limits.streams * work.limits.embedding));
    const int64_t rows = work.rows(), pieces = std::clamp<int64_t>(rows / grain, 1, work.pool.threads());
    work.pool.run(pieces, [&](int64_t piece, int worker) {
        for (int64_t t = rows * piece / pieces; t < rows * (piece + 1) / pieces; ++t) body(t, worker);
    });
}

// Residual row t = the sum of the streams with these weights.
void weighStreams(CpuWork& work, int64_t t, const float* weights, int32_t count) {
    const int64_t width = work.limits.embedding;
    const float* const streams = work.at(RowBuffer::Streams) + t * count * width;
    float* const x = work.at(RowBuffer::Residual) + t * width;
    std::memset(x, 0, sizeof(float) * static_cast<size_t>(width));
    for (int32_t a = 0; a < count; ++a) work.kernels.addScaled(x, streams + a * width, weights[a], width);
}

}  // namespace

void CpuStreams::begin() {
    const int64_t width = _work.limits.embedding, count = _work.limits.streams;
    const float* const x = _work.at(RowBuffer::Residual);
    float* const streams = _work.at(RowBuffer::Streams);
    forRows(_work, [&](int64_t t, int) {
        for (int64_t a = 0; a < count; ++a)
            std::memcpy(streams + (t * count + a) * width, x + t * width, sizeof(float) * static_cast<size_t>(width));
    });
}

void CpuStreams::norm(float eps, const Weight&) {
    const int64_t all = _work.limits.streams * _work.limits.embedding;
    _work.norm(_work.at(RowBuffer::Streams), nullptr, eps, _work.rows(), all, _work.floats(_work.scratch().streams));
}

void CpuStreams::enter(const StreamsCall& call) {
    const int32_t n = call.count, all = n * (2 + n);
    float* const mixes = _work.at(RowBuffer::StreamMix);
    forRows(_work, [&](int64_t t, int) {
        float* const m = mixes + t * all;
        for (int32_t a = 0; a < n; ++a) m[a] = streamInput(m[a], call.scale[0], call.base[a], call.epsilon);
        weighStreams(_work, t, m, n);
        for (int32_t b = n; b < 2 * n; ++b) m[b] = 2.0f * streamInput(m[b], call.scale[1], call.base[b], 0.0f);
        for (int32_t i = 2 * n; i < all; ++i) m[i] = fmaf(m[i], call.scale[2], call.base[i]);
        mixOfStreams(m + 2 * n, n, call.iterations, call.epsilon);
    });
}

void CpuStreams::leave(const StreamsCall& call) {
    const int64_t n = call.count, width = _work.limits.embedding;
    const float *const mixes = _work.at(RowBuffer::StreamMix), *const part = _work.at(RowBuffer::PartOut);
    float* const streams = _work.at(RowBuffer::Streams);
    forRows(_work, [&](int64_t t, int worker) {
        const float* const m = mixes + t * n * (2 + n);
        float *const row = streams + t * n * width, *const next = static_cast<float*>(_work.threadScratch(worker));
        const size_t bytes = sizeof(float) * static_cast<size_t>(n * width);
        std::memset(next, 0, bytes);
        for (int64_t b = 0; b < n; ++b) {
            _work.kernels.addScaled(next + b * width, part + t * width, m[n + b], width);
            for (int64_t a = 0; a < n; ++a)
                _work.kernels.addScaled(next + b * width, row + a * width, m[2 * n + a * n + b], width);
        }
        std::memcpy(row, next, bytes);
    });
}

void CpuStreams::end(const StreamsCall& call) {
    const int32_t n = call.count;
    float* const mixes = _work.at(RowBuffer::StreamMix);
    forRows(_work, [&](int64_t t, int) {
        float* const m = mixes + t * n;
        for (int32_t a = 0; a < n; ++a) m[a] = streamInput(m[a], call.scale[0], call.base[a], call.epsilon);
        weighStreams(_work, t, m, n);
    });
}

}  // namespace sharpi
