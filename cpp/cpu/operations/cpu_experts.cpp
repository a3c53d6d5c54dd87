// See cpu_experts.h.
#include "cpu/operations/cpu_experts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/portable.h"
#include "cpu/operations/cpu_router.h"

namespace sharpi {

void CpuExperts::route(const ExpertCall& call) {
    choose(call.routing);
    _sourced = _source &&
               _source->find(call.routing.expertLayer, _routing.expertBegin, call.next ? call.next->expertLayer : -1);
}

void CpuExperts::choose(const RouterCall& call) {
    const int64_t rows = _work.rows();
    const auto used = static_cast<size_t>(call.used), pairs = static_cast<size_t>(rows) * used;
    Routing& r = _routing;
    for (std::vector<int32_t>* list : {&r.chosen, &r.pairOf, &r.pairAt}) list->resize(pairs);
    r.pairToken.resize(pairs);
    r.weight.resize(pairs);
    r.expertBegin.assign(static_cast<size_t>(call.count) + 1, 0);
    CpuRouter router(_work.kernels, call);
    for (int64_t t = 0; t < rows; ++t) {
        const int64_t first = t * call.used;
        router.route(_work.at(RowBuffer::RouterLogits) + t * call.count, r.chosen.data() + first,
                     r.weight.data() + first, _work.batch->tokens[static_cast<size_t>(t)]);
    }
    for (const int32_t expert : r.chosen) ++r.expertBegin[static_cast<size_t>(expert) + 1];
    for (int32_t e = 0; e < call.count; ++e) {
        const int32_t times = r.expertBegin[static_cast<size_t>(e) + 1];
        if (times) _profiler.addUse(call.expertLayer, e, static_cast<uint64_t>(times));
        r.expertBegin[static_cast<size_t>(e) + 1] += r.expertBegin[static_cast<size_t>(e)];
    }
    std::vector<int32_t> next(r.expertBegin.begin(), r.expertBegin.end() - 1);
    for (size_t i = 0; i < pairs; ++i) {
        const int32_t pair = next[static_cast<size_t>(r.chosen[i])]++;
        r.pairOf[i] = pair;
        r.pairAt[static_cast<size_t>(pair)] = static_cast<int32_t>(i);
        r.pairToken[static_cast<size_t>(pair)] = static_cast<int32_t>(i / used);
    }
}

// Experts that are in memory share the threads; the others are multiplied as they come.
void CpuExperts::multiply(const float* x, const cpu::QuantizedRows& xQuant, const int32_t* rowIndex,
                          const std::vector<ExpertProduct>& products) {
    std::vector<cpu::MatmulArgs> together;
    std::vector<Job> sourced;
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
                if (_sourced) {
                    job.w = _source->matrix(first + i, product.which);
                    sourced.push_back({job, first + i, product.which});
                } else {
                    jobs.push_back(job);
                }
            }
            if (product.w.resident()) together.insert(together.end(), jobs.begin(), jobs.end());
            else _work.multiply(jobs);
        });
    }
    if (_sourced) multiplyAsRead(std::move(sourced));
    else _work.multiply(together);
}

void CpuExperts::multiplyAsRead(std::vector<Job> jobs) {
    while (!jobs.empty()) {
        _source->await(jobs.front().expert, jobs.front().which);
        const auto left = std::stable_partition(
            jobs.begin(), jobs.end(), [&](const Job& job) { return _source->arrived(job.expert, job.which); });
        std::vector<cpu::MatmulArgs> ready;
        for (auto job = jobs.begin(); job != left; ++job) ready.push_back(job->product);
        jobs.erase(jobs.begin(), left);
        _work.multiply(ready);
    }
}

