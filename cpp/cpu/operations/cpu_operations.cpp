// See cpu_operations.h. Rows, products and the output head; attention is in cpu_attention.cpp, Gated DeltaNet in
// cpu_delta.cpp, Mamba 2 in cpu_mamba.cpp.
#include "cpu/operations/cpu_operations.h"

#include <cstring>
#include <vector>

namespace sharpi {

const float* CpuOperations::input(RowInput x) const {
    const CpuScratch& s = _work.scratch();
    switch (x) {
    case RowInput::Normed: return _work.floats(s.normed);
    case RowInput::Attended: return _attended;
    case RowInput::Hidden: return _work.at(RowBuffer::Gate);
    case RowInput::Joined: return _work.floats(s.joined);
    case RowInput::LowRank: return _work.at(RowBuffer::LowRankQueries);
    case RowInput::PlainQueries: return _work.floats(s.plainQueries);
    case RowInput::HeadValues: return _work.at(RowBuffer::HeadValues);
    case RowInput::ExpertLatents: return _work.at(RowBuffer::ExpertLatents);
    case RowInput::Streams: return _work.floats(s.streams);
    }
    return nullptr;
}

void CpuOperations::embed(const Weight& table, float scale) {
    float* const x = _work.at(RowBuffer::Residual);
    _work.readRows(table, x, _work.limits.embedding);
    if (scale != 1.0f) _work.multiplyRows(x, scale, _work.rows() * _work.limits.embedding);
}

void CpuOperations::addPart(const PartCall& part) {
    const int64_t width = _work.limits.embedding, rows = _work.rows(), all = rows * width;
    float *const x = _work.at(RowBuffer::Residual), *const y = _work.at(RowBuffer::PartOut);
    const auto normed = [&](float* of, const float* weight) { _work.norm(of, weight, part.eps, rows, width, of); };
    if (part.sideNorms[0]) {
        float* const side = _work.at(RowBuffer::SideOut);
        normed(y, part.sideNorms[0]);
        normed(side, part.sideNorms[1]);
        _work.add(y, side, all);
    }
    if (part.norm) normed(y, part.norm);
    if (part.factor != 1.0f) _work.multiplyRows(y, part.factor, all);
    _work.add(x, y, all);
    if (part.scale) _work.multiplyRows(x, *part.scale, all);
}

// Products make the forms that they read themselves.
void CpuOperations::norm(const OptionalPart& part, const NormCall& norm, Readers, bool) {
    if (part) addPart(*part);
    float* const normed = _work.floats(_work.scratch().normed);
    _work.norm(_work.at(RowBuffer::Residual), norm, _work.rows(), _work.limits.embedding, normed);
}

void CpuOperations::linear(RowInput x, std::initializer_list<Product> products) {
    std::vector<CpuWork::Output> outputs;
    for (const Product& p : products) outputs.push_back({p.w, p.bias, _work.at(p.to)});
    _work.linear(input(x), _work.rows(), outputs);
}

void CpuOperations::addLinear(RowInput x, const Weight& w, const float* bias) {
    float* const block = _work.floats(_work.scratch().block);
    _work.linear(input(x), _work.rows(), {{w, bias, block}});
    _work.add(_work.at(RowBuffer::Residual), block, _work.rows() * w.rows);
}

void CpuOperations::gatedLinear(RowInput x, const GatedProduct& p, const Weight&) {
    float *const gates = _work.at(RowBuffer::Gate), *const ups = _work.at(RowBuffer::Up);
    std::vector<CpuWork::Output> outputs{{p.gate, p.gateBias, gates}};
    if (p.gated()) outputs.push_back({p.up, p.upBias, ups});
    _work.linear(input(x), _work.rows(), outputs);
    _work.gatedActivation(p.activation, gates, p.gated() ? ups : nullptr, _work.rows() * p.gate.rows);
}

void CpuOperations::takeRows(const TakenRows& rows, RowInput to, Readers readers) {
    const float* const from = _work.at(rows.from);
    auto* const taken = const_cast<float*>(input(to));
    const int64_t pieces = _work.rows() * rows.pieces, width = readers.begin()->cols;
    _work.forRanges(pieces, std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const float* const piece = from + i * rows.stride;
            float* const out = taken + i * width;
            if (rows.norm) _work.kernels.rmsNorm(piece, rows.norm, rows.eps, width, out);
            else if (out != piece) std::memcpy(out, piece, sizeof(float) * static_cast<size_t>(width));
        }
    });
}

void CpuOperations::linearByHead(RowInput x, const HeadProduct& call) {
    _work.linearByHead(input(x), _work.rows(), {call.w, call.heads, _work.at(call.to), call.stride});
}

void CpuOperations::joinDraft(const Weight& table, const float* norms, const float* sourceNorm, float eps,
                              const Weight&) {
    const int64_t width = _work.limits.embedding;
    float *const joined = _work.floats(_work.scratch().joined), *const x = _work.at(RowBuffer::Residual);
    _work.readRows(table, joined, 2 * width);
    for (int64_t t = 0; t < _work.rows(); ++t) {
        float *const token = joined + 2 * t * width, *const source = token + width;
        const int64_t from = _work.batch->sources[static_cast<size_t>(t)];
        _work.kernels.rmsNorm(token, norms, eps, width, token);
        _work.kernels.rmsNorm(x + from * width, sourceNorm, eps, width, source);
        _work.kernels.rmsNorm(source, norms + width, eps, width, source);
    }
}

void CpuOperations::head(const HeadCall& call, int64_t first, int64_t count) {
    const HostClock::Evaluation evaluation(_work.clock);  // further rows' logits come after the region
    const int64_t width = _work.limits.embedding;
    const CpuScratch& s = _work.scratch();
    float *const normed = _work.floats(s.normed), *const x = _work.at(RowBuffer::Residual);
    const bool afterRegion = _work.stream && first > 0;
    if (afterRegion) _work.stream->beginHead();
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = _work.batch->logitRows[static_cast<size_t>(first + i)];
        _work.norm(x + row * width, call.norm, 1, width, normed + i * width);
    }
    _work.linear(normed, count, {{call.output, nullptr, _work.floats(s.logits)}});
    if (call.scale != 1.0f) _work.multiplyRows(_work.floats(s.logits), call.scale, count * call.output.rows);
    if (call.softcap != 0) _work.softcap(_work.floats(s.logits), call.softcap, count * call.output.rows);
    if (afterRegion) _work.stream->end();
}

}  // namespace sharpi
