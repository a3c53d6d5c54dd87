// See cpu_experts.h.
#include "cpu/cpu_experts.h"

#include <algorithm>
#include <cstring>

#include "core/portable.h"

namespace sharpi {

void CpuExperts::route(const RouterCall& call) {
    const int64_t rows = _work.rows();
    const auto used = static_cast<size_t>(call.used), pairs = static_cast<size_t>(rows) * used;
    Routing& r = _routing;
    r.weight.resize(pairs);
    r.pairOf.resize(pairs);
    r.pairToken.resize(pairs);
    r.expertBegin.assign(static_cast<size_t>(call.count) + 1, 0);
    std::vector<int32_t> order(static_cast<size_t>(call.count)), chosen(pairs);
    for (int64_t t = 0; t < rows; ++t) {
        float* const p = _work.at(RowBuffer::RouterLogits) + t * call.count;
        _work.kernels.softmax(p, call.count);
        for (int32_t e = 0; e < call.count; ++e) order[static_cast<size_t>(e)] = e;
        std::partial_sort(order.begin(), order.begin() + call.used, order.end(),
                          [p](int32_t a, int32_t b) { return p[a] > p[b] || (p[a] == p[b] && a < b); });
        float sum = 0;
        for (size_t k = 0; k < used; ++k) sum += p[order[k]];
        for (size_t k = 0; k < used; ++k) {
            const size_t pair = static_cast<size_t>(t) * used + k;
            const float share = call.renormalize ? p[order[k]] / sum : p[order[k]];
            r.weight[pair] = share * call.weightScale;
            chosen[pair] = order[k];
            ++r.expertBegin[static_cast<size_t>(order[k]) + 1];
        }
    }
    for (int32_t e = 0; e < call.count; ++e) {
        const int32_t times = r.expertBegin[static_cast<size_t>(e) + 1];
        if (times) _profiler.addUse(call.expertLayer, e, static_cast<uint64_t>(times));
        r.expertBegin[static_cast<size_t>(e) + 1] += r.expertBegin[static_cast<size_t>(e)];
    }
    std::vector<int32_t> next(r.expertBegin.begin(), r.expertBegin.end() - 1);
    for (size_t i = 0; i < pairs; ++i) {
        const int32_t pair = next[static_cast<size_t>(chosen[i])]++;
        r.pairOf[i] = pair;
        r.pairToken[static_cast<size_t>(pair)] = static_cast<int32_t>(i / used);
    }
}

// Experts that are in memory share the threads; the others are multiplied as they come.
void CpuExperts::multiply(const float* x, const cpu::QuantizedRows& xQuant, const int32_t* rowIndex,
                          std::initializer_list<ExpertProduct> products) {
    std::vector<cpu::MatmulArgs> together;
    for (const ExpertProduct& product : products) {
        _work.forExperts(product.w, [&](const MatrixStack& part, int32_t first) {
            std::vector<cpu::MatmulArgs> jobs;
            for (int32_t i = 0; i < part.count; ++i) {
                const auto expert = static_cast<size_t>(first + i);
                const int32_t begin = _routing.expertBegin[expert], end = _routing.expertBegin[expert + 1];
                if (begin == end) continue;
                cpu::MatmulArgs job;
                job.w = part.at(i);
                job.xFloat = x;
                job.xQuant = &xQuant;
                job.rowIndex = rowIndex + begin;
                job.count = end - begin;
                job.y = product.y + begin * job.w.rows;
                job.yStride = job.w.rows;
                jobs.push_back(job);
            }
            if (product.w.resident()) together.insert(together.end(), jobs.begin(), jobs.end());
            else _work.multiply(jobs);
        });
    }
    _work.multiply(together);
}

void CpuExperts::compute(const ExpertCall& call) {
    const CpuScratch& s = _work.scratch();
    const int64_t hidden = call.gate.first.rows, pairs = _work.rows() * call.routing.used;
    const float* const normed = _work.floats(s.normed);
    float *const gate = _work.at(RowBuffer::Gate), *const up = _work.at(RowBuffer::Up);
    const auto isQuantized = [](const MatrixStack& m) { return !info(m.first.type).isFloat; };
    cpu::QuantizedRows xQuant, hiddenQuant;
    if (isQuantized(call.gate) || isQuantized(call.up))
        xQuant = _work.quantize(normed, _work.rows(), call.gate.first.cols, s.quantized);
    multiply(normed, xQuant, _routing.pairToken.data(), {{call.gate, gate}, {call.up, up}});
    _work.siluMul(gate, up, pairs * hidden);
    if (isQuantized(call.down)) hiddenQuant = _work.quantize(gate, pairs, hidden, s.quantizedHidden);
    std::vector<int32_t> own(static_cast<size_t>(pairs));
    for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<int32_t>(i);
    multiply(gate, hiddenQuant, own.data(), {{call.down, _work.at(RowBuffer::ExpertOut)}});
    const bool added = call.to == RowBuffer::Residual;
    float* const block = added ? _work.floats(s.block) : _work.at(call.to);
    sumByRank(call, block);
    if (call.sharedScale) addShared(call.sharedScale, block);
    if (added) _work.add(_work.at(call.to), block, _work.rows() * _work.limits.embedding);
}

// By rank, whatever the order in which the experts were computed.
void CpuExperts::sumByRank(const ExpertCall& call, float* to) {
    const int64_t width = call.down.first.rows, used = call.routing.used;
    const float* const out = _work.at(RowBuffer::ExpertOut);
    _work.forRanges(
        _work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
                std::memset(to + t * width, 0, sizeof(float) * static_cast<size_t>(width));
                for (int64_t k = 0; k < used; ++k) {
                    const auto ranked = static_cast<size_t>(t * used + k);
                    const int64_t pair = _routing.pairOf[ranked];
                    _work.kernels.addScaled(to + t * width, out + pair * width, _routing.weight[ranked], width);
                }
            }
        });
}

// += sigmoid(scale . n) * SharedOut, one fma an element.
void CpuExperts::addShared(const float* scale, float* to) {
    const CpuScratch& s = _work.scratch();
    const int64_t width = _work.limits.embedding;
    Weight row;
    row.rows = 1;
    row.cols = width;
    row.data = reinterpret_cast<const uint8_t*>(scale);
    float* const dots = _work.floats(s.sharedScale);
    const float* const shared = _work.at(RowBuffer::SharedOut);
    _work.linear(_work.floats(s.normed), _work.rows(), {{row, nullptr, dots}});
    _work.forRanges(
        _work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / width), [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t)
                _work.kernels.addScaled(to + t * width, shared + t * width, portableSigmoid(dots[t]), width);
        });
}

}  // namespace sharpi
