// See host_experts.h. One loop of the threads computes the hidden rows of all chosen experts, divided as one long
// matrix, and then their output rows. A thread that comes to an output row waits until the hidden rows of its expert
// are there. They are being computed by then, since pieces are handed out in order.
#include "cpu/share/host_experts.h"

#include <thread>

#include "cpu/share/host_blocks.h"
#include "operations/scratch.h"

namespace sharpi {

using namespace host;

namespace {

constexpr int kSpinsBeforeYield = 4000;  // about 50 microseconds

// Writes zeros behind the columns of each row.
void clearPadding(const cpu::QuantizedRows& rows) {
    const int64_t blocks = rows.cols / kContractBlock;
    if (rows.cols == rows.qStride) return;
    for (int64_t t = 0; t < rows.rows; ++t) {
        std::fill(rows.q + t * rows.qStride + rows.cols, rows.q + (t + 1) * rows.qStride, int8_t{0});
        std::fill(rows.scale + t * rows.scaleStride + blocks, rows.scale + (t + 1) * rows.scaleStride, 0.0f);
        std::fill(rows.sums + t * rows.sumStride + 2 * blocks, rows.sums + (t + 1) * rows.sumStride, int16_t{0});
    }
}

bool isFloat(const MatrixStack& stack) { return info(stack.first.type).isFloat; }

}  // namespace

HostExperts::HostExperts(ThreadPool& pool, const StepLimits& limits, int64_t rows)
    : _kernels(cpu::kernels()),
      _pool(pool),
      _maxRows(rows),
      _maxPairs(limits.expertLayerCount() > 0 ? rows * limits.expertsUsed : 0),
      _maxHidden(limits.expertHidden) {
    ScratchLayout scratch;
    const int64_t width = limits.expertWidth();
    _threadScratchBytes = Allocator::aligned(cpu::matmulScratchBytes(std::max(width, limits.expertHidden)));
    scratch.take(_threadScratchBytes * static_cast<size_t>(pool.threads()));
    const size_t gate = scratch.floats(_maxPairs * _maxHidden), up = scratch.floats(_maxPairs * _maxHidden);
    const size_t hidden = scratch.take(cpu::quantizedRowsBytes(_maxPairs, _maxHidden));
    const size_t out = scratch.floats(_maxPairs * width);
    _scratch.reset(static_cast<uint8_t*>(::operator new(scratch.bytes(), std::align_val_t{64})));
    std::memset(_scratch.get(), 0, scratch.bytes());  // so that the system hands out the pages before the first step
    _gate = reinterpret_cast<float*>(_scratch.get() + gate);
    _up = reinterpret_cast<float*>(_scratch.get() + up);
    _hiddenBuffer = _scratch.get() + hidden;
    _out = reinterpret_cast<float*>(_scratch.get() + out);
    _computed.reset(new std::atomic<int32_t>[static_cast<size_t>(_maxPairs * blocksOf(_maxHidden))]);
    _blocksLeft.reset(new std::atomic<int32_t>[static_cast<size_t>(_maxPairs)]);
    for (std::vector<int32_t>* list : {&_pairAt, &_rowAt}) list->resize(static_cast<size_t>(_maxPairs));
    _next.resize(static_cast<size_t>(limits.experts));
    _chosen.reserve(static_cast<size_t>(_maxPairs));
}

void HostExperts::requireFit(const ExpertStacks& file, const HostRows& x, int64_t rows, int32_t used) const {
    const auto& [gate, up, down] = file;
    const int64_t width = x.cols, hidden = gate.first.rows;
    require(rows >= 1 && rows <= _maxRows && used >= 1 && rows * used <= _maxPairs,
            "more choices than the mailbox has room for");
    const bool alike = (!file.gated() || up.count == gate.count) && down.count == gate.count;
    require(gate.count >= 1 && gate.count <= static_cast<int64_t>(_next.size()) && alike,
            "stacks with different numbers of experts, or with too many");
    const bool fits = !file.gated() || up.first.cols == width;
    require(gate.first.cols == width && fits && down.first.rows == width,
            "the experts' width differs from the mailbox rows'");
    const bool asWide = !file.gated() || up.first.rows == hidden;
    require(hidden >= 1 && hidden <= _maxHidden && asWide && down.first.cols == hidden,
            "the experts' hidden widths differ, or are too large");
    require((isFloat(gate) && isFloat(up)) || x.q, "quantized experts, but no quantized rows");
    require(isFloat(down) || hidden % kContractBlock == 0,
            "quantized experts read hidden rows that cannot be quantized");
}

size_t HostExperts::compute(const HostExpertLayer& layer, const HostRows& x, int64_t rows, int32_t used,
                            const int32_t* expert, const float* weight, float* answers) {
    const ExpertStacks& file = layer.file;
    sortByExpert(expert, static_cast<int32_t>(rows * used), used);
    if (_chosen.empty()) return 0;
    prepareHidden(file);
    const cpu::QuantizedRows input = quantizedRows(x, rows);
    const int64_t hidden = file.gate.first.rows, width = file.down.first.rows,
                  experts = static_cast<int64_t>(_chosen.size());
    const bool few = fewPlaces();
    const Pieces first(hidden * experts, _pool.threads(), few ? 2 * kFewRowsUnit : kTile),
        second(width * experts, _pool.threads(), few ? kFewRowsUnit : kTile);
    const auto piece = [&](int64_t i, int worker) {
        if (i < first.count()) {
            forPiece(first, i, hidden, [&](size_t which, int64_t from, int64_t to) {
                gated(layer, x, input, weight, which, from, to, worker);
            });
        } else {
            forPiece(second, i - first.count(), width,
                     [&](size_t which, int64_t from, int64_t to) { down(layer, answers, which, from, to, worker); });
        }
    };
    _pool.run(first.count() + second.count(), std::ref(piece));
    return _chosen.size() * (fileBytes(file.gate.first) + fileBytes(file.up.first) + fileBytes(file.down.first));
}

void HostExperts::sortByExpert(const int32_t* expert, int32_t pairs, int32_t used) {
    std::fill(_next.begin(), _next.end(), 0);
    for (int32_t p = 0; p < pairs; ++p) {
        if (expert[p] >= 0) ++_next[static_cast<size_t>(expert[p])];
    }
    _chosen.clear();
    int32_t begin = 0, index = 0;
    for (int32_t& next : _next) {
        const int32_t count = next;
        next = begin;
        if (count) _chosen.push_back({index, begin, begin + count});
        begin += count;
        ++index;
    }
    for (int32_t p = 0; p < pairs; ++p) {
        if (expert[p] < 0) continue;
        const auto place = static_cast<size_t>(_next[static_cast<size_t>(expert[p])]++);
        _pairAt[place] = p;
        _rowAt[place] = p / used;
    }
}

bool HostExperts::fewPlaces() const {
    return std::all_of(_chosen.begin(), _chosen.end(), [](const ChosenExpert& e) { return e.places() <= kFewRows; });
}

template <typename Body> void HostExperts::forPiece(const Pieces& pieces, int64_t i, int64_t rows, const Body& body) {
    const int64_t end = pieces.end(i);
    for (int64_t at = pieces.begin(i); at < end;) {
        const int64_t first = at % rows, last = std::min(rows, first + end - at);
        body(static_cast<size_t>(at / rows), first, last);
        at += last - first;
    }
}

void HostExperts::prepareHidden(const ExpertStacks& file) {
    const int64_t hidden = file.gate.first.rows, blocks = blocksOf(hidden);
    _hidden =
        isFloat(file.down) ? cpu::QuantizedRows{} : cpu::quantizedRowsOver(_hiddenBuffer, _chosen.back().end, hidden);
    clearPadding(_hidden);
    for (size_t which = 0; which < _chosen.size(); ++which) {
        for (int64_t b = 0; b < blocks; ++b)
            _computed[which * static_cast<size_t>(blocks) + static_cast<size_t>(b)].store(0, std::memory_order_relaxed);
        _blocksLeft[which].store(static_cast<int32_t>(blocks), std::memory_order_relaxed);
    }
}

// Hidden rows [first, last) of a chosen expert, activation(gate x, up x) for all its places: to _gate, and quantized
// to _hidden if down reads them so.
void HostExperts::gated(const HostExpertLayer& layer, const HostRows& x, const cpu::QuantizedRows& input,
                        const float* weight, size_t which, int64_t first, int64_t last, int worker) {
    const ExpertStacks& file = layer.file;
    const int64_t hidden = file.gate.first.rows;
    const ChosenExpert& expert = _chosen[which];
    cpu::MatmulArgs args;
    args.xFloat = x.floats;
    args.xQuant = &input;
    args.rowIndex = _rowAt.data() + expert.begin;
    args.count = expert.places();
    args.yStride = hidden;
    args.w = layer.matrix(expert.index, 0);
    args.y = _gate + expert.begin * hidden;
    _kernels.matmul(args, first, last, threadScratch(worker));
    if (file.gated()) {
        args.w = layer.matrix(expert.index, 1);
        args.y = _up + expert.begin * hidden;
        _kernels.matmul(args, first, last, threadScratch(worker));
    }
    finishBlocks(_computed.get() + static_cast<int64_t>(which) * blocksOf(hidden), hidden, first, last,
                 [&](int64_t from, int64_t to) {
                     finishBlock(layer, expert, weight, from, to);
                     _blocksLeft[which].fetch_sub(1, std::memory_order_release);
                 });
}

void HostExperts::finishBlock(const HostExpertLayer& layer, const ChosenExpert& expert, const float* weight,
                              int64_t first, int64_t last) {
    const int64_t hidden = layer.file.gate.first.rows, bias = expert.index * hidden + first;
    cpu::GatedRow row;
    row.gateBias = layer.gateBias ? layer.gateBias + bias : nullptr;
    row.upBias = layer.upBias ? layer.upBias + bias : nullptr;
    for (int64_t place = expert.begin; place < expert.end; ++place) {
        row.gate = _gate + place * hidden + first;
        if (layer.file.gated()) row.up = _up + place * hidden + first;
        if (weight) row.factor = weight[_pairAt[static_cast<size_t>(place)]];
        _kernels.gatedActivation(layer.activation, row, last - first);
        if (_hidden.q) quantizeBlock(_kernels, row.gate, _hidden, place, first);
    }
}

// Output rows [first, last) of a chosen expert. Products write rows at equal distances, but an expert's pairs need not
// lie so: the row of a single pair is written to its place, and those of several pairs are copied there.
void HostExperts::down(const HostExpertLayer& layer, float* answers, size_t which, int64_t first, int64_t last,
                       int worker) {
    const Matrix& w = layer.file.down.first;
    const int64_t width = w.rows, hidden = w.cols;
    const ChosenExpert& expert = _chosen[which];
    const auto answer = [&](int32_t place) { return answers + _pairAt[static_cast<size_t>(place)] * width; };
    cpu::QuantizedRows x = _hidden;
    x.q += expert.begin * x.qStride;
    x.scale += expert.begin * x.scaleStride;
    x.sums += expert.begin * x.sumStride;
    cpu::MatmulArgs args;
    args.w = layer.matrix(expert.index, 2);
    args.xFloat = _gate + expert.begin * hidden;
    args.xQuant = &x;
    args.count = expert.places();
    args.y = args.count == 1 ? answer(expert.begin) : _out + expert.begin * width;
    args.yStride = width;
    // The thread that computes the hidden rows may have lost its core: after a while it gets this one.
    for (int spins = 0; _blocksLeft[which].load(std::memory_order_acquire) > 0; ++spins) {
        spins < kSpinsBeforeYield ? relax() : std::this_thread::yield();
    }
    _kernels.matmul(args, first, last, threadScratch(worker));
    for (int32_t place = expert.begin; args.count > 1 && place < expert.end; ++place) {
        std::copy(_out + place * width + first, _out + place * width + last, answer(place) + first);
    }
}

}  // namespace sharpi
