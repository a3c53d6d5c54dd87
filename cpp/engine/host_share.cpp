// See host_share.h. Rows are shared out in pieces: most in large ones, which a processor reads at the full speed of memory, the rest in
// small ones, so that all threads end together. A block of 32 hidden rows may so be cut between threads; who computes its last row
// also multiplies and quantizes it.
#include "engine/host_share.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "core/contract.h"
#include "core/error.h"
#include "engine/scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sharpi {

namespace {

constexpr size_t kCounterBytes = 128;  // each counter is polled by one side and written by the other: a line for itself
constexpr int64_t kTile = 16;          // rows that the CPU's blocked products compute at once
constexpr int64_t kFewRows = 3;        // up to so many rows of activations are multiplied without blocking
constexpr int kSpinsPerLook = 256;     // at the clock, while waiting: some 10 microseconds
constexpr std::chrono::milliseconds kWaitingInterval{1};

int64_t roundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// [0, n) cut into pieces of whole `unit`s, by arithmetic alone: three quarters in about three a thread, the rest in about eight.
class Pieces {
public:
    Pieces(int64_t n, int threads, int64_t unit)
        : _n(n), _large(roundUp(std::max<int64_t>(1, n / (4 * threads)), unit)),
          _small(roundUp(std::max<int64_t>(1, n / (32 * threads)), unit)),
          _largeCount(n * 3 / 4 / _large), _count(_largeCount + (n - _largeCount * _large + _small - 1) / _small) {}

    int64_t count() const { return _count; }
    int64_t begin(int64_t i) const {
        return i < _largeCount ? i * _large : std::min(_largeCount * _large + (i - _largeCount) * _small, _n);
    }
    int64_t end(int64_t i) const { return begin(i + 1); }

private:
    int64_t _n, _large, _small, _largeCount, _count;
};

// Offsets into the mailbox's memory.
struct MailboxLayout {
    ScratchLayout parts;
    size_t sent, returned, input, inputQuantized, hidden, hiddenQuantized, down, logits;

