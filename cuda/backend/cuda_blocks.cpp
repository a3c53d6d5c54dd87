// The GPU backend's blocks of attention and feed-forward layers, and the output head. Each takes a batch's exact rows
// and its fast rows.
#include "backend/cuda_backend.h"
#include "core/contract.h"
#include "kernels/formats/packed.h"
#include "kernels/rows/crossing.h"

namespace sharpi {

namespace {

bool isFloat(const Matrix& m) { return info(m.type).isFloat; }
bool sameType(const Matrix& a, const Matrix& b) { return a.type == b.type; }

}  // namespace

cuda::RowOutputs CudaBackend::exactForms(std::initializer_list<Matrix> readers, size_t floatsAt, size_t quantizedAt,
                                         int64_t rows, int64_t cols) const {
    cuda::RowOutputs forms;
    for (const Matrix& m : readers) {
        if (isFloat(m)) forms.floats = floats(floatsAt);
        else forms.quantized = cuda::quantizedRowsOver(at<uint8_t>(quantizedAt), rows, cols);
    }
    return forms;
}

// rmsNorm of x for the products with `readers`. exactFloats, fastFloats: where the normed rows are wanted as floats
// too.
CudaBackend::Activations CudaBackend::normed(const float* weight, float eps, std::initializer_list<Matrix> readers,
                                             float* exactFloats, float* fastFloats) {
    const GpuScratch& s = *_layout;
    const int64_t width = _limits.embedding;
    Activations to{exactForms(readers, s.normed, s.normedQuant, exactRows(), width), halves(s.normedHi, s.normedLo),
                   width};
    if (exactFloats) to.exact.floats = exactFloats;
    if (exactRows()) cuda::rmsNorm(_stream, floats(s.x), nullptr, weight, eps, exactRows(), width, to.exact);
    if (fastRows())
        cuda::rmsNorm(_stream, floats(s.x) + exactRows() * width, nullptr, weight, eps, fastRows(), width,
                      {fastFloats, {}, to.fast});
    return to;
}

// Where a feed-forward layer's hidden rows go, for the product with `reader`: perRow of them for each row of the batch.
CudaBackend::Activations CudaBackend::hiddenRows(const Matrix& reader, int64_t perRow) const {
    const GpuScratch& s = *_layout;
    return {exactForms({reader}, s.hidden, s.hiddenQuant, exactRows() * perRow, reader.cols),
            halves(s.hiddenHi, s.hiddenLo), reader.cols};
}

void CudaBackend::embed(const Weight& table) { readTable(table, floats(_layout->x)); }

// The batch's tokens' rows of a table.
void CudaBackend::readTable(const Weight& table, float* out) {
    if (table.resident()) {
        _weights->arrive(table.group);
        return cuda::embed(_stream, table, _view.tokens, _view.rows, out);
    }
    Matrix inFile = table.inFile();
    inFile.data = _weights->deviceAddress(table.file);
    cuda::embedFromFile(_stream, inFile, _view.tokens, _view.rows, out);
}

// Exact rows: resident matrices share launches.
void CudaBackend::products(const Activations& x, std::initializer_list<Product> products) {
    std::vector<cuda::MatvecOutput> resident;
    for (const Product& p : products) {
        forParts(p.w, [&](const Matrix& part, int64_t begin) {
            const float* bias = p.bias ? p.bias + begin : nullptr;
            float* const y = p.y + begin;
            if (p.w.resident()) resident.push_back({part, bias, y, p.w.rows});
            else exactProducts(x, {{part, bias, y, p.w.rows}});
            fastProduct(x, part, bias, y, p.w.rows, cuda::Store::Write);
        });
    }
    if (!resident.empty()) exactProducts(x, std::move(resident));
}

// outputs: where the first row goes.
void CudaBackend::exactProducts(const Activations& x, std::vector<cuda::MatvecOutput> outputs) {
    forExactGroups([&](int64_t first, int rows) {
        cuda::matvec(_stream, x.from(first), rows, outputs);
        for (cuda::MatvecOutput& output : outputs) output.y += rows * output.stride;
    });
}

// y: where the first row of the batch goes.
void CudaBackend::fastProduct(const Activations& x, const Matrix& part, const float* bias, float* y, int64_t stride,
                              cuda::Store store) {
    if (fastRows()) cuda::matmul(_stream, part, x.fast, fastRows(), bias, y + exactRows() * stride, store, stride);
}

// To x: residual += w input + bias
void CudaBackend::addProduct(const Activations& x, const Weight& w, const float* bias) {
    float* const residual = floats(_layout->x);
    forParts(w, [&](const Matrix& part, int64_t begin) {
        const float* partBias = bias ? bias + begin : nullptr;
        forExactGroups([&](int64_t first, int rows) {
            cuda::matvecAdd(_stream, x.from(first), rows, part, partBias, residual + first * w.rows + begin, w.rows);
        });
        fastProduct(x, part, partBias, residual + begin, w.rows, cuda::Store::Add);
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
    const GpuScratch& s = *_layout;
    const cuda::HeadShape shape{w.heads, pages.kvHeads, pages.headDim};
    const int64_t width = int64_t{w.heads} * pages.headDim, kvWidth = int64_t{pages.kvHeads} * pages.headDim,
                  e = exactRows();
    float *const queries = floats(w.gated ? s.gatedQueries : s.q), *const q = floats(s.q), *const k = floats(s.k),
                 *const v = floats(s.v);
    products(normed(w.norm, eps, {w.q, w.k, w.v}), {{w.q, w.qBias, queries}, {w.k, w.kBias, k}, {w.v, w.vBias, v}});
    if (w.gated) cuda::splitGatedQueries(_stream, queries, _view.rows, w.heads, pages.headDim, q);
    const cuda::HeadPreparation how = preparation(w, eps);
    if (e) cuda::prepareHeads(_stream, q, k, v, shape, how, _view.exact, pages, {});
    if (fastRows())
        cuda::prepareHeads(_stream, q + e * width, k + e * kvWidth, v + e * kvWidth, shape, how, _view.fast, pages,
                           halves(s.qHi, s.qLo));

    const Activations attended{exactForms({w.output}, s.attended, s.attendedQuant, e, w.output.cols),
                               halves(s.attendedHi, s.attendedLo), w.output.cols};
    if (e) attendExact(w, shape, pages, queries, attended);
    if (fastRows()) attendFast(w, shape, pages, queries + e * 2 * width, attended);
    addProduct(attended, w.output, w.outputBias);
}

// queries: with their gates, if they have any.
void CudaBackend::attendExact(const AttentionWeights& w, const cuda::HeadShape& shape, const KvPages& pages,
                              const float* queries, const Activations& attended) {
    const GpuScratch& s = *_layout;
    // Contract blocks do not cross heads only if a head is whole blocks.
    const bool convert = w.gated || (!isFloat(w.output) && pages.headDim % kContractBlock != 0);
    const cuda::RowOutputs written = convert ? cuda::RowOutputs{floats(s.attended), {}, {}} : attended.exact;
    forExactGroups([&](int64_t first, int rows) {
        cuda::attentionDecode(_stream, floats(s.q) + first * attended.cols, shape, w.scale,
                              _view.exact.from(first, rows), pages, at<uint8_t>(s.attention),
                              cuda::rowsFrom(written, first, attended.cols));
    });
    if (w.gated)
        cuda::gateHeads(_stream, floats(s.attended), queries, exactRows(), w.heads, pages.headDim, attended.exact);
    else if (convert) cuda::convertRows(_stream, floats(s.attended), exactRows(), attended.cols, attended.exact);
}

void CudaBackend::attendFast(const AttentionWeights& w, const cuda::HeadShape& shape, const KvPages& pages,
                             const float* queries, const Activations& attended) {
    const GpuScratch& s = *_layout;
    const cuda::RowOutputs ungated{floats(s.attendedFloats), {}, {}}, written{nullptr, {}, attended.fast};
    cuda::attentionPrefill(_stream, halves(s.qHi, s.qLo), shape, w.scale, _view.fast, _view.queryTiles, pages,
                           w.gated ? ungated : written);
    if (w.gated) cuda::gateHeads(_stream, ungated.floats, queries, fastRows(), w.heads, pages.headDim, written);
}

void CudaBackend::dense(const DenseWeights& w, float eps) {
    const Activations in = normed(w.norm, eps, {w.gate, w.up}), hidden = hiddenRows(w.down, 1);
    if (_step && (w.gate.cpuRows || w.down.cpuRows)) return denseShared(w, in, hidden);
    gated(in, w.gate, w.up, hidden);
    addProduct(hidden, w.down, nullptr);
}

// silu(gate x) * (up x), the GPU's columns of it.
void CudaBackend::gated(const Activations& x, const Weight& gate, const Weight& up, const Activations& hidden) {
    float *const gates = floats(_layout->gate), *const ups = floats(_layout->up);
    const int64_t width = gate.rows;
    const bool resident = gate.resident() && up.resident(),
               streamedTogether = !gate.resident() && gate.group == up.group && _step;
    bool fused = sameType(gate, up) && (resident || streamedTogether);
    const auto exactFused = [&](const Matrix& gatePart, const Matrix& upPart, int64_t begin) {
        forExactGroups([&](int64_t first, int rows) {
            cuda::matvecGated(_stream, x.from(first), rows, gatePart, upPart,
                              cuda::rowsFrom(hidden.exact, first, hidden.cols), begin, width);
        });
    };
    if (streamedTogether) {
        _weights->forPieces(gate.group, [&](const std::vector<Matrix>& parts, int64_t begin) {
            if (fused) return exactFused(parts[0], parts[1], begin);
            exactProducts(x, {{parts[0], nullptr, gates + begin, width}, {parts[1], nullptr, ups + begin, width}});
        });
    } else if (fused) {
        for (const Weight* w : {&gate, &up}) _weights->arrive(w->group);
        exactFused(gate, up, 0);
        fastProduct(x, gate, nullptr, gates, width, cuda::Store::Write);
        fastProduct(x, up, nullptr, ups, width, cuda::Store::Write);
    } else {
        products(x, {{gate, nullptr, gates}, {up, nullptr, ups}});
    }
    // The CPU's columns are rubbish here, and are overwritten when they come.
    if (!fused && exactRows()) cuda::siluMul(_stream, gates, ups, exactRows(), width, hidden.exact);
    if (fastRows())
        cuda::siluMul(_stream, gates + exactRows() * width, ups + exactRows() * width, fastRows(), width,
                      {nullptr, {}, hidden.fast});
}

// The CPU computes the last rows of gate and up, and of down. Each processor needs all of the hidden rows for down, so
// they are exchanged in between.
void CudaBackend::denseShared(const DenseWeights& w, const Activations& in, const Activations& hidden) {
    const Mailbox& mail = _share->mailbox();
    const int64_t columns = w.gate.rows, ofGpu = w.gate.deviceRows(), width = w.down.rows,
                  widthOfGpu = w.down.deviceRows(), rows = exactRows();
    HostShare* share = _share.get();
    uint32_t hiddenSent = 0, hiddenReturned = 0;
    const auto sendHidden = [&](int64_t end) {
        hiddenSent = _work->nextSent();
        cuda::sendRows(_stream, hidden.exact, rows, 0, end, mail.hidden, mail.sent, hiddenSent);
    };
    if (w.gate.cpuRows) {
        const uint32_t sent = _work->nextSent();
        hiddenReturned = _work->nextReturned();
        cuda::sendRows(_stream, in.exact, rows, 0, _limits.embedding, mail.input, mail.sent, sent);
        if (ofGpu) gated(in, w.gate, w.up, hidden);
        if (ofGpu && w.down.cpuRows) sendHidden(ofGpu);
        _work->add([=, gate = w.gate.inFile(), up = w.up.inFile(), down = w.down.inFile(), ticket = hiddenReturned] {
            share->gated(gate, up, down, rows, ofGpu, sent, ticket);
        });
        if (widthOfGpu)
            cuda::receiveRows(_stream, mail.hidden, rows, ofGpu, columns, mail.returned, hiddenReturned, hidden.exact);
    } else {
        gated(in, w.gate, w.up, hidden);
        sendHidden(columns);
    }
    if (widthOfGpu) addProduct(hidden, w.down, nullptr);
    if (!w.down.cpuRows) return;
    const uint32_t returned = _work->nextReturned();
    _work->add(
        [=, down = w.down.inFile(), after = hiddenSent] { share->down(down, rows, widthOfGpu, after, returned); });
    cuda::receiveAdd(_stream, mail.down, rows, widthOfGpu, width - widthOfGpu, mail.returned, returned,
                     floats(_layout->x), width);
}

// Logits follow the contract whatever the row.
void CudaBackend::head(const HeadWeights& w, float eps, int64_t first, int64_t count) {
    const GpuScratch& s = *_layout;
    const cuda::RowOutputs normed = exactForms({w.output}, s.normed, s.normedQuant, count, _limits.embedding);
    const bool again = first > 0;  // after the region, and the GPU computes all
    if (again) _weights->beginHead();
    cuda::rmsNorm(_stream, floats(s.x), _view.logitRows + first, w.norm, eps, count, _limits.embedding, normed);
    const bool shared = w.output.cpuRows && _step && !again;
    const uint32_t sent = shared ? _work->nextSent() : 0;
    if (shared)
        cuda::sendRows(_stream, normed, count, 0, _limits.embedding, _share->mailbox().input, _share->mailbox().sent,
                       sent);
    const auto multiply = [&](const Matrix& part, int64_t begin) {
        cuda::matvec(_stream, {normed.floats, normed.quantized}, static_cast<int>(count),
                     {{part, nullptr, floats(s.logits) + begin, w.output.rows}});
    };
    if (!shared || w.output.deviceRows()) forParts(w.output, multiply);
    if (shared) {
        const Mailbox& mail = _share->mailbox();
        const uint32_t returned = _work->nextReturned();
        _work->add([=, share = _share.get(), output = w.output.inFile(), begin = w.output.deviceRows()] {
            share->head(output, count, begin, sent, returned);
        });
        cuda::receiveRows(_stream, mail.logits, count, w.output.deviceRows(), w.output.rows, mail.returned, returned,
                          {floats(s.logits), {}, {}});
    }
    if (again) _weights->end();
}

}  // namespace sharpi
