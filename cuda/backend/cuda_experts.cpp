// See cuda_experts.h.
#include "backend/cuda_experts.h"

#include <algorithm>

#include "core/launch_rows.h"
#include "kernels/experts/expert_down.h"
#include "kernels/formats/packed.h"
#include "kernels/rows/rows.h"

namespace sharpi {

namespace {

// tokens: of the rows that are routed.
cuda::RouteRule ruleOf(const RouterCall& r, const int32_t* tokens) {
    return {r.count,      r.used,       r.renormalize, r.weightScale,  r.gating, r.groups,
            r.groupsUsed, r.choiceBias, r.outputScale, r.tokenChoices, tokens};
}

}  // namespace

void CudaExperts::route(const ExpertCall& call) {
    chooseExperts(call);
    if (_pass.pathOf(call.gate) == CudaPass::ExpertPath::Slots) sendChoices(call);
}

void CudaExperts::compute(const ExpertCall& call) {
    for (const WeightStack* stack : {&call.gate, &call.up, &call.down}) _pass.weights->arrive(stack->group);
    switch (_pass.pathOf(call.gate)) {
    case CudaPass::ExpertPath::Resident: return computeResident(call);
    case CudaPass::ExpertPath::Slots: return computeInSlots(call);
    case CudaPass::ExpertPath::Stacks: return computeByStack(call);
    }
}

void CudaExperts::chooseExperts(const ExpertCall& call) {
    const RouterCall& r = call.routing;
    const GpuScratch& s = *_pass.layout;
    const int64_t width = _pass.limits.embedding, exact = _pass.exactRows(), fast = _pass.fastRows();
    auto* const uses = _pass.at<uint32_t>(s.expertUses) + static_cast<int64_t>(r.expertLayer) * _pass.limits.experts;
    const auto route = [&](int64_t first, int64_t rows, const cuda::SharedScale& scale) {
        if (!rows) return;
        const float* const logits = _pass.floats(RowBuffer::RouterLogits) + first * r.count;
        cuda::route(_pass.stream, logits, rows, ruleOf(r, _pass.view.tokens + first),
                    _pass.at<int32_t>(s.chosen) + first * r.used, weights(first * r.used), uses, scale);
    };
    float* const scales = _pass.floats(s.sharedScale);
    cuda::SharedScale scale;
    if (call.sharedScale) scale = {_pass.exactFloats(RowInput::Normed), call.sharedScale, width, scales};
    route(0, exact, scale);
    route(exact, fast, {});
    if (call.sharedScale && fast) {
        const float* const normed = _pass.floats(RowBuffer::SharedOut) + exact * width;  // see CudaOperations::norm()
        cuda::rowDots(_pass.stream, normed, call.sharedScale, fast, width, scales + exact);
    }
}

cuda::SharedAnswer CudaExperts::sharedAnswer(const ExpertCall& call, int64_t first) const {
    if (!call.shared) return {};
    const cuda::SharedAnswer all{_pass.floats(RowBuffer::SharedOut),
                                 call.sharedScale ? _pass.floats(_pass.layout->sharedScale) : nullptr};
    return cuda::rowsFrom(all, first, _pass.limits.embedding);
}

// Weights that multiplied the experts' inputs do not multiply their answers.
const float* CudaExperts::answerWeights(const ExpertCall& call, int64_t pair) const {
    return call.routing.weightsInput ? nullptr : weights(pair);
}

cuda::AnswerTerms CudaExperts::answerTerms(const ExpertCall& call, int64_t pair) const {
    return {call.downBias, chosen(pair), call.to == RowBuffer::Residual};
}

cuda::GatedJoin CudaExperts::join(const ExpertCall& call, int64_t pair) const {
    cuda::GatedJoin join{call.activation, call.gateBias, call.upBias, chosen(pair),
                         call.routing.weightsInput ? weights(pair) : nullptr};
    join.gated = call.gated();
    return join;
}

// Calls body(pairs) for groups of the exact rows, pair p with matrix which[p] of the stacks. The pairs are grouped if
// that is worth it for any of the stacks, which hold the same experts.
template <typename Body>
void CudaExperts::forExactPairs(const int32_t* which, const RouterCall& routing,
                                std::initializer_list<MatrixStack> stacks, const Body& body) {
    const int32_t used = routing.used, elements = stacks.begin()->count;
    CudaPass::forGroups(_pass.exactRows(), kExactLaunchRows, [&](int64_t first, int rows) {
        Pairs pairs{first, rows, used, which + first * used, {}};
        const auto shares = [&](const MatrixStack& w) { return cuda::sharesExperts(_pass.stream, w, rows, used); };
        if (std::any_of(stacks.begin(), stacks.end(), shares))
            pairs.groups =
                cuda::groupPairs(_pass.stream, pairs.which, int64_t{rows} * used, elements,
                                 std::min(elements, routing.count), _pass.at<uint8_t>(_pass.layout->pairGroups));
        body(pairs);
    });
}

void CudaExperts::computeResident(const ExpertCall& call) {
    const RouterCall& r = call.routing;
    const Activations& hidden = _pass.shape(RowInput::Hidden, {call.down.first}, call.down.first.cols, r.used);
    float *const to = _pass.floats(call.to), *const answers = _pass.floats(RowBuffer::ExpertOut);
    forExactPairs(chosen(0), r, {call.gate, call.up, call.down}, [&](const Pairs& pairs) {
        hiddenOfPairs(call, {call.gate, call.up, call.down}, pairs, hidden);
        cuda::expertDownAdd(_pass.stream, hidden.from(pairs.begin()), pairs.rows, call.down, pairs.which,
                            answerWeights(call, pairs.begin()), r.used, to + pairs.first * call.down.first.rows,
                            sharedAnswer(call, pairs.first), answerTerms(call, pairs.begin()), pairs.groups, answers);
    });
}

// activation(gate x, up x) of the pairs.
void CudaExperts::hiddenOfPairs(const ExpertCall& call, const ExpertStacks& w, const Pairs& pairs,
                                const Activations& hidden) {
    const Activations& x = _pass.input(call.from);
    const cuda::RowOutputs out = cuda::rowsFrom(hidden.exact, pairs.begin(), hidden.cols);
    if (w.gated() && w.gate.first.type == w.up.first.type)
        return cuda::expertGated(_pass.stream, x.from(pairs.first), pairs.rows, w.gate, w.up, pairs.which, pairs.used,
                                 out, join(call, pairs.begin()), pairs.groups);
    const int64_t at = pairs.begin() * hidden.cols;
    float *const gates = _pass.floats(RowBuffer::Gate) + at, *const ups = _pass.floats(RowBuffer::Up) + at;
    pairProducts(x, w.gate, pairs, true, gates);
    if (w.gated()) pairProducts(x, w.up, pairs, true, ups);
    cuda::gatedActivation(_pass.stream, join(call, pairs.begin()), gates, ups, int64_t{pairs.rows} * pairs.used,
                          hidden.cols, out);
}

// y[p] of the pairs alone. ofRows: a pair reads its row of x, else its own. A pair without a matrix keeps its row of y.
void CudaExperts::pairProducts(const Activations& x, const MatrixStack& w, const Pairs& pairs, bool ofRows, float* y) {
    cuda::expertMatvec(_pass.stream, x.from(ofRows ? pairs.first : pairs.begin()), pairs.rows, w, pairs.which,
                       pairs.used, !ofRows, y, pairs.groups);
}

// The host learns what the rows chose. From then on the CPU computes, or orders, what is in no slot
// (kernels/experts/expert_cache.h).
void CudaExperts::sendChoices(const ExpertCall& call) {
    const GpuScratch& s = *_pass.layout;
    const Mailbox& mail = _pass.share->mailbox();
    const RouterCall& r = call.routing;
    const int64_t rows = _pass.exactRows();
    _tickets.foreseen = foreseeNext(call);
    _tickets.sent = _pass.work->nextSent();
    _tickets.instructed = _pass.work->nextInstructed();
    _tickets.returned = _pass.work->nextReturned();
    // The router may read another form than the experts do.
    const cuda::RowOutputs read =
        _pass.exactForms({call.gate.first, call.up.first}, s.input(call.from).exact, rows, call.gate.first.cols);
    _cache.awaitFetchedAhead();
    cuda::sendExperts(_pass.stream, read, rows, r.used, chosen(0), _cache.tableOf(r.expertLayer), _tickets.foreseen,
                      _pass.at<int32_t>(s.slot), _pass.at<cuda::DeviceOrders>(s.orders), mail.expertInput,
                      mail.choicesOf(r.expertLayer), mail.sent, _tickets.sent, r.weightsInput ? weights(0) : nullptr);
}

// The GPU computes the chosen experts that are in slots, and those that it is ordered to fetch; the CPU computes the
// others meanwhile, reading them where they are in the file.
void CudaExperts::computeInSlots(const ExpertCall& call) {
    const GpuScratch& s = *_pass.layout;
    const Mailbox& mail = _pass.share->mailbox();
    const RouterCall& r = call.routing;
    const ExpertStacks slots = _cache.slotsOf(r.expertLayer);
    const int64_t rows = _pass.exactRows(), pairs = rows * r.used;
    auto* const slot = _pass.at<int32_t>(s.slot);
    auto* const orders = _pass.at<cuda::DeviceOrders>(s.orders);
    // Before kernels that wait for the CPU: if steps are launched one by one, a kernel's first launch may wait for the
    // GPU.
    const HostExpertLayer layer{call.inFile(), call.activation, call.hostBiases.gate, call.hostBiases.up, _cache.ram()};
    _pass.work->add([=, share = _pass.share, plan = &_cache.misses(), number = r.expertLayer, used = r.used,
                     weightsInput = r.weightsInput, t = _tickets] {
        share->experts(layer, number, rows, used, t.foreseen != nullptr, weightsInput, *plan, t.sent, t.instructed,
                       t.returned);
    });
    float* const out = _pass.floats(RowBuffer::ExpertOut);
    if (slots.gate.count > 0) {
        cuda::fetchExperts(_pass.stream, slots, mail.orders, mail.instructed, _tickets.instructed, orders, pairs,
                           chosen(0), slot);
        if (_tickets.foreseen) _cache.fetchAhead(call.next->expertLayer, orders);
        const Activations& hidden = _pass.shape(RowInput::Hidden, {call.down.first}, call.down.first.cols, r.used);
        forExactPairs(slot, r, {slots.gate, slots.up, slots.down}, [&](const Pairs& pairs) {
            hiddenOfPairs(call, slots, pairs, hidden);
            pairProducts(hidden, slots.down, pairs, false, out + pairs.begin() * slots.down.first.rows);
        });
    }
    cuda::combineAnswers(_pass.stream, out, mail.answers, slot, answerWeights(call, 0), rows, r.used,
                         call.down.first.rows, mail.returned, _tickets.returned, _pass.floats(call.to),
                         sharedAnswer(call, 0), answerTerms(call, 0));
}

// A guess at what the next layer will choose, if it is wanted.
const int32_t* CudaExperts::foreseeNext(const ExpertCall& call) {
    if (!call.next || !_cache.foresees()) return nullptr;
    const GpuScratch& s = *_pass.layout;
    const RouterCall& next = *call.next;
    const int64_t width = _pass.limits.embedding, rows = _pass.exactRows();
    if (!next.router->resident() || next.used != call.routing.used) return nullptr;
    const Activations normed{_pass.exactForms({*next.router}, s.foreseenRows, rows, width), {}, width};
    float* const logits = _pass.floats(RowBuffer::RouterLogits);
    _pass.normRows(nullptr, CudaPass::nextOf(next.norm), rows, normed.exact);
    _products.exact(normed, {{*next.router, next.bias, logits, next.router->rows}});
    cuda::route(_pass.stream, logits, rows, ruleOf(next, _pass.view.tokens), _pass.at<int32_t>(s.foreseen),
                _pass.floats(s.foreseenWeight));
    return _pass.at<int32_t>(s.foreseen);
}

// One stack after the other: experts that are not resident come over in that order, and the CPU takes no part.
void CudaExperts::computeByStack(const ExpertCall& call) {
    const RouterCall& r = call.routing;
    const int64_t exactPairs = _pass.exactRows() * r.used, fastPairs = _pass.fastRows() * r.used;
    const int64_t cols = call.down.first.rows;
    const ExpertStacks slots = _cache.slotsOf(r.expertLayer);
    float *const gates = _pass.floats(RowBuffer::Gate), *const ups = _pass.floats(RowBuffer::Up),
                 *const out = _pass.floats(RowBuffer::ExpertOut), *const to = _pass.floats(call.to);
    cuda::ExpertGrouping made;
    const cuda::ExpertGroups groups = group(call, exactPairs, made);
    const Activations& in = _pass.input(call.from);
    stackProduct(in, call.gate, slots.gate, r, groups, true, gates);
    if (call.gated()) stackProduct(in, call.up, slots.up, r, groups, true, ups);
    const Activations& hidden = _pass.shape(RowInput::Hidden, {call.down.first}, call.down.first.cols, r.used);
    cuda::GatedJoin ofFast = join(call, exactPairs);
    ofFast.pairAt = made.pairAt;
    _products.activate(hidden, exactPairs, join(call, 0), fastPairs, ofFast);
    stackProduct(hidden, call.down, slots.down, r, groups, false, out);
    const auto combine = [&](int64_t first, int64_t rows, const int32_t* pairOf) {
        if (!rows) return;
        const int64_t pair = first * r.used;
        cuda::combineExperts(_pass.stream, out + pair * cols, pairOf, answerWeights(call, pair), rows, r.used, cols,
                             to + first * cols, sharedAnswer(call, first), answerTerms(call, pair));
    };
    combine(0, _pass.exactRows(), nullptr);
    combine(_pass.exactRows(), _pass.fastRows(), made.pairOf);
}

// The fast rows' pairs, expert by expert.
cuda::ExpertGroups CudaExperts::group(const ExpertCall& call, int64_t exactPairs, cuda::ExpertGrouping& made) {
    const RouterCall& r = call.routing;
    const int64_t rows = _pass.fastRows();
    if (!rows) return {};
    made = cuda::expertGroupingOver(_pass.at<uint8_t>(_pass.layout->grouping), rows, r.used, r.count);
    return cuda::groupExperts(_pass.stream, chosen(exactPairs), rows, r.used, r.count, made);
}

// y: all pairs, those of exact rows by row and rank, those of fast rows as they are grouped. ofRows: a pair reads its
// row of x, else its own. Experts in slots are used where they are; the others come over in pieces.
void CudaExperts::stackProduct(const Activations& x, const WeightStack& w, const MatrixStack& slots,
                               const RouterCall& routing, const cuda::ExpertGroups& groups, bool ofRows, float* y) {
    const int64_t exactPairs = _pass.exactRows() * routing.used;
    const auto multiply = [&](const MatrixStack& part, const cuda::ExpertIndex& which) {
        if (exactPairs) {
            const int32_t* element = chosen(0);
            if (which.index) {
                auto* const found = _pass.at<int32_t>(_pass.layout->slot);
                cuda::lookUpExperts(_pass.stream, element, exactPairs, which, found);
                element = found;
            }
            forExactPairs(element, routing, {part}, [&](const Pairs& pairs) {
                pairProducts(x, part, pairs, ofRows, y + pairs.begin() * part.first.rows);
            });
        }
        if (_pass.fastRows())
            cuda::matmulExperts(_pass.stream, part, x.fast, groups, ofRows, y + exactPairs * w.first.rows, which);
    };
    _pass.forStackParts(w, slots, _cache.tableOf(routing.expertLayer), _cache.ordinalsOf(routing.expertLayer),
                        multiply);
}

}  // namespace sharpi
