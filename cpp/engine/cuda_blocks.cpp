// The GPU backend's blocks, each for few rows (the contract's products, few launches) and for many (tensor cores).
#include "core/error.h"
#include "engine/cuda_backend.h"
#include "kernels/crossing.h"
#include "kernels/expert_cache.h"
#include "kernels/packed.h"
#include "kernels/router.h"

namespace sharpi {

namespace {

bool isFloat(const Matrix& m) { return info(m.type).isFloat; }
bool sameType(const Matrix& a, const Matrix& b) { return a.type == b.type; }

cuda::RowOutputs withForms(const cuda::RowOutputs& a, const cuda::RowOutputs& b) {
    return {a.floats ? a.floats : b.floats, a.quantized.q ? a.quantized : b.quantized, a.half};
}

}  // namespace

cuda::RowOutputs CudaBackend::formsFor(std::initializer_list<Matrix> readers, size_t floatsAt, size_t quantizedAt,
                                       int64_t formRows, int64_t cols) const {
    cuda::RowOutputs forms;
    for (const Matrix& m : readers) {
        if (isFloat(m)) forms.floats = floats(floatsAt);
        else forms.quantized = cuda::quantizedRowsOver(at<uint8_t>(quantizedAt), formRows, cols);
    }
    return forms;
}

void CudaBackend::embed(const Weight& table) { readTable(table, floats(_layout->x)); }

// The batch's tokens' rows of a table.
void CudaBackend::readTable(const Weight& table, float* out) {
    if (table.resident()) {
        _weights->arrive(table.group);
        return cuda::embed(_stream, table, _tokens, _rows, out);
    }
    Matrix inFile = table.inFile();
    inFile.data = _weights->deviceAddress(table.file);
    cuda::embedFromFile(_stream, inFile, _tokens, _rows, out);
}

// Resident matrices share launches; those that come over are multiplied piece by piece.
void CudaBackend::productsFew(const cuda::MatvecInput& x, int rows, std::initializer_list<Product> products) {
    std::vector<cuda::MatvecOutput> resident;
    for (const Product& p : products) {
        if (p.w.resident()) {
            _weights->arrive(p.w.group);
            resident.push_back({p.w, p.bias, p.y});
            continue;
        }
        _weights->forPieces(p.w.group, [&](const std::vector<Matrix>& parts, int64_t begin) {
            cuda::matvec(_stream, x, rows, {{parts[0], p.bias ? p.bias + begin : nullptr, p.y + begin, p.w.rows}});
        });
    }
    if (!resident.empty()) cuda::matvec(_stream, x, rows, resident);
}

// To x: residual += w input + bias
void CudaBackend::addFew(const cuda::MatvecInput& input, const Weight& w, const float* bias) {
    float* x = floats(_layout->x);
    if (w.resident()) {
        _weights->arrive(w.group);
        return cuda::matvecAdd(_stream, input, rows(), w, bias, x);
    }
    _weights->forPieces(w.group, [&](const std::vector<Matrix>& parts, int64_t begin) {
        cuda::matvecAdd(_stream, input, rows(), parts[0], bias ? bias + begin : nullptr, x + begin, w.rows);
    });
}

void CudaBackend::productMany(const cuda::HalfRows& input, const Weight& w, const float* bias, float* y, cuda::Store store) {
    if (w.resident()) {
        _weights->arrive(w.group);
        return cuda::matmul(_stream, w, input, _rows, bias, y, store);
    }
    _weights->forPieces(w.group, w.member, [&](const Matrix& part, int64_t begin) {
        cuda::matmul(_stream, part, input, _rows, bias ? bias + begin : nullptr, y + begin, store, w.rows);
    });
}

cuda::HeadPreparation CudaBackend::preparation(const AttentionWeights& w, float eps) const {
    cuda::HeadPreparation how;
    how.norm = w.qkNorm == AttentionSpec::QkNorm::PerHead   ? cuda::HeadNorm::PerHead
               : w.qkNorm == AttentionSpec::QkNorm::FullRow ? cuda::HeadNorm::FullRow
                                                            : cuda::HeadNorm::None;
    how.qNorm = w.qNorm;
    how.kNorm = w.kNorm;
    how.eps = eps;
    how.cos = w.rope.cos;
    how.sin = w.rope.sin;
    how.ropeDims = w.rope.dims;
    how.adjacent = w.rope.adjacent;
    return how;
}

void CudaBackend::attention(const AttentionWeights& w, const KvPages& pages, float eps) {
    few() ? attentionFew(w, pages, eps) : attentionMany(w, pages, eps);
}

void CudaBackend::attentionFew(const AttentionWeights& w, const KvPages& pages, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::HeadShape shape{w.heads, pages.kvHeads, pages.headDim};
    const cuda::RowOutputs normed = formsFor({w.q, w.k, w.v}, s.normed, s.normedQuant, _rows, _limits.embedding);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    float* const queries = floats(w.gated ? s.gatedQueries : s.q);
    productsFew(input(normed), rows(), {{w.q, w.qBias, queries}, {w.k, w.kBias, floats(s.k)}, {w.v, w.vBias, floats(s.v)}});
    if (w.gated) cuda::splitGatedQueries(_stream, queries, _rows, w.heads, pages.headDim, floats(s.q));
    cuda::prepareHeads(_stream, floats(s.q), floats(s.k), floats(s.v), shape, preparation(w, eps), _batch, pages, {});

    cuda::RowOutputs attended = formsFor({w.output}, s.attended, s.attendedQuant, _rows, w.output.cols);
    // Contract blocks do not cross heads only where a head is whole blocks.
    const bool convert = w.gated || (!isFloat(w.output) && pages.headDim % 32 != 0);
    cuda::RowOutputs written = attended;
    if (convert) written = {floats(s.attended), {}, {}};
    cuda::attentionDecode(_stream, floats(s.q), shape, w.scale, _batch, pages, at<uint8_t>(s.attention), written);
    if (w.gated) cuda::gateHeads(_stream, floats(s.attended), queries, _rows, w.heads, pages.headDim, attended);
    else if (convert) cuda::convertRows(_stream, floats(s.attended), _rows, w.output.cols, attended);
    addFew(input(attended), w.output, w.outputBias);
}

void CudaBackend::attentionMany(const AttentionWeights& w, const KvPages& pages, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::HeadShape shape{w.heads, pages.kvHeads, pages.headDim};
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo), q = halves(s.qHi, s.qLo), attended = halves(s.attendedHi, s.attendedLo);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, {nullptr, {}, normed});
    float* const queries = floats(w.gated ? s.gatedQueries : s.q);
    productMany(normed, w.q, w.qBias, queries, cuda::Store::Write);
    productMany(normed, w.k, w.kBias, floats(s.k), cuda::Store::Write);
    productMany(normed, w.v, w.vBias, floats(s.v), cuda::Store::Write);
    if (w.gated) cuda::splitGatedQueries(_stream, queries, _rows, w.heads, pages.headDim, floats(s.q));
    cuda::prepareHeads(_stream, floats(s.q), floats(s.k), floats(s.v), shape, preparation(w, eps), _batch, pages, q);
    const cuda::RowOutputs ungated{floats(s.attendedFloats), {}, {}}, written{nullptr, {}, attended};
    cuda::attentionPrefill(_stream, q, shape, w.scale, _batch, _tiles, pages, w.gated ? ungated : written);
    if (w.gated) cuda::gateHeads(_stream, ungated.floats, queries, _rows, w.heads, pages.headDim, written);
    productMany(attended, w.output, w.outputBias, floats(s.x), cuda::Store::Add);
}

