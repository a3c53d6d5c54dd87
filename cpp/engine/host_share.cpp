// See host_share.h. Rows are shared out in pieces: most in large ones, which a processor reads at the full speed of memory, the rest in
// small ones, so that all threads end together. A block of 32 hidden rows may so be cut between threads; who computes its last row
// also multiplies and quantizes it. The hidden rows of a layer's chosen experts are shared out as one long matrix; of their output
// rows each thread takes the same of all experts, so that it can sum them.
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
constexpr int kSpinsPerClock = 256;    // while waiting: some 10 microseconds
constexpr std::chrono::milliseconds kYieldInterval{1};
// A question to the driver waits for whoever holds the driver's lock. Another thread may hold it until the GPU is idle, which it never is
// while it waits for this CPU. So nobody asks until something is wrong: what the GPU does between two tickets takes far less.
constexpr std::chrono::seconds kLookInterval{1};

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
    size_t sent, returned, input, inputQuantized, hidden, hiddenQuantized, down, logits, chosen, weight;

    MailboxLayout(const StepLimits& limits, int64_t rows)
        : sent(parts.take(kCounterBytes)), returned(parts.take(kCounterBytes)),
          input(parts.floats(rows * limits.embedding)),
          inputQuantized(parts.take(cpu::quantizedRowsBytes(rows, limits.embedding))),
          hidden(parts.floats(rows * limits.denseHidden)),
          hiddenQuantized(parts.take(cpu::quantizedRowsBytes(rows, limits.denseHidden))),
          down(parts.floats(rows * limits.embedding)), logits(parts.floats(rows * limits.vocab)),
          chosen(parts.take(sizeof(int32_t) * static_cast<size_t>(rows * limits.expertsUsed))),
          weight(parts.floats(rows * limits.expertsUsed)) {}
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

int64_t blocksOf(int64_t elements) { return (elements + kContractBlock - 1) / kContractBlock; }

// Rows [first, last) of a matrix of `rows` are computed, which `computed` counts by block: calls finish(begin, end) for the blocks of
// which these were the last.
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

// Block `first` / 32 of row `row`. By way of a copy: quantizeRow pads to a group of blocks, and the next block may be another thread's.
void quantizeBlock(const cpu::Kernels& kernels, const float* x, const cpu::QuantizedRows& to, int64_t row, int64_t first) {
    int8_t q[8 * kContractBlock];
    float scale[8];
    int16_t sums[16];
    kernels.quantizeRow(x, kContractBlock, q, scale, sums);
    const int64_t block = first / kContractBlock;
    std::memcpy(to.q + row * to.qStride + first, q, kContractBlock);
    to.scale[row * to.scaleStride + block] = scale[0];
    std::memcpy(to.sums + row * to.sumStride + 2 * block, sums, 2 * sizeof(int16_t));
}

// Zeros behind the columns of each row.
void clearPadding(const cpu::QuantizedRows& rows) {
    const int64_t blocks = rows.cols / kContractBlock;
    if (rows.cols == rows.qStride) return;
    for (int64_t t = 0; t < rows.rows; ++t) {
        std::fill(rows.q + t * rows.qStride + rows.cols, rows.q + (t + 1) * rows.qStride, int8_t{0});
        std::fill(rows.scale + t * rows.scaleStride + blocks, rows.scale + (t + 1) * rows.scaleStride, 0.0f);
        std::fill(rows.sums + t * rows.sumStride + 2 * blocks, rows.sums + (t + 1) * rows.sumStride, int16_t{0});
    }
}

}  // namespace

size_t HostShare::mailboxBytes(const StepLimits& limits, int64_t rows) { return MailboxLayout(limits, rows).parts.bytes(); }