    MailboxLayout(const StepLimits& limits, int64_t rows)
        : sent(parts.take(kCounterBytes)), returned(parts.take(kCounterBytes)),
          input(parts.floats(rows * limits.embedding)),
          inputQuantized(parts.take(cpu::quantizedRowsBytes(rows, limits.embedding))),
          hidden(parts.floats(rows * limits.denseHidden)),
          hiddenQuantized(parts.take(cpu::quantizedRowsBytes(rows, limits.denseHidden))),
          down(parts.floats(rows * limits.embedding)), logits(parts.floats(rows * limits.vocab)) {}
};

cuda::HostRows hostRows(void* floats, void* quantized, int64_t rows, int64_t cols) {
    cuda::HostRows to;
    to.floats = static_cast<float*>(floats);
    to.cols = cols;
    if (cols % kContractBlock != 0) return to;
    const cpu::QuantizedRows form = cpu::quantizedRowsOver(quantized, rows, cols);
    to.q = form.q;
    to.scale = form.scale;
    to.sums = form.sums;
    to.qStride = form.qStride;
    return to;
}

cpu::QuantizedRows quantizedRows(const cuda::HostRows& of, int64_t rows) {
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

void require(bool holds, const char* what) {
    if (!holds) throw Error(ErrorKind::Internal, std::string("the CPU's share of a step: ") + what);
}

}  // namespace

size_t HostShare::mailboxBytes(const StepLimits& limits, int64_t rows) { return MailboxLayout(limits, rows).parts.bytes(); }

HostShare::HostShare(int threads, void* memory, const StepLimits& limits, int64_t rows, std::function<void()> waiting)
    : _kernels(cpu::kernels()), _pool(threads), _waiting(std::move(waiting)), _maxRows(rows) {
    const MailboxLayout layout(limits, rows);
    uint8_t* base = static_cast<uint8_t*>(memory);
    std::memset(base, 0, layout.parts.bytes());
    _mailbox.input = hostRows(base + layout.input, base + layout.inputQuantized, rows, limits.embedding);
    _mailbox.hidden = hostRows(base + layout.hidden, base + layout.hiddenQuantized, rows, limits.denseHidden);
    _mailbox.down = reinterpret_cast<float*>(base + layout.down);
    _mailbox.logits.floats = reinterpret_cast<float*>(base + layout.logits);
    _mailbox.logits.cols = limits.vocab;
    _mailbox.sent = reinterpret_cast<uint32_t*>(base + layout.sent);
    _mailbox.returned = reinterpret_cast<uint32_t*>(base + layout.returned);

    ScratchLayout scratch;
    _threadScratchBytes = Allocator::aligned(cpu::matmulScratchBytes(std::max(limits.embedding, limits.denseHidden)));
    scratch.take(_threadScratchBytes * static_cast<size_t>(threads));
    const size_t gate = scratch.floats(rows * limits.denseHidden), up = scratch.floats(rows * limits.denseHidden);
    _scratch.reset(static_cast<uint8_t*>(::operator new(scratch.bytes(), std::align_val_t{64})));
    std::memset(_scratch.get(), 0, scratch.bytes());  // so that the first step meets memory that is there
    _gate = reinterpret_cast<float*>(_scratch.get() + gate);
    _up = reinterpret_cast<float*>(_scratch.get() + up);
    _computed.reset(new std::atomic<int32_t>[static_cast<size_t>(roundUp(limits.denseHidden, kContractBlock) / kContractBlock)]);
}

void HostShare::begin() {
    _lastSent = _lastReturned = 0;
    __atomic_store_n(_mailbox.sent, 0u, __ATOMIC_RELEASE);
    __atomic_store_n(_mailbox.returned, 0u, __ATOMIC_RELEASE);
}

cpu::MatmulArgs HostShare::product(const Matrix& w, const cuda::HostRows& x, const cpu::QuantizedRows& xQuant, int64_t rows) const {
    require(rows >= 1 && rows <= _maxRows, "more rows than the mailbox was made for");
    require(w.cols == x.cols, "a matrix of another width than the mailbox's rows");
    require(info(w.type).isFloat || x.q, "a quantized matrix, but no quantized rows");
    cpu::MatmulArgs args;
    args.w = w;
    args.xFloat = x.floats;
    args.xQuant = &xQuant;
    args.count = rows;
    return args;
}

void HostShare::gated(const Matrix& gate, const Matrix& up, const Matrix& reader, int64_t rows, int64_t begin, uint32_t after,
                      uint32_t ticket) {
    const int64_t hidden = _mailbox.hidden.cols;
    require(gate.rows == hidden && up.rows == hidden && reader.cols == hidden, "hidden rows of another width than the mailbox's");
    require(begin >= 0 && begin <= hidden && begin % kContractBlock == 0, "hidden rows that begin within a block");
    require(info(reader.type).isFloat || _mailbox.hidden.q, "a quantized matrix reads hidden rows that have no such form");
    const cpu::QuantizedRows input = quantizedRows(_mailbox.input, rows);
    cpu::MatmulArgs gateProduct = product(gate, _mailbox.input, input, rows), upProduct = product(up, _mailbox.input, input, rows);
    gateProduct.y = _gate;
    upProduct.y = _up;
    gateProduct.yStride = upProduct.yStride = hidden;
    for (int64_t block = begin / kContractBlock; block * kContractBlock < hidden; ++block) {
        _computed[static_cast<size_t>(block)].store(0, std::memory_order_relaxed);
    }
    awaitSent(after);
    const Pieces pieces(hidden - begin, _pool.threads(), rows <= kFewRows ? kTile / 2 : kTile);
    const auto piece = [&](int64_t i, int worker) {
        const int64_t first = begin + pieces.begin(i), last = begin + pieces.end(i);
        _kernels.matmul(gateProduct, first, last, threadScratch(worker));
        _kernels.matmul(upProduct, first, last, threadScratch(worker));
        finishPiece(first, last, reader, rows);
    };
    _pool.run(pieces.count(), std::ref(piece));
    giveBack(ticket);
}

// Hidden rows [first, last) are computed: finishes the blocks of which these were the last.
void HostShare::finishPiece(int64_t first, int64_t last, const Matrix& reader, int64_t rows) {
    while (first < last) {
        const int64_t block = first / kContractBlock;
        const int64_t blockBegin = block * kContractBlock, blockEnd = std::min(blockBegin + kContractBlock, _mailbox.hidden.cols);
        const int32_t ours = static_cast<int32_t>(std::min(last, blockEnd) - first);
        const int32_t before = _computed[static_cast<size_t>(block)].fetch_add(ours, std::memory_order_acq_rel);
        if (before + ours == blockEnd - blockBegin) finishBlock(blockBegin, blockEnd, reader, rows);
        first += ours;
    }
}

void HostShare::finishBlock(int64_t first, int64_t last, const Matrix& reader, int64_t rows) {
    const cuda::HostRows& to = _mailbox.hidden;
    const bool isFloat = info(reader.type).isFloat;
    for (int64_t t = 0; t < rows; ++t) {
        float* gate = _gate + t * to.cols + first;
        _kernels.siluMul(gate, _up + t * to.cols + first, last - first);
        if (isFloat) {
            std::memcpy(to.floats + t * to.cols + first, gate, sizeof(float) * static_cast<size_t>(last - first));
            continue;
        }
        // By way of a copy: quantizeRow pads to a group of blocks, and the next block may be another's.
        int8_t q[8 * kContractBlock];
        float scale[8];
        int16_t sums[16];
        _kernels.quantizeRow(gate, kContractBlock, q, scale, sums);
        const int64_t block = first / kContractBlock;
        std::memcpy(to.q + t * to.qStride + first, q, kContractBlock);
        to.scale[t * (to.qStride / kContractBlock) + block] = scale[0];
        std::memcpy(to.sums + t * (to.qStride / (kContractBlock / 2)) + 2 * block, sums, 2 * sizeof(int16_t));
    }
}

void HostShare::multiply(const Matrix& w, const cuda::HostRows& x, int64_t rows, int64_t begin, float* y, int64_t yStride, uint32_t after) {
    const cpu::QuantizedRows quantized = quantizedRows(x, rows);
    cpu::MatmulArgs args = product(w, x, quantized, rows);
    args.w.rows = w.rows - begin;
    args.w.data = w.data + static_cast<size_t>(begin) * rowBytes(w.type, w.cols);
    args.y = y;
    args.yStride = yStride;
    awaitSent(after);
    const Pieces pieces(args.w.rows, _pool.threads(), rows <= kFewRows ? kTile / 4 : kTile);
    const auto piece = [&](int64_t i, int worker) { _kernels.matmul(args, pieces.begin(i), pieces.end(i), threadScratch(worker)); };
    _pool.run(pieces.count(), std::ref(piece));
}

void HostShare::down(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket) {
    require(begin >= 0 && begin <= w.rows && w.rows - begin <= _mailbox.input.cols, "more output rows than the mailbox was made for");
    multiply(w, _mailbox.hidden, rows, begin, _mailbox.down, w.rows - begin, after);
    giveBack(ticket);
}

void HostShare::head(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket) {
    require(begin >= 0 && begin <= w.rows && w.rows == _mailbox.logits.cols, "logits of another number than the mailbox's");
    multiply(w, _mailbox.input, rows, begin, _mailbox.logits.floats + begin, w.rows, after);
    giveBack(ticket);
}

void HostShare::awaitSent(uint32_t ticket) {
    const auto there = [&] { return __atomic_load_n(_mailbox.sent, __ATOMIC_ACQUIRE) >= ticket; };
    auto next = std::chrono::steady_clock::now() + kWaitingInterval;
    while (!there()) {
        for (int spin = 0; spin < kSpinsPerLook && !there(); ++spin) relax();
        if (std::chrono::steady_clock::now() < next) continue;
        if (_waiting) _waiting();
        std::this_thread::yield();
        next = std::chrono::steady_clock::now() + kWaitingInterval;
    }
}

void HostShare::giveBack(uint32_t ticket) { __atomic_store_n(_mailbox.returned, ticket, __ATOMIC_RELEASE); }

void HostShare::abort() noexcept { __atomic_store_n(_mailbox.returned, cuda::kCrossingAborted, __ATOMIC_RELEASE); }

}  // namespace sharpi