void CudaBackend::dense(const DenseWeights& w, float eps) { few() ? denseFew(w, eps) : denseMany(w, eps); }

// The GPU's columns of silu(gate x) * (up x).
void CudaBackend::gatedFew(const cuda::MatvecInput& x, const DenseWeights& w, const cuda::RowOutputs& hidden) {
    const GpuScratch& s = *_layout;
    const int64_t width = w.gate.rows;
    const bool fused = sameType(w.gate, w.up);
    if (w.gate.resident()) {
        _weights->arrive(w.gate.group);
        if (fused) return cuda::matvecGated(_stream, x, rows(), w.gate, w.up, hidden);
        cuda::matvec(_stream, x, rows(), {{w.gate, nullptr, floats(s.gate)}, {w.up, nullptr, floats(s.up)}});
    } else {
        _weights->forPieces(w.gate.group, [&](const std::vector<Matrix>& parts, int64_t begin) {
            if (fused) return cuda::matvecGated(_stream, x, rows(), parts[0], parts[1], hidden, begin, width);
            cuda::matvec(_stream, x, rows(), {{parts[0], nullptr, floats(s.gate) + begin, width}, {parts[1], nullptr, floats(s.up) + begin, width}});
        });
    }
    // The CPU's columns are rubbish here, and are overwritten when they come.
    if (!fused) cuda::siluMul(_stream, floats(s.gate), floats(s.up), _rows, width, hidden);
}