HostShare::HostShare(int threads, void* memory, const StepLimits& limits, int64_t rows, std::function<bool()> waiting)
    : _kernels(cpu::kernels()), _pool(threads), _waiting(std::move(waiting)), _maxRows(rows),
      _maxPairs(rows * limits.expertsUsed), _maxExpertHidden(limits.expertHidden) {
    const MailboxLayout layout(limits, rows);
    uint8_t* base = static_cast<uint8_t*>(memory);
    std::memset(base, 0, layout.parts.bytes());
    _mailbox.input = hostRows(base + layout.input, base + layout.inputQuantized, rows, limits.embedding);
    _mailbox.hidden = hostRows(base + layout.hidden, base + layout.hiddenQuantized, rows, limits.denseHidden);
    _mailbox.down = reinterpret_cast<float*>(base + layout.down);
    _mailbox.logits.floats = reinterpret_cast<float*>(base + layout.logits);
    _mailbox.logits.cols = limits.vocab;
    _mailbox.chosen = reinterpret_cast<int32_t*>(base + layout.chosen);
    _mailbox.weight = reinterpret_cast<float*>(base + layout.weight);
    _mailbox.sent = reinterpret_cast<uint32_t*>(base + layout.sent);
    _mailbox.returned = reinterpret_cast<uint32_t*>(base + layout.returned);

    ScratchLayout scratch;
    const int64_t mostCols = std::max({limits.embedding, limits.denseHidden, limits.expertHidden});
    _threadScratchBytes = Allocator::aligned(cpu::matmulScratchBytes(mostCols));
    scratch.take(_threadScratchBytes * static_cast<size_t>(threads));
    const int64_t hidden = std::max(rows * limits.denseHidden, _maxPairs * limits.expertHidden);
    const size_t gate = scratch.floats(hidden), up = scratch.floats(hidden);
    const size_t expertHidden = scratch.take(cpu::quantizedRowsBytes(_maxPairs, limits.expertHidden));
    const size_t expertOut = scratch.floats(_maxPairs * limits.embedding);
    _scratch.reset(static_cast<uint8_t*>(::operator new(scratch.bytes(), std::align_val_t{64})));
    std::memset(_scratch.get(), 0, scratch.bytes());  // so that the first step meets memory that is there
    _gate = reinterpret_cast<float*>(_scratch.get() + gate);
    _up = reinterpret_cast<float*>(_scratch.get() + up);
    _hiddenBuffer = _scratch.get() + expertHidden;
    _expertOut = reinterpret_cast<float*>(_scratch.get() + expertOut);
    const int64_t blocks = std::max(blocksOf(limits.denseHidden), _maxPairs * blocksOf(limits.expertHidden));
    _computed.reset(new std::atomic<int32_t>[static_cast<size_t>(blocks)]);
    for (std::vector<int32_t>* list : {&_choice, &_place, &_rowOf}) list->resize(static_cast<size_t>(_maxPairs));
    _next.resize(static_cast<size_t>(limits.experts));
    _chosen.reserve(static_cast<size_t>(_maxPairs));
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
        finishBlocks(_computed.get(), hidden, first, last, [&](int64_t from, int64_t to) { finishBlock(from, to, reader, rows); });
    };
    _pool.run(pieces.count(), std::ref(piece));
    giveBack(ticket);
}

