// The GPU backend's layers of experts.
#include "backend/cuda_backend.h"
#include "kernels/experts/expert_cache.h"
#include "kernels/experts/router.h"
#include "kernels/formats/packed.h"

namespace sharpi {

void CudaBackend::experts(const ExpertWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const Matrix &gate = w.gate.first, &up = w.up.first;
    Activations in;
    if (w.shared) {
        // Its scale is formed from floats. Those of fast rows lie where the shared expert's answers will be.
        in = normed(w.norm, eps, {w.router, gate, up, w.shared->gate, w.shared->up}, floats(s.normed),
                    floats(s.sharedOut) + exactRows() * _limits.embedding);
    } else {
        in = normed(w.norm, eps, {w.router, gate, up});
    }
    products(in, {{w.router, nullptr, floats(s.routerLogits)}});
    for (const WeightStack* stack : {&w.gate, &w.up, &w.down}) _weights->arrive(stack->group);
    routeRows(w, in);
    if (!_step) return expertsByStack(w, in);
    if (w.gate.resident()) return expertsOfStep(w, in);
    expertsInSlots(w, in, eps);
}

void CudaBackend::routeRows(const ExpertWeights& w, const Activations& in) {
    const GpuScratch& s = *_layout;
    const int64_t width = _limits.embedding;
    auto* const uses = at<uint32_t>(s.expertUses) + static_cast<int64_t>(w.row) * _limits.experts;
    const auto route = [&](int64_t first, int64_t rows, const cuda::SharedScale& scale) {
        if (!rows) return;
        cuda::route(_stream, floats(s.routerLogits) + first * w.gate.count, rows, w.gate.count, w.used, w.renormalize,
                    w.weightScale, at<int32_t>(s.chosen) + first * w.used, floats(s.weight) + first * w.used, uses,
                    scale);
    };
    cuda::SharedScale scale;
    if (w.shared) scale = {in.exact.floats, w.shared->scale, width, floats(s.sharedScale)};
    route(0, exactRows(), scale);
    route(exactRows(), fastRows(), {});
    if (w.shared && fastRows()) {
        cuda::rowDots(_stream, floats(s.sharedOut) + exactRows() * width, w.shared->scale, fastRows(), width,
                      floats(s.sharedScale) + exactRows());
    }
}

// The expert that every token goes through. It reads rows as floats, for their scales, before it writes them.
void CudaBackend::sharedExpert(const ExpertWeights& layer, const Activations& in) {
    if (!layer.shared) return;
    const SharedExpertWeights& w = *layer.shared;
    const Activations hidden = hiddenRows(w.down, 1);
    gated(in, w.gate, w.up, hidden);
    products(hidden, {{w.down, nullptr, floats(_layout->sharedOut)}});
}

cuda::SharedAnswer CudaBackend::sharedAnswer(const ExpertWeights& layer, int64_t first) const {
    if (!layer.shared) return {};
    return cuda::rowsFrom(cuda::SharedAnswer{floats(_layout->sharedOut), floats(_layout->sharedScale)}, first,
                          _limits.embedding);
}

// All experts are resident.
void CudaBackend::expertsOfStep(const ExpertWeights& w, const Activations& in) {
    const GpuScratch& s = *_layout;
    const int32_t* const chosen = at<int32_t>(s.chosen);
    sharedExpert(w, in);
    const Activations hidden = hiddenRows(w.down.first, w.used);
    hiddenOfExperts(in, {w.gate, w.up, w.down}, chosen, w.used, hidden);
    forExactGroups([&](int64_t first, int rows) {
        cuda::expertDownAdd(_stream, hidden.from(first * w.used), rows, w.down, chosen + first * w.used,
                            floats(s.weight) + first * w.used, w.used, floats(s.x) + first * _limits.embedding,
                            sharedAnswer(w, first));
    });
}

// silu(gate x) * (up x) of each exact row's pairs: of matrix which[pair] of the stacks.
void CudaBackend::hiddenOfExperts(const Activations& x, const ExpertStacks& w, const int32_t* which, int32_t used,
                                  const Activations& hidden) {
    const GpuScratch& s = *_layout;
    const bool fused = w.gate.first.type == w.up.first.type;
    forExactGroups([&](int64_t first, int rows) {
        const int64_t pair = first * used;
        if (fused)
            return cuda::expertGated(_stream, x.from(first), rows, w.gate, w.up, which + pair, used,
                                     cuda::rowsFrom(hidden.exact, pair, hidden.cols));
        cuda::expertMatvec(_stream, x.from(first), rows, w.gate, which + pair, used, false,
                           floats(s.gate) + pair * hidden.cols);
        cuda::expertMatvec(_stream, x.from(first), rows, w.up, which + pair, used, false,
                           floats(s.up) + pair * hidden.cols);
    });
    if (!fused) cuda::siluMul(_stream, floats(s.gate), floats(s.up), exactRows() * used, hidden.cols, hidden.exact);
}

// Of the chosen experts the GPU computes those in slots, and what the CPU orders it to fetch; the CPU computes the
// others meanwhile, reading them where they are in the file (kernels/expert_cache.h).
void CudaBackend::expertsInSlots(const ExpertWeights& w, const Activations& in, float eps) {
    const GpuScratch& s = *_layout;
    const Mailbox& mail = _share->mailbox();
    const ExpertStacks slots = _slots->slots(w.row);
    const int64_t rows = exactRows(), pairs = rows * w.used;
    auto* slot = at<int32_t>(s.slot);
    auto* orders = at<cuda::DeviceOrders>(s.orders);
    const int32_t *chosen = at<int32_t>(s.chosen), *foreseen = foreseeNext(w, eps);
    const uint32_t sent = _work->nextSent(), instructed = _work->nextInstructed(), returned = _work->nextReturned();
    // The router may read another form than the experts do.
    const cuda::RowOutputs read =
        exactForms({w.gate.first, w.up.first}, s.normed, s.normedQuant, rows, _limits.embedding);
    if (_aheadRuns) _stream.wait(_aheadDone);
    _aheadRuns = false;
    cuda::sendExperts(_stream, read, rows, w.used, chosen, expertRow(s.expertTable, w.row), foreseen, slot, orders,
                      mail.input, mail.choicesOf(w.row), mail.sent, sent);
    sharedExpert(w, in);  // beside the CPU's work
    // Before kernels that wait for the CPU: if steps are launched one by one, a kernel's first launch may wait for the
    // GPU.
    _work->add([=, share = _share.get(), plan = _misses.get(), file = w.inFile(), row = w.row, used = w.used,
                predicted = foreseen != nullptr] {
        share->experts(file, row, rows, used, predicted, *plan, sent, instructed, returned);
    });
    if (slots.gate.count > 0) {
        cuda::fetchExperts(_stream, slots, mail.orders, mail.instructed, instructed, orders, pairs, chosen, slot);
        if (foreseen && _ahead) fetchAheadOf(*w.next);
        const Activations hidden = hiddenRows(w.down.first, w.used);
        hiddenOfExperts(in, slots, slot, w.used, hidden);
        pairProducts(hidden, slots.down, slot, w.used, false, floats(s.expertOut));
    }
    cuda::combineAnswers(_stream, floats(s.expertOut), mail.answers, slot, floats(s.weight), rows, w.used,
                         _limits.embedding, mail.returned, returned, floats(s.x), sharedAnswer(w, 0));
}

// What the next layer's router makes of this layer's rows: a guess at what it will choose, if somebody wants it.
const int32_t* CudaBackend::foreseeNext(const ExpertWeights& w, float eps) {
    if (!w.next || (_foresight != Prefetch::Count && _foresight != Prefetch::NextLayer)) return nullptr;
    const GpuScratch& s = *_layout;
    const ExpertWeights& next = *w.next;
    if (!next.router.resident() || next.used != w.used) return nullptr;
    const Activations rows{exactForms({next.router}, s.foreseenRows, s.foreseenQuant, exactRows(), _limits.embedding),
                           {},
                           _limits.embedding};
    cuda::rmsNorm(_stream, floats(s.x), nullptr, next.norm, eps, exactRows(), _limits.embedding, rows.exact);
    exactProducts(rows, {{next.router, nullptr, floats(s.routerLogits), next.router.rows}});
    cuda::route(_stream, floats(s.routerLogits), exactRows(), next.gate.count, next.used, next.renormalize,
                next.weightScale, at<int32_t>(s.foreseen), floats(s.foreseenWeight), nullptr);
    return at<int32_t>(s.foreseen);
}

// While this layer's experts are multiplied, and until the next layer looks for its own.
void CudaBackend::fetchAheadOf(const ExpertWeights& next) {
    _stream.record(_aheadForked);
    _ahead->wait(_aheadForked);
    cuda::fetchAhead(*_ahead, _slots->slots(next.row), at<cuda::DeviceOrders>(_layout->orders),
                     expertRow(_layout->expertTable, next.row));
    _ahead->record(_aheadDone);
    _aheadRuns = true;
}

// One stack after the other: experts that are not resident come over in that order, and the CPU takes no part.
void CudaBackend::expertsByStack(const ExpertWeights& w, const Activations& in) {
    const GpuScratch& s = *_layout;
    const int64_t e = exactRows() * w.used, f = fastRows() * w.used, width = w.down.first.cols,
                  cols = w.down.first.rows;
    const ExpertStacks slots = w.gate.resident() ? ExpertStacks{} : _slots->slots(w.row);
    cuda::ExpertGrouping made;
    cuda::ExpertGroups groups;
    if (f) {
        made = cuda::expertGroupingOver(at<uint8_t>(s.grouping), fastRows(), w.used, w.gate.count);
        cuda::groupExperts(_stream, at<int32_t>(s.chosen) + e, fastRows(), w.used, w.gate.count, made);
        groups = {
            made.begin, made.pairToken, made.tileExpert, made.tileBegin, f, cuda::maxExpertTiles(f, w.gate.count)};
    }
    expertProduct(in, w.gate, slots.gate, w, groups, true, floats(s.gate));
    expertProduct(in, w.up, slots.up, w, groups, true, floats(s.up));
    const Activations hidden = hiddenRows(w.down.first, w.used);
    if (e) cuda::siluMul(_stream, floats(s.gate), floats(s.up), e, width, hidden.exact);
    if (f)
        cuda::siluMul(_stream, floats(s.gate) + e * width, floats(s.up) + e * width, f, width,
                      {nullptr, {}, hidden.fast});
    expertProduct(hidden, w.down, slots.down, w, groups, false, floats(s.expertOut));
    sharedExpert(w, in);
    const auto combine = [&](int64_t first, int64_t rows, const int32_t* pairOf) {
        if (!rows) return;
        cuda::combineExperts(_stream, floats(s.expertOut) + first * w.used * cols, pairOf,
                             floats(s.weight) + first * w.used, rows, w.used, cols, floats(s.x) + first * cols,
                             sharedAnswer(w, first));
    };
    combine(0, exactRows(), nullptr);
    combine(exactRows(), fastRows(), made.pairOf);
}

// y: of all pairs, those of exact rows by row and rank, those of fast rows as they are grouped. ofRows: a pair reads
// its row of x, else its own. Experts in slots are used where they are; the others come over in pieces.
void CudaBackend::expertProduct(const Activations& x, const WeightStack& w, const MatrixStack& slots,
                                const ExpertWeights& layer, const cuda::ExpertGroups& groups, bool ofRows, float* y) {
    const GpuScratch& s = *_layout;
    const int64_t exactPairs = exactRows() * layer.used;
    const auto multiply = [&](const MatrixStack& part, const cuda::ExpertIndex& which) {
        if (exactPairs) {
            const int32_t* element = at<int32_t>(s.chosen);
            if (which.index) {
                cuda::lookUpExperts(_stream, element, exactPairs, which, at<int32_t>(s.slot));
                element = at<int32_t>(s.slot);
            }
            pairProducts(x, part, element, layer.used, ofRows, y);
        }
        if (fastRows())
            cuda::matmulExperts(_stream, part, x.fast, groups, ofRows, y + exactPairs * w.first.rows, which);
    };
    if (w.resident()) return multiply(w, {});
    if (slots.count > 0) multiply(slots, {expertRow(s.expertTable, layer.row), 0, slots.count});
    _weights->forExperts(w.group, [&](const MatrixStack& part, int32_t first) {
        multiply(part, {expertRow(s.expertOrdinal, layer.row), first, first + part.count});
    });
}

// The products of the exact rows' pairs, pair p with matrix which[p] of the stack; those of none stay as they are.
void CudaBackend::pairProducts(const Activations& x, const MatrixStack& w, const int32_t* which, int32_t used,
                               bool ofRows, float* y) {
    forExactGroups([&](int64_t first, int rows) {
        const int64_t pair = first * used;
        cuda::expertMatvec(_stream, x.from(ofRows ? first : pair), rows, w, which + pair, used, !ofRows,
                           y + pair * w.first.rows);
    });
}

}  // namespace sharpi