void CudaBackend::denseFew(const DenseWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::RowOutputs normed = formsFor({w.gate, w.up}, s.normed, s.normedQuant, _rows, _limits.embedding);
    const cuda::RowOutputs hidden = formsFor({w.down}, s.hidden, s.hiddenQuant, _rows, w.down.cols);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    if (w.gate.cpuRows || w.down.cpuRows) return denseShared(w, normed, hidden);
    gatedFew(input(normed), w, hidden);
    addFew(input(hidden), w.down, nullptr);
}

// The CPU computes the last rows of gate and up, and of down. Each processor needs all of the hidden rows for down, so they
// are exchanged in between.
void CudaBackend::denseShared(const DenseWeights& w, const cuda::RowOutputs& normed, const cuda::RowOutputs& hidden) {
    const Mailbox& mail = _share->mailbox();
    const int64_t columns = w.gate.rows, ofGpu = w.gate.deviceRows(), width = w.down.rows, widthOfGpu = w.down.deviceRows(), rows = _rows;
    HostShare* share = _share.get();
    uint32_t hiddenSent = 0, hiddenReturned = 0;
    if (w.gate.cpuRows) {
        const uint32_t sent = share->nextSent();
        hiddenReturned = share->nextReturned();
        cuda::sendRows(_stream, normed, rows, 0, _limits.embedding, mail.input, mail.sent, sent);
        if (ofGpu) gatedFew(input(normed), w, hidden);
        if (ofGpu && w.down.cpuRows) hiddenSent = share->nextSent(), cuda::sendRows(_stream, hidden, rows, 0, ofGpu, mail.hidden, mail.sent, hiddenSent);
        onHost([=, gate = w.gate.inFile(), up = w.up.inFile(), down = w.down.inFile(), ticket = hiddenReturned] {
            share->gated(gate, up, down, rows, ofGpu, sent, ticket);
        });
        if (widthOfGpu) cuda::receiveRows(_stream, mail.hidden, rows, ofGpu, columns, mail.returned, hiddenReturned, hidden);
    } else {
        gatedFew(input(normed), w, hidden);
        hiddenSent = share->nextSent();
        cuda::sendRows(_stream, hidden, rows, 0, columns, mail.hidden, mail.sent, hiddenSent);
    }
    if (widthOfGpu) addFew(input(hidden), w.down, nullptr);
    if (!w.down.cpuRows) return;
    const uint32_t returned = share->nextReturned();
    onHost([=, down = w.down.inFile(), after = hiddenSent] { share->down(down, rows, widthOfGpu, after, returned); });
    cuda::receiveAdd(_stream, mail.down, rows, widthOfGpu, width - widthOfGpu, mail.returned, returned, floats(_layout->x), width);
}

void CudaBackend::denseMany(const DenseWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, {nullptr, {}, normed});
    feedMany(normed, w.gate, w.up, w.down, floats(s.x), cuda::Store::Add);
}

// y (+)= down(silu(gate x) * up x)
void CudaBackend::feedMany(const cuda::HalfRows& x, const Weight& gate, const Weight& up, const Weight& down, float* y, cuda::Store store) {
    const GpuScratch& s = *_layout;
    const cuda::HalfRows hidden = halves(s.hiddenHi, s.hiddenLo);
    productMany(x, gate, nullptr, floats(s.manyGate), cuda::Store::Write);
    productMany(x, up, nullptr, floats(s.manyUp), cuda::Store::Write);
    cuda::siluMul(_stream, floats(s.manyGate), floats(s.manyUp), _rows, down.cols, {nullptr, {}, hidden});
    productMany(hidden, down, nullptr, y, store);
}

void CudaBackend::experts(const ExpertWeights& w, float eps) { few() ? expertsFew(w, eps) : expertsMany(w, eps); }