void CpuExperts::compute(const ExpertCall& call) {
    const CpuScratch& s = _work.scratch();
    const int64_t hidden = call.gate.first.rows, pairs = _work.rows() * call.routing.used;
    const float* const x = call.from == RowInput::Normed ? _work.floats(s.normed) : _work.at(RowBuffer::ExpertLatents);
    float *const gate = _work.at(RowBuffer::Gate), *const up = _work.at(RowBuffer::Up);
    const auto isQuantized = [](const MatrixStack& m) { return !info(m.first.type).isFloat; };
    cpu::QuantizedRows xQuant, hiddenQuant;
    std::vector<ExpertProduct> products{{call.gate, gate, 0}};
    if (call.gated()) products.push_back({call.up, up, 1});
    if (isQuantized(call.gate) || (call.gated() && isQuantized(call.up)))
        xQuant = _work.quantize(x, _work.rows(), call.gate.first.cols, s.quantized);
    multiply(x, xQuant, _routing.pairToken.data(), products);
    activate(call, gate, up);
    if (isQuantized(call.down)) hiddenQuant = _work.quantize(gate, pairs, hidden, s.quantizedHidden);
    std::vector<int32_t> own(static_cast<size_t>(pairs));
    for (size_t i = 0; i < own.size(); ++i) own[i] = static_cast<int32_t>(i);
    multiply(gate, hiddenQuant, own.data(), {{call.down, _work.at(RowBuffer::ExpertOut), 2}});
    const bool added = call.to == RowBuffer::Residual;
    float* const block = added ? _work.floats(s.block) : _work.at(call.to);
    sumByRank(call, block);
    if (call.shared) addShared(call.sharedScale, block);
    if (added) _work.add(_work.at(call.to), block, _work.rows() * _work.limits.embedding);
}

void CpuExperts::activate(const ExpertCall& call, float* gate, const float* up) {
    const int64_t hidden = call.gate.first.rows, pairs = _work.rows() * call.routing.used;
    const auto biasOf = [&](const float* bias, size_t ranked) {
        return bias ? bias + _routing.chosen[ranked] * hidden : nullptr;
    };
    _work.forRanges(pairs, std::max<int64_t>(1, CpuWork::kElementGrain / hidden), [&](int64_t begin, int64_t end) {
        for (int64_t pair = begin; pair < end; ++pair) {
            const auto ranked = static_cast<size_t>(_routing.pairAt[static_cast<size_t>(pair)]);
            cpu::GatedRow row{gate + pair * hidden, call.gated() ? up + pair * hidden : nullptr,
                              biasOf(call.gateBias, ranked), biasOf(call.upBias, ranked)};
            if (call.routing.weightsInput) row.factor = _routing.weight[ranked];
            _work.kernels.gatedActivation(call.activation, row, hidden);
        }
    });
}

// By rank, whatever the order in which the experts were computed. An answer's bias comes first. If the weight was the
// input's, an answer has the weight 1.
void CpuExperts::sumByRank(const ExpertCall& call, float* to) {
    const int64_t width = call.down.first.rows, used = call.routing.used;
    float* const out = _work.at(RowBuffer::ExpertOut);
    _work.forRanges(_work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / width),
                    [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) {
                            std::memset(to + t * width, 0, sizeof(float) * static_cast<size_t>(width));
                            for (int64_t k = 0; k < used; ++k) {
                                const auto ranked = static_cast<size_t>(t * used + k);
                                float* const answer = out + _routing.pairOf[ranked] * width;
                                if (call.downBias)
                                    _work.kernels.add(answer, call.downBias + _routing.chosen[ranked] * width, width);
                                const float weight = call.routing.weightsInput ? 1.0f : _routing.weight[ranked];
                                _work.kernels.addScaled(to + t * width, answer, weight, width);
                            }
                        }
                    });
}

// += sigmoid(scale . n) * SharedOut, one fma an element; without a scale the factor is 1.
void CpuExperts::addShared(const float* scale, float* to) {
    const CpuScratch& s = _work.scratch();
    const int64_t width = _work.limits.embedding;
    float* const dots = _work.floats(s.sharedScale);
    const float* const shared = _work.at(RowBuffer::SharedOut);
    if (scale) {
        Weight row;
        row.rows = 1;
        row.cols = width;
        row.data = reinterpret_cast<const uint8_t*>(scale);
        _work.linear(_work.floats(s.normed), _work.rows(), {{row, nullptr, dots}});
    }
    _work.forRanges(_work.rows(), std::max<int64_t>(1, CpuWork::kElementGrain / width),
                    [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) {
                            const float factor = scale ? portableSigmoid(dots[t]) : 1.0f;
                            _work.kernels.addScaled(to + t * width, shared + t * width, factor, width);
                        }
                    });
}

}  // namespace sharpi