void HostShare::finishBlock(int64_t first, int64_t last, const Matrix& reader, int64_t rows) {
    const cuda::HostRows& to = _mailbox.hidden;
    const cpu::QuantizedRows quantized = quantizedRows(to, rows);
    const bool isFloat = info(reader.type).isFloat;
    for (int64_t t = 0; t < rows; ++t) {
        float* gate = _gate + t * to.cols + first;
        _kernels.siluMul(gate, _up + t * to.cols + first, last - first);
        if (isFloat) {
            std::memcpy(to.floats + t * to.cols + first, gate, sizeof(float) * static_cast<size_t>(last - first));
        } else {
            quantizeBlock(_kernels, gate, quantized, t, first);
        }
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

void HostShare::requireFit(const MatrixStack& gate, const MatrixStack& up, const MatrixStack& down, int64_t rows, int32_t used) const {
    const int64_t embedding = _mailbox.input.cols, hidden = gate.first.rows;
    require(rows >= 1 && rows <= _maxRows && used >= 1 && rows * used <= _maxPairs, "more choices than the mailbox was made for");
    require(gate.count >= 1 && gate.count <= static_cast<int64_t>(_next.size()) && up.count == gate.count && down.count == gate.count,
            "stacks of another number of experts");
    require(gate.first.cols == embedding && up.first.cols == embedding && down.first.rows == embedding,
            "experts of another width than the mailbox's rows");
    require(hidden >= 1 && hidden <= _maxExpertHidden && up.first.rows == hidden && down.first.cols == hidden,
            "experts of another hidden width");
    const auto isFloat = [](const MatrixStack& stack) { return info(stack.first.type).isFloat; };
    require((isFloat(gate) && isFloat(up)) || _mailbox.input.q, "quantized experts, but no quantized rows");
    require(isFloat(down) || hidden % kContractBlock == 0, "quantized experts read hidden rows that have no such form");
}

void HostShare::experts(const MatrixStack& gate, const MatrixStack& up, const MatrixStack& down, int64_t rows, int32_t used, uint32_t after,
                        uint32_t ticket) {
    requireFit(gate, up, down, rows, used);
    awaitSent(after);
    takeChoices(gate.count, rows, used);
    expertsGated(gate, up, !info(down.first.type).isFloat, rows, used);
    expertsDown(down, rows, used);
    giveBack(ticket);
}

// Sorts the pairs by expert. The choices are read once: they are another processor's, and what was checked must be what is used.
void HostShare::takeChoices(int32_t experts, int64_t rows, int32_t used) {
    const int32_t pairs = static_cast<int32_t>(rows * used);
    std::fill_n(_next.begin(), experts, 0);
    for (int32_t i = 0; i < pairs; ++i) {
        const int32_t expert = __atomic_load_n(_mailbox.chosen + i, __ATOMIC_RELAXED);
        require(expert >= 0 && expert < experts, "a choice that is no expert");
        _choice[static_cast<size_t>(i)] = expert;
        ++_next[static_cast<size_t>(expert)];
    }
    _chosen.clear();
    int32_t begin = 0;
    for (int32_t e = 0; e < experts; ++e) {
        int32_t& next = _next[static_cast<size_t>(e)];
        const int32_t count = next;
        next = begin;
        if (count) _chosen.push_back({e, begin, begin + count});
        begin += count;
    }
    for (int32_t i = 0; i < pairs; ++i) {
        const int32_t place = _next[static_cast<size_t>(_choice[static_cast<size_t>(i)])]++;
        _place[static_cast<size_t>(i)] = place;
        _rowOf[static_cast<size_t>(place)] = i / used;
    }
}

bool HostShare::fewPairs() const {
    return std::all_of(_chosen.begin(), _chosen.end(), [](const ChosenExpert& e) { return e.end - e.begin <= kFewRows; });
}

// silu(gate x) * (up x) of all pairs: to _gate, and where it is read as such, quantized to _hidden.
void HostShare::expertsGated(const MatrixStack& gate, const MatrixStack& up, bool quantized, int64_t rows, int32_t used) {
    const int64_t hidden = gate.first.rows, blocks = blocksOf(hidden), all = hidden * static_cast<int64_t>(_chosen.size());
    _hidden = quantized ? cpu::quantizedRowsOver(_hiddenBuffer, rows * used, hidden) : cpu::QuantizedRows{};
    clearPadding(_hidden);
    for (int64_t i = 0; i < blocks * static_cast<int64_t>(_chosen.size()); ++i) {
        _computed[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
    }
    const cpu::QuantizedRows input = quantizedRows(_mailbox.input, rows);
    const Pieces pieces(all, _pool.threads(), fewPairs() ? kTile / 2 : kTile);
    const auto piece = [&](int64_t i, int worker) {
        const int64_t end = pieces.end(i);
        for (int64_t at = pieces.begin(i); at < end;) {
            const int64_t which = at / hidden, first = at % hidden, last = std::min(hidden, first + end - at);
            const ChosenExpert& expert = _chosen[static_cast<size_t>(which)];
            expertRows(gate, up, input, expert, first, last, worker);
            finishBlocks(_computed.get() + which * blocks, hidden, first, last,
                         [&](int64_t from, int64_t to) { finishExpertBlock(expert, from, to, hidden, quantized); });
            at += last - first;
        }
    };
    _pool.run(pieces.count(), std::ref(piece));
}

// Hidden rows [first, last) of one expert, for the rows that chose it.
void HostShare::expertRows(const MatrixStack& gate, const MatrixStack& up, const cpu::QuantizedRows& input, const ChosenExpert& expert,
                           int64_t first, int64_t last, int worker) {
    cpu::MatmulArgs args;
    args.xFloat = _mailbox.input.floats;
    args.xQuant = &input;
    args.rowIndex = _rowOf.data() + expert.begin;
    args.count = expert.end - expert.begin;
    args.yStride = gate.first.rows;
    args.w = gate.at(expert.index);
    args.y = _gate + expert.begin * args.yStride;
    _kernels.matmul(args, first, last, threadScratch(worker));
    args.w = up.at(expert.index);
    args.y = _up + expert.begin * args.yStride;
    _kernels.matmul(args, first, last, threadScratch(worker));
}

void HostShare::finishExpertBlock(const ChosenExpert& expert, int64_t first, int64_t last, int64_t hidden, bool quantized) {
    for (int64_t pair = expert.begin; pair < expert.end; ++pair) {
        float* gate = _gate + pair * hidden + first;
        _kernels.siluMul(gate, _up + pair * hidden + first, last - first);
        if (quantized) quantizeBlock(_kernels, gate, _hidden, pair, first);
    }
}

// Each task computes its output rows for every pair and sums them by rank, whatever the order of the experts.
void HostShare::expertsDown(const MatrixStack& down, int64_t rows, int32_t used) {
    const int64_t width = down.first.rows;
    const Pieces pieces(width, _pool.threads(), fewPairs() ? kTile / 4 : kTile);
    const auto piece = [&](int64_t i, int worker) {
        const int64_t first = pieces.begin(i), last = pieces.end(i);
        for (const ChosenExpert& expert : _chosen) {
            cpu::QuantizedRows x = _hidden;
            x.q += expert.begin * x.qStride;
            x.scale += expert.begin * x.scaleStride;
            x.sums += expert.begin * x.sumStride;
            cpu::MatmulArgs args;
            args.w = down.at(expert.index);
            args.xFloat = _gate + expert.begin * args.w.cols;
            args.xQuant = &x;
            args.count = expert.end - expert.begin;
            args.y = _expertOut + expert.begin * width;
            args.yStride = width;
            _kernels.matmul(args, first, last, threadScratch(worker));
        }
        for (int64_t t = 0; t < rows; ++t) {
            float* sum = _mailbox.down + t * width + first;
            std::fill_n(sum, last - first, 0.0f);
            for (int64_t k = t * used; k < (t + 1) * used; ++k) {
                const float* answer = _expertOut + _place[static_cast<size_t>(k)] * width + first;
                _kernels.addScaled(sum, answer, _mailbox.weight[k], last - first);
            }
        }
    };
    _pool.run(pieces.count(), std::ref(piece));
}

void HostShare::awaitSent(uint32_t ticket) {
    const auto there = [&] { return __atomic_load_n(_mailbox.sent, __ATOMIC_ACQUIRE) >= ticket; };
    const auto start = std::chrono::steady_clock::now();
    auto nextYield = start + kYieldInterval, nextLook = start + kLookInterval;
    while (!there()) {
        for (int spin = 0; spin < kSpinsPerClock && !there(); ++spin) relax();
        const auto now = std::chrono::steady_clock::now();
        if (now < nextYield) continue;
        std::this_thread::yield();
        nextYield = now + kYieldInterval;
        if (now < nextLook) continue;
        nextLook = now + kLookInterval;
        // The ticket may have come with the last of the GPU's work, after the look at it above.
        if (_waiting && _waiting() && !there()) throw Error(ErrorKind::Internal, "the GPU is done, but has not sent what the CPU waits for");
    }
}

void HostShare::giveBack(uint32_t ticket) { __atomic_store_n(_mailbox.returned, ticket, __ATOMIC_RELEASE); }

void HostShare::abort() noexcept { __atomic_store_n(_mailbox.returned, cuda::kCrossingAborted, __ATOMIC_RELEASE); }

}  // namespace sharpi