void CudaBackend::expertsFew(const ExpertWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const Matrix &gate = w.gate.first, &up = w.up.first, &down = w.down.first;
    auto* chosen = at<int32_t>(s.chosen);
    cuda::RowOutputs normed = formsFor({w.router, gate, up}, s.normed, s.normedQuant, _rows, _limits.embedding);
    cuda::SharedScale scale;
    if (w.shared) {
        normed = withForms(normed, formsFor({w.shared->gate, w.shared->up}, s.normed, s.normedQuant, _rows, _limits.embedding));
        normed.floats = floats(s.normed);
        scale = {normed.floats, w.shared->scale, _limits.embedding, floats(s.sharedScale)};
    }
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding, normed);
    productsFew(input(normed), rows(), {{w.router, nullptr, floats(s.routerLogits)}});
    for (const WeightStack* stack : {&w.gate, &w.up, &w.down}) _weights->arrive(stack->group);
    cuda::route(_stream, floats(s.routerLogits), _rows, w.gate.count, w.used, w.renormalize, w.weightScale, chosen, floats(s.weight),
                at<uint32_t>(s.expertUses) + static_cast<int64_t>(w.row) * _limits.experts, scale);
    if (!w.gate.resident()) return expertsInSlots(w, normed, eps);
    const cuda::SharedAnswer shared = sharedFew(w, normed);
    const cuda::RowOutputs hidden = formsFor({down}, s.hidden, s.hiddenQuant, _rows * w.used, down.cols);
    hiddenOfExperts(input(normed), {w.gate, w.up, w.down}, chosen, w.used, hidden);
    cuda::expertDownAdd(_stream, input(hidden), rows(), w.down, chosen, floats(s.weight), w.used, floats(s.x), shared);
}

// silu(gate x) * (up x) of each pair: of matrix which[pair] of the stacks.
void CudaBackend::hiddenOfExperts(const cuda::MatvecInput& x, const ExpertStacks& w, const int32_t* which, int32_t used, const cuda::RowOutputs& hidden) {
    const GpuScratch& s = *_layout;
    if (sameType(w.gate.first, w.up.first)) return cuda::expertGated(_stream, x, rows(), w.gate, w.up, which, used, hidden);
    cuda::expertMatvec(_stream, x, rows(), w.gate, which, used, false, floats(s.gate));
    cuda::expertMatvec(_stream, x, rows(), w.up, which, used, false, floats(s.up));
    cuda::siluMul(_stream, floats(s.gate), floats(s.up), _rows * used, w.down.first.cols, hidden);
}

// Of the chosen experts the GPU computes those in slots, and what the CPU orders it to fetch; the CPU computes the others
// meanwhile, reading them where they are in the file (kernels/expert_cache.h).
void CudaBackend::expertsInSlots(const ExpertWeights& w, const cuda::RowOutputs& normed, float eps) {
    const GpuScratch& s = *_layout;
    const Mailbox& mail = _share->mailbox();
    const ExpertStacks slots = _slots->slots(w.row);
    const int64_t rows = _rows, pairs = rows * w.used;
    auto* slot = at<int32_t>(s.slot);
    auto* orders = at<cuda::DeviceOrders>(s.orders);
    const int32_t *chosen = at<int32_t>(s.chosen), *foreseen = foreseeNext(w, eps);
    const uint32_t sent = _share->nextSent(), instructed = _share->nextInstructed(), returned = _share->nextReturned();
    // The router may read another form than the experts do.
    const cuda::RowOutputs read = formsFor({w.gate.first, w.up.first}, s.normed, s.normedQuant, rows, _limits.embedding);
    if (_aheadRuns) _stream.wait(_aheadDone);
    _aheadRuns = false;
    cuda::sendExperts(_stream, read, rows, w.used, chosen, expertRow(s.expertTable, w.row), foreseen, slot, orders, mail.input,
                      mail.choicesOf(w.row), mail.sent, sent);
    const cuda::SharedAnswer shared = sharedFew(w, normed);  // beside the CPU's work
    // Before kernels that wait for the CPU: where steps are launched one by one, a kernel's first launch may wait for the GPU.
    onHost([=, share = _share.get(), plan = _misses.get(), file = w.inFile(), row = w.row, used = w.used, predicted = foreseen != nullptr] {
        share->experts(file, row, rows, used, predicted, *plan, sent, instructed, returned);
    });
    if (slots.gate.count > 0) {
        const cuda::RowOutputs hidden = formsFor({w.down.first}, s.hidden, s.hiddenQuant, pairs, w.down.first.cols);
        cuda::fetchExperts(_stream, slots, mail.orders, mail.instructed, instructed, orders, pairs, chosen, slot);
        if (foreseen && _ahead) fetchAheadOf(*w.next);
        hiddenOfExperts(input(normed), slots, slot, w.used, hidden);
        cuda::expertMatvec(_stream, input(hidden), this->rows(), slots.down, slot, w.used, true, floats(s.answers));
    }
    cuda::combineAnswers(_stream, floats(s.answers), mail.answers, slot, floats(s.weight), rows, w.used, _limits.embedding, mail.returned, returned,
                         floats(s.x), shared);
}

