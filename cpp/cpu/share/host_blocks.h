// What HostShare and HostExperts have in common: how rows are divided between threads, and how a block of 32 hidden
// rows is finished when its last row is computed. For their sources alone.
//
// Rows are divided into pieces: most of them large, which a core reads at the full speed of memory; the rest small, so
// that all threads end together. So a block may be cut between threads; the thread that computes its last row also
// multiplies and quantizes it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/contract.h"
#include "core/error.h"
#include "core/host_rows.h"
#include "cpu/kernels.h"

namespace sharpi::host {

constexpr int64_t kTile = cpu::kMatmulTileRows;
constexpr int64_t kFewRows = 2;      // up to this many rows of activations, products need no tiles
constexpr int64_t kFewRowsUnit = 4;  // then pieces are whole numbers of this many rows, or of twice as many

inline void require(bool holds, const char* what) {
    if (!holds) throw Error(ErrorKind::Internal, std::string("the CPU's share of a step: ") + what);
}

// For a thread that waits for another: lets the core's other hardware thread go first.
inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

inline int64_t blocksOf(int64_t elements) { return (elements + kContractBlock - 1) / kContractBlock; }

// [0, n) cut into pieces of whole `unit`s, by arithmetic alone: three quarters of it in about three pieces a thread,
// the rest in about eight.
class Pieces {
public:
    Pieces(int64_t n, int threads, int64_t unit)
        : _n(n),
          _large(roundUp(std::max<int64_t>(1, n / (4 * threads)), unit)),
          _small(roundUp(std::max<int64_t>(1, n / (32 * threads)), unit)),
          _largeCount(n * 3 / 4 / _large),
          _count(_largeCount + (n - _largeCount * _large + _small - 1) / _small) {}

    int64_t count() const { return _count; }
    int64_t begin(int64_t i) const {
        return i < _largeCount ? i * _large : std::min(_largeCount * _large + (i - _largeCount) * _small, _n);
    }
    int64_t end(int64_t i) const { return begin(i + 1); }

private:
    static int64_t roundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

    int64_t _n, _large, _small, _largeCount, _count;
};

// Notes that rows [first, last) of a matrix of `rows` rows are computed; `computed` counts them by block. Calls
// finish(begin, end) for each block that these rows complete.
template <typename Finish>
void finishBlocks(std::atomic<int32_t>* computed, int64_t rows, int64_t first, int64_t last, const Finish& finish) {
    while (first < last) {
        const int64_t begin = first / kContractBlock * kContractBlock, end = std::min(begin + kContractBlock, rows);
        const int32_t ours = static_cast<int32_t>(std::min(last, end) - first);
        const int32_t before = computed[begin / kContractBlock].fetch_add(ours, std::memory_order_acq_rel);
        if (before + ours == end - begin) finish(begin, end);
        first += ours;
    }
}

// Quantizes block `first` / 32 of row `row`. It goes through a copy, because quantizeRow pads to a group of blocks and
// the next block may be another thread's.
inline void quantizeBlock(const cpu::Kernels& kernels, const float* x, const cpu::QuantizedRows& to, int64_t row,
                          int64_t first) {
    int8_t q[8 * kContractBlock];
    float scale[8];
    int16_t sums[16];
    kernels.quantizeRow(x, kContractBlock, q, scale, sums);
    const int64_t block = first / kContractBlock;
    std::memcpy(to.q + row * to.qStride + first, q, kContractBlock);
    to.scale[row * to.scaleStride + block] = scale[0];
    std::memcpy(to.sums + row * to.sumStride + 2 * block, sums, 2 * sizeof(int16_t));
}

// Rows in a mailbox, in the form that the CPU's products read.
inline cpu::QuantizedRows quantizedRows(const HostRows& of, int64_t rows) {
    cpu::QuantizedRows form;
    form.rows = rows;
    form.cols = of.cols;
    form.qStride = of.qStride;
    form.scaleStride = of.qStride / kContractBlock;
    form.sumStride = of.qStride / (kContractBlock / 2);
    form.q = of.q;
    form.scale = of.scale;
    form.sums = of.sums;
    return form;
}

}  // namespace sharpi::host
