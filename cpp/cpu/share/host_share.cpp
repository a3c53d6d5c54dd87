// See host_share.h.
#include "cpu/share/host_share.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "cpu/share/host_blocks.h"
#include "operations/scratch.h"

namespace sharpi {

using namespace host;

namespace {

constexpr size_t kCounterBytes = 128;  // one side polls a counter and the other writes it, so it has its own cache line
constexpr int kSpinsPerClock = 256;    // about 10 microseconds
constexpr std::chrono::milliseconds kYieldInterval{1};
// A call of the driver waits for the driver's lock. Another thread may hold it until the GPU is idle, which it never is
// while it waits for this CPU. So the driver is not asked until something must be wrong: the GPU's work between two
// tickets takes far less than this.
constexpr std::chrono::seconds kLookInterval{1};

using Clock = std::chrono::steady_clock;

int64_t expertPairs(const StepLimits& limits, int64_t rows) {
    return limits.expertLayerCount() > 0 ? rows * limits.expertsUsed : 0;
}

// Offsets into the mailbox's memory.
struct MailboxLayout {
    ScratchLayout parts;
    size_t sent, instructed, returned, input, inputQuantized, hidden, hiddenQuantized, down, logits, orders, choices,
        answers;

    MailboxLayout(const StepLimits& limits, int64_t rows)
        : sent(parts.take(kCounterBytes)),
          instructed(parts.take(kCounterBytes)),
          returned(parts.take(kCounterBytes)),
          input(parts.floats(rows * limits.embedding)),
          inputQuantized(parts.take(cpu::quantizedRowsBytes(rows, limits.embedding))),
          hidden(parts.floats(rows * limits.denseHidden)),
          hiddenQuantized(parts.take(cpu::quantizedRowsBytes(rows, limits.denseHidden))),
          down(parts.floats(rows * limits.embedding)),
          logits(parts.floats(std::min(rows, limits.headRows) * limits.vocab)),
          orders(parts.take(sizeof(ExpertOrders))),
          choices(parts.take(sizeof(int32_t) * static_cast<size_t>(Mailbox::kChoiceLists * limits.expertLayerCount() *
                                                                   expertPairs(limits, rows)))),
          answers(parts.floats(expertPairs(limits, rows) * limits.expertWidth())) {}
};

HostRows hostRows(void* floats, void* quantized, int64_t rows, int64_t cols) {
    HostRows to;
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

void requireWhole(const ExpertFetch& fetch) {
    require(fetch.expert >= 0 && fetch.slot >= 0 && fetch.gate && fetch.up && fetch.down,
            "an order lacks its expert, slot or addresses");
}

}  // namespace

HostChoices Mailbox::choicesOf(int32_t expertLayer) const {
    int32_t* const area = choices + expertLayer * kChoiceLists * pairs;
    return {area, area + pairs, area + 2 * pairs, reinterpret_cast<float*>(area + 3 * pairs)};
}

size_t HostShare::mailboxBytes(const StepLimits& limits, int64_t rows) {
    return MailboxLayout(limits, rows).parts.bytes();
}

HostShare::HostShare(int threads, void* memory, const StepLimits& limits, int64_t rows, std::function<bool()> waiting)
    : _kernels(cpu::kernels()),
      _pool(threads),
      _waiting(std::move(waiting)),
      _maxRows(rows),
      _headRows(std::min(rows, limits.headRows)),
      _experts(_pool, limits, rows),
      _expertLayers(limits.expertLayerCount()),
      _mostExperts(limits.experts) {
    const MailboxLayout layout(limits, rows);
    uint8_t* base = static_cast<uint8_t*>(memory);
    std::memset(base, 0, layout.parts.bytes());
    _mailbox.input = hostRows(base + layout.input, base + layout.inputQuantized, rows, limits.embedding);
    _mailbox.expertInput = hostRows(base + layout.input, base + layout.inputQuantized, rows, limits.expertWidth());
    _mailbox.hidden = hostRows(base + layout.hidden, base + layout.hiddenQuantized, rows, limits.denseHidden);
    _mailbox.down = reinterpret_cast<float*>(base + layout.down);
    _mailbox.logits.floats = reinterpret_cast<float*>(base + layout.logits);
    _mailbox.logits.cols = limits.vocab;
    _mailbox.answers = reinterpret_cast<float*>(base + layout.answers);
    _mailbox.orders = reinterpret_cast<ExpertOrders*>(base + layout.orders);
    _mailbox.choices = reinterpret_cast<int32_t*>(base + layout.choices);
    _mailbox.pairs = expertPairs(limits, rows);
    _mailbox.sent = reinterpret_cast<uint32_t*>(base + layout.sent);
    _mailbox.instructed = reinterpret_cast<uint32_t*>(base + layout.instructed);
    _mailbox.returned = reinterpret_cast<uint32_t*>(base + layout.returned);

    ScratchLayout scratch;
    _threadScratchBytes = Allocator::aligned(cpu::matmulScratchBytes(std::max(limits.embedding, limits.denseHidden)));
    scratch.take(_threadScratchBytes * static_cast<size_t>(threads));
    const size_t gate = scratch.floats(rows * limits.denseHidden), up = scratch.floats(rows * limits.denseHidden);
    _scratch.reset(static_cast<uint8_t*>(::operator new(scratch.bytes(), std::align_val_t{64})));
    std::memset(_scratch.get(), 0, scratch.bytes());  // so that the system hands out the pages before the first step
    _gate = reinterpret_cast<float*>(_scratch.get() + gate);
    _up = reinterpret_cast<float*>(_scratch.get() + up);
    _computed.reset(new std::atomic<int32_t>[static_cast<size_t>(blocksOf(limits.denseHidden))]);
    for (std::vector<int32_t>* list : {&_chosen, &_slot, &_predicted, &_ours, &_there})
        list->resize(static_cast<size_t>(_mailbox.pairs));
    _weight.resize(static_cast<size_t>(_mailbox.pairs));
    _ordered.resize(kMaxExpertFetches);
    _isOrdered.resize(static_cast<size_t>(_mostExperts));
}

void HostShare::begin() {
    _instructedAt.reset();
    for (uint32_t* counter : {_mailbox.sent, _mailbox.instructed, _mailbox.returned})
        __atomic_store_n(counter, 0u, __ATOMIC_RELEASE);
}

cpu::MatmulArgs HostShare::product(const Matrix& w, const HostRows& x, const cpu::QuantizedRows& xQuant,
                                   int64_t rows) const {
    require(rows >= 1 && rows <= _maxRows, "more rows than the mailbox has room for");
    require(w.cols == x.cols, "a matrix's width differs from the mailbox rows'");
    require(info(w.type).isFloat || x.q, "a quantized matrix, but no quantized rows");
    cpu::MatmulArgs args;
    args.w = w;
    args.xFloat = x.floats;
    args.xQuant = &xQuant;
    args.count = rows;
    return args;
}

void HostShare::gated(const HostGated& layer, const Matrix& reader, int64_t rows, int64_t begin, uint32_t after,
                      uint32_t ticket) {
    const Matrix &gate = layer.gate, &up = layer.up;
    const int64_t hidden = _mailbox.hidden.cols;
    require(gate.rows == hidden && (up.rows == hidden || !layer.gated()) && reader.cols == hidden,
            "the hidden rows' width differs from the mailbox's");
    require(begin >= 0 && begin <= hidden && begin % kContractBlock == 0, "the hidden rows begin within a block");
    require(info(reader.type).isFloat || _mailbox.hidden.q,
            "a quantized matrix reads hidden rows that cannot be quantized");
    const cpu::QuantizedRows input = quantizedRows(_mailbox.input, rows);
    cpu::MatmulArgs gateProduct = product(gate, _mailbox.input, input, rows), upProduct;
    if (layer.gated()) upProduct = product(up, _mailbox.input, input, rows);
    gateProduct.bias = layer.gateBias;
    upProduct.bias = layer.upBias;
    gateProduct.y = _gate;
    upProduct.y = _up;
    gateProduct.yStride = upProduct.yStride = hidden;
    for (int64_t block = begin / kContractBlock; block * kContractBlock < hidden; ++block) {
        _computed[static_cast<size_t>(block)].store(0, std::memory_order_relaxed);
    }
    _instructedAt.reset();
    awaitSent(after);
    const Pieces pieces(hidden - begin, _pool.threads(), rows <= kFewRows ? 2 * kFewRowsUnit : kTile);
    const auto piece = [&](int64_t i, int worker) {
        const int64_t first = begin + pieces.begin(i), last = begin + pieces.end(i);
        _kernels.matmul(gateProduct, first, last, threadScratch(worker));
        if (layer.gated()) _kernels.matmul(upProduct, first, last, threadScratch(worker));
        finishBlocks(_computed.get(), hidden, first, last,
                     [&](int64_t from, int64_t to) { finishBlock(layer, from, to, reader, rows); });
    };
    _pool.run(pieces.count(), std::ref(piece));
    giveBack(ticket);
}

void HostShare::finishBlock(const HostGated& layer, int64_t first, int64_t last, const Matrix& reader, int64_t rows) {
    const HostRows& to = _mailbox.hidden;
    const cpu::QuantizedRows quantized = quantizedRows(to, rows);
    const bool isFloat = info(reader.type).isFloat;
    for (int64_t t = 0; t < rows; ++t) {
        float* gate = _gate + t * to.cols + first;
        const float* const up = layer.gated() ? _up + t * to.cols + first : nullptr;
        _kernels.gatedActivation(layer.activation, {gate, up}, last - first);
        if (isFloat) {
            std::memcpy(to.floats + t * to.cols + first, gate, sizeof(float) * static_cast<size_t>(last - first));
        } else {
            quantizeBlock(_kernels, gate, quantized, t, first);
        }
    }
}

void HostShare::multiply(const Matrix& w, const HostRows& x, int64_t rows, int64_t begin, float* y, int64_t yStride,
                         uint32_t after) {
    const cpu::QuantizedRows quantized = quantizedRows(x, rows);
    cpu::MatmulArgs args = product(w, x, quantized, rows);
    args.w.rows = w.rows - begin;
    args.w.data = w.data + static_cast<size_t>(begin) * rowBytes(w.type, w.cols);
    args.y = y;
    args.yStride = yStride;
    _instructedAt.reset();
    awaitSent(after);
    const Pieces pieces(args.w.rows, _pool.threads(), rows <= kFewRows ? kFewRowsUnit : kTile);
    const auto piece = [&](int64_t i, int worker) {
        _kernels.matmul(args, pieces.begin(i), pieces.end(i), threadScratch(worker));
    };
    _pool.run(pieces.count(), std::ref(piece));
}

void HostShare::down(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket) {
    require(begin >= 0 && begin <= w.rows && w.rows - begin <= _mailbox.input.cols,
            "more output rows than the mailbox has room for");
    multiply(w, _mailbox.hidden, rows, begin, _mailbox.down, w.rows - begin, after);
    giveBack(ticket);
}

void HostShare::head(const Matrix& w, int64_t rows, int64_t begin, uint32_t after, uint32_t ticket) {
    require(begin >= 0 && begin <= w.rows && w.rows == _mailbox.logits.cols,
            "the number of logits differs from the mailbox's");
    require(rows <= _headRows, "more rows of logits than the mailbox has room for");
    multiply(w, _mailbox.input, rows, begin, _mailbox.logits.floats + begin, w.rows, after);
    giveBack(ticket);
}

void HostShare::experts(const HostExpertLayer& layer, int32_t expertLayer, int64_t rows, int32_t used, bool predicted,
                        bool weightsInput, MissPlan& plan, uint32_t after, uint32_t instructed, uint32_t ticket) {
    _experts.requireFit(layer.file, _mailbox.expertInput, rows, used);
    require(expertLayer >= 0 && expertLayer < _expertLayers, "a layer of experts that the mailbox has no room for");
    const int32_t pairs = static_cast<int32_t>(rows * used);
    tellTurn(awaitSent(after), plan);
    if (takeChoices(expertLayer, layer.file.gate.count, pairs, predicted, weightsInput)) {
        if (layer.ram) findInRam(*layer.ram, expertLayer, layer.file.gate.count, pairs);
        instruct(expertLayer, pairs, predicted, plan, instructed);
    }
    double seconds = 0;
    const size_t bytes = computeOurs(layer, rows, used, weightsInput, seconds);
    giveBack(ticket);
    plan.done(expertLayer, _chosen.data(), _slot.data(), predicted ? _predicted.data() : nullptr, pairs, bytes,
              seconds);
}

// What was missed is looked for in RAM before the plan is asked: the GPU can fetch only what is there.
void HostShare::findInRam(RamExperts& ram, int32_t expertLayer, int32_t experts, int32_t pairs) {
    _expertBegin.assign(static_cast<size_t>(experts) + 1, 0);
    for (size_t p = 0; p < static_cast<size_t>(pairs); ++p) {
        if (_ours[p] >= 0) ++_expertBegin[static_cast<size_t>(_ours[p]) + 1];
    }
    for (size_t e = 0; e < static_cast<size_t>(experts); ++e) _expertBegin[e + 1] += _expertBegin[e];
    ram.find(expertLayer, _expertBegin, -1);
}

// Returns the bytes of the file that were read, and how long that took: of the experts that were in memory. What the
// others take is the disk's time, from which the plan could learn nothing.
size_t HostShare::computeOurs(const HostExpertLayer& layer, int64_t rows, int32_t used, bool weightsInput,
                              double& seconds) {
    const auto pairs = static_cast<size_t>(rows * used);
    const auto isExpert = [](int32_t expert) { return expert >= 0; };
    const auto left = [&] {
        return std::any_of(_ours.begin(), _ours.begin() + static_cast<std::ptrdiff_t>(pairs), isExpert);
    };
    size_t bytes = 0;
    for (bool first = true; left(); first = false) {
        bool any = false;
        for (size_t p = 0; p < pairs; ++p) {
            const bool there = _ours[p] >= 0 && (!layer.ram || layer.ram->arrived(_ours[p]));
            _there[p] = there ? std::exchange(_ours[p], -1) : -1;
            any = any || there;
        }
        if (any) {
            const Clock::time_point start = Clock::now();
            const size_t read = _experts.compute(layer, _mailbox.expertInput, rows, used, _there.data(),
                                                 weightsInput ? _weight.data() : nullptr, _mailbox.answers);
            if (!first) continue;
            bytes = read;
            seconds = std::chrono::duration<double>(Clock::now() - start).count();
        } else {
            awaitRead(*layer.ram, static_cast<int32_t>(pairs));
        }
    }
    return bytes;
}

// Waits for the first expert that is still being read.
void HostShare::awaitRead(RamExperts& ram, int32_t pairs) {
    _instructedAt.reset();  // the time until the next layer is the disk's, too
    const auto next = std::find_if(_ours.begin(), _ours.begin() + pairs, [](int32_t expert) { return expert >= 0; });
    const ThreadPool::Resting resting(_pool);
    for (size_t which = 0; which < 3; ++which) ram.await(*next, which);
}

// Tells the plan how long after the last layer's orders this layer's choices came, if the CPU waited for them and had
// no other work in between.
void HostShare::tellTurn(bool waited, MissPlan& plan) {
    if (waited && _instructedAt) plan.followed(std::chrono::duration<double>(Clock::now() - *_instructedAt).count());
    _instructedAt.reset();
}

// Returns whether something was missed. Everything is read once: the GPU writes this memory, and the values that were
// checked must be the values that are used.
bool HostShare::takeChoices(int32_t expertLayer, int32_t experts, int32_t pairs, bool predicted, bool weightsInput) {
    const HostChoices from = _mailbox.choicesOf(expertLayer);
    bool missed = false;
    for (size_t p = 0; p < static_cast<size_t>(pairs); ++p) {
        const int32_t expert = __atomic_load_n(from.chosen + p, __ATOMIC_RELAXED);
        require(expert >= 0 && expert < experts, "a choice is no expert");
        _chosen[p] = expert;
        _slot[p] = __atomic_load_n(from.slot + p, __ATOMIC_RELAXED);
        _ours[p] = _slot[p] < 0 ? expert : -1;
        missed = missed || _slot[p] < 0;
        if (weightsInput) __atomic_load(from.weight + p, &_weight[p], __ATOMIC_RELAXED);
        if (!predicted) continue;
        _predicted[p] = __atomic_load_n(from.predicted + p, __ATOMIC_RELAXED);
        require(_predicted[p] >= 0 && _predicted[p] < _mostExperts, "a prediction is no expert");
    }
    return missed;
}

void HostShare::instruct(int32_t expertLayer, int32_t pairs, bool predicted, MissPlan& plan, uint32_t ticket) {
    _orders = {};
    plan.order(expertLayer, _chosen.data(), _slot.data(), predicted ? _predicted.data() : nullptr, pairs, _orders);
    leaveToGpu(pairs);
    checkAhead();
    *_mailbox.orders = _orders;
    __atomic_store_n(_mailbox.instructed, ticket, __ATOMIC_RELEASE);
    _instructedAt = Clock::now();
}

// The CPU does not compute what the GPU fetches. A wrong order would overwrite a slot in use, or leave a pair
// uncomputed.
void HostShare::leaveToGpu(int32_t pairs) {
    require(_orders.demanded >= 0 && _orders.demanded <= kMaxExpertFetches, "more orders than there is room for");
    const auto end = _ordered.begin() + _orders.demanded;
    std::fill(_isOrdered.begin(), _isOrdered.end(), uint8_t{0});
    for (int32_t i = 0; i < _orders.demanded; ++i) {
        const ExpertFetch& fetch = _orders.fetch[i];
        requireWhole(fetch);
        require(fetch.expert < _mostExperts && !_isOrdered[static_cast<size_t>(fetch.expert)],
                "an order names no expert, or an expert is ordered twice");
        _isOrdered[static_cast<size_t>(fetch.expert)] = 1;
        _ordered[static_cast<size_t>(i)] = fetch.slot;
    }
    std::sort(_ordered.begin(), end);
    require(std::adjacent_find(_ordered.begin(), end) == end, "two experts ordered into one slot");
    int32_t found = 0;
    for (size_t p = 0; p < static_cast<size_t>(pairs); ++p) {
        require(_slot[p] < 0 || !std::binary_search(_ordered.begin(), end, _slot[p]),
                "an expert is ordered into a slot that is in use");
        if (_ours[p] < 0) continue;
        uint8_t& isOrdered = _isOrdered[static_cast<size_t>(_ours[p])];
        if (!isOrdered) continue;
        found += isOrdered == 1;
        isOrdered = 2;
        _ours[p] = -1;
    }
    require(found == _orders.demanded, "an expert is ordered that was not missed");
}

void HostShare::checkAhead() const {
    require(_orders.ahead >= 0 && _orders.ahead <= kMaxFetchesAhead, "more orders ahead than there is room for");
    for (int32_t i = 0; i < _orders.ahead; ++i) {
        const ExpertFetch& fetch = _orders.aheadFetch[i];
        requireWhole(fetch);
        require(fetch.expert < _mostExperts, "an order ahead names no expert");
        for (int32_t j = 0; j < i; ++j) {
            const ExpertFetch& earlier = _orders.aheadFetch[j];
            require(earlier.expert != fetch.expert && earlier.slot != fetch.slot,
                    "two orders ahead name one expert, or one slot");
        }
    }
}

// Returns whether it had to wait.
bool HostShare::awaitSent(uint32_t ticket) {
    const auto there = [&] { return __atomic_load_n(_mailbox.sent, __ATOMIC_ACQUIRE) >= ticket; };
    if (there()) return false;  // without reading the clock
    const auto start = Clock::now();
    auto nextYield = start + kYieldInterval, nextLook = start + kLookInterval;
    while (!there()) {
        for (int spin = 0; spin < kSpinsPerClock && !there(); ++spin) relax();
        const auto now = Clock::now();
        if (now < nextYield) continue;
        std::this_thread::yield();
        nextYield = now + kYieldInterval;
        if (now < nextLook) continue;
        nextLook = now + kLookInterval;
        // The ticket may have come with the last of the GPU's work, after the last look at it.
        if (_waiting && _waiting() && !there())
            throw Error(ErrorKind::Internal, "the GPU has finished, but has not sent what the CPU waits for");
    }
    return true;
}

void HostShare::giveBack(uint32_t ticket) { __atomic_store_n(_mailbox.returned, ticket, __ATOMIC_RELEASE); }

void HostShare::abort() noexcept {
    for (uint32_t* counter : {_mailbox.instructed, _mailbox.returned})
        __atomic_store_n(counter, kCrossingAborted, __ATOMIC_RELEASE);
}

}  // namespace sharpi