// What the next layer's router makes of this layer's rows: a guess at what it will choose, where somebody wants it.
const int32_t* CudaBackend::foreseeNext(const ExpertWeights& w, float eps) {
    if (!w.next || (_foresight != Prefetch::Count && _foresight != Prefetch::NextLayer)) return nullptr;
    const GpuScratch& s = *_layout;
    const ExpertWeights& next = *w.next;
    const cuda::RowOutputs normed = formsFor({next.router}, s.foreseenRows, s.foreseenQuant, _rows, _limits.embedding);
    if (!next.router.resident() || next.used != w.used) return nullptr;
    cuda::rmsNorm(_stream, floats(s.x), nullptr, next.norm, eps, _rows, _limits.embedding, normed);
    cuda::matvec(_stream, input(normed), rows(), {{next.router, nullptr, floats(s.routerLogits)}});
    cuda::route(_stream, floats(s.routerLogits), _rows, next.gate.count, next.used, next.renormalize, next.weightScale, at<int32_t>(s.foreseen),
                floats(s.foreseenWeight), nullptr);
    return at<int32_t>(s.foreseen);
}

// While this layer's experts are multiplied, and until the next layer looks for its own.
void CudaBackend::fetchAheadOf(const ExpertWeights& next) {
    _stream.record(_aheadForked);
    _ahead->wait(_aheadForked);
    cuda::fetchAhead(*_ahead, _slots->slots(next.row), at<cuda::DeviceOrders>(_layout->orders), expertRow(_layout->expertTable, next.row));
    _ahead->record(_aheadDone);
    _aheadRuns = true;
}

// Experts in slots are used where they are; the others come over in pieces.
void CudaBackend::expertProductMany(const cuda::HalfRows& x, const WeightStack& w, const MatrixStack& slots, int32_t row, const cuda::ExpertGroups& groups,
                                    bool gather, float* y) {
    if (w.resident()) return cuda::matmulExperts(_stream, w, x, groups, gather, y);
    const GpuScratch& s = *_layout;
    if (slots.count > 0) cuda::matmulExperts(_stream, slots, x, groups, gather, y, {expertRow(s.expertTable, row), 0, slots.count});
    _weights->forExperts(w.group, [&](const MatrixStack& part, int32_t first) {
        cuda::matmulExperts(_stream, part, x, groups, gather, y, {expertRow(s.expertOrdinal, row), first, first + part.count});
    });
}

void CudaBackend::expertsMany(const ExpertWeights& w, float eps) {
    const GpuScratch& s = *_layout;
    const int64_t pairs = _rows * w.used;
    const int32_t count = w.gate.count;
    const cuda::HalfRows normed = halves(s.normedHi, s.normedLo), hidden = halves(s.hiddenHi, s.hiddenLo);
    auto* chosen = at<int32_t>(s.chosen);
    cuda::rmsNorm(_stream, floats(s.x), nullptr, w.norm, eps, _rows, _limits.embedding,
                  {w.shared ? floats(s.sharedOut) : nullptr, {}, normed});
    productMany(normed, w.router, nullptr, floats(s.manyRouterLogits), cuda::Store::Write);
    for (const WeightStack* stack : {&w.gate, &w.up, &w.down}) _weights->arrive(stack->group);
    cuda::route(_stream, floats(s.manyRouterLogits), _rows, count, w.used, w.renormalize, w.weightScale, chosen, floats(s.weight),
                at<uint32_t>(s.expertUses) + static_cast<int64_t>(w.row) * _limits.experts);
    const cuda::ExpertGrouping made = cuda::expertGroupingOver(at<uint8_t>(s.grouping), _rows, w.used, count);
    cuda::groupExperts(_stream, chosen, _rows, w.used, count, made);
    const cuda::ExpertGroups groups{made.begin, made.pairToken, made.tileExpert, made.tileBegin, pairs, cuda::maxExpertTiles(pairs, count)};
    const ExpertStacks slots = w.gate.resident() ? ExpertStacks{} : _slots->slots(w.row);
    expertProductMany(normed, w.gate, slots.gate, w.row, groups, true, floats(s.manyGate));
    expertProductMany(normed, w.up, slots.up, w.row, groups, true, floats(s.manyUp));
    cuda::siluMul(_stream, floats(s.manyGate), floats(s.manyUp), pairs, w.down.first.cols, {nullptr, {}, hidden});
    expertProductMany(hidden, w.down, slots.down, w.row, groups, false, floats(s.expertOut));
    const cuda::SharedAnswer shared = sharedMany(w, normed);
    cuda::combineExperts(_stream, floats(s.expertOut), made.pairOf, floats(s.weight), _rows, w.used, w.down.first.rows, floats(s.x), shared);
}

// The expert that every token goes through; its scale is there already.
cuda::SharedAnswer CudaBackend::sharedFew(const ExpertWeights& layer, const cuda::RowOutputs& normed) {
    if (!layer.shared) return {};
    const GpuScratch& s = *_layout;
    const SharedExpertWeights& w = *layer.shared;
    const cuda::RowOutputs hidden = formsFor({w.down}, s.hidden, s.hiddenQuant, _rows, w.down.cols);
    if (w.gate.resident() && w.up.resident() && sameType(w.gate, w.up)) {
        for (const Weight* matrix : {&w.gate, &w.up}) _weights->arrive(matrix->group);
        cuda::matvecGated(_stream, input(normed), rows(), w.gate, w.up, hidden);
    } else {
        productsFew(input(normed), rows(), {{w.gate, nullptr, floats(s.gate)}, {w.up, nullptr, floats(s.up)}});
        cuda::siluMul(_stream, floats(s.gate), floats(s.up), _rows, w.down.cols, hidden);
    }
    productsFew(input(hidden), rows(), {{w.down, nullptr, floats(s.sharedOut)}});
    return {floats(s.sharedOut), floats(s.sharedScale)};
}

cuda::SharedAnswer CudaBackend::sharedMany(const ExpertWeights& layer, const cuda::HalfRows& normed) {
    if (!layer.shared) return {};
    const GpuScratch& s = *_layout;
    const SharedExpertWeights& w = *layer.shared;
    float* const y = floats(s.sharedOut);  // at first the normed rows themselves, for their scales
    cuda::rowDots(_stream, y, w.scale, _rows, _limits.embedding, floats(s.sharedScale));
    feedMany(normed, w.gate, w.up, w.down, y, cuda::Store::Write);
    return {y, floats(s.sharedScale)};
}

void CudaBackend::head(const HeadWeights& w, float eps, int64_t first, int64_t count) {
    const GpuScratch& s = *_layout;
    const cuda::RowOutputs normed = formsFor({w.output}, s.normed, s.normedQuant, count, _limits.embedding);
    const bool again = first > 0;  // after the region
    if (again) _weights->beginHead();
    cuda::rmsNorm(_stream, floats(s.x), _wanted + first, w.norm, eps, count, _limits.embedding, normed);
    // A small batch has all its logits in the first call, with the step's other work.
    const bool shared = w.output.cpuRows && few();
    const uint32_t sent = shared ? _share->nextSent() : 0;
    if (shared) cuda::sendRows(_stream, normed, count, 0, _limits.embedding, _share->mailbox().input, _share->mailbox().sent, sent);
    if (!shared || w.output.deviceRows()) productsFew(input(normed), static_cast<int>(count), {{w.output, nullptr, floats(s.logits)}});
    if (shared) {
        const Mailbox& mail = _share->mailbox();
        const uint32_t returned = _share->nextReturned();
        onHost([=, share = _share.get(), output = w.output.inFile(), begin = w.output.deviceRows()] { share->head(output, count, begin, sent, returned); });
        cuda::receiveRows(_stream, mail.logits, count, w.output.deviceRows(), w.output.rows, mail.returned, returned, {floats(s.logits), {}, {}});
    }
    if (again) _weights->end();
}

}  // namespace sharpi
