// See token_sampler.h.
#include "backend/token_sampler.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kernels/sampling/sampling.h"

namespace sharpi {

TokenSampler::TokenSampler(CudaPass& pass)
    : _pass(pass),
      _tokens(sizeof(int32_t) * static_cast<size_t>(pass.layout->headRows)),
      _scores(sizeof(cuda::RowScore) * static_cast<size_t>(pass.layout->headRows)) {}

cuda::ScoredRow TokenSampler::scoredRow(int64_t row, size_t slot, int32_t best) const {
    return {static_cast<int16_t>(row), static_cast<int16_t>(slot),
            static_cast<int32_t>(std::min<int64_t>(best, vocab()))};
}

std::vector<Score> TokenSampler::score(const std::vector<ScoredToken>& wanted) {
    if (wanted.empty()) return {};
    std::vector<cuda::ScoredRow> rows;
    std::vector<cuda::RowChoice> choices;
    auto* const host = _tokens.as<int32_t>();
    for (const ScoredToken& t : wanted) {
        const size_t slot = rows.size();
        host[slot] = t.token;
        rows.push_back(scoredRow(t.row, slot, t.best));
        cuda::RowChoice choice;
        choice.row = rows.back().row;
        choice.token = rows.back().slot;
        choices.push_back(choice);
    }
    _pass.stream.uploadPinned(tokens(), host, sizeof(int32_t) * wanted.size());
    cuda::scoreRows(_pass.stream, logits(), vocab(), rows, scores());
    cuda::scoreChosen(_pass.stream, logits(), vocab(), choices, nullptr, tokens(), scores());
    _pass.stream.downloadPinned(_scores.as<cuda::RowScore>(), scores(), sizeof(cuda::RowScore) * wanted.size());
    _pass.await();
    std::vector<Score> result;
    for (size_t slot = 0; slot < wanted.size(); ++slot) result.push_back(scoreAt(slot, rows[slot].best));
    return result;
}

std::vector<Chosen> TokenSampler::sample(const std::vector<Choice>& choices) {
    std::vector<cuda::ScoredRow> scored;
    for (const Choice& c : choices)
        if (c.best >= 0) scored.push_back(scoredRow(c.row, static_cast<size_t>(&c - choices.data()), c.best));
    cuda::scoreRows(_pass.stream, logits(), vocab(), scored, scores());
    mask(choices);
    choose(choices);
    auto* const host = _tokens.as<int32_t>();
    _pass.stream.downloadPinned(host, tokens(), sizeof(int32_t) * choices.size());
    if (!scored.empty())
        _pass.stream.downloadPinned(_scores.as<cuda::RowScore>(), scores(), sizeof(cuda::RowScore) * choices.size());
    _pass.await();
    std::vector<Chosen> result;
    for (size_t i = 0; i < choices.size(); ++i) result.push_back({host[i], {}});
    for (const cuda::ScoredRow& row : scored)
        result[static_cast<size_t>(row.slot)].score = scoreAt(static_cast<size_t>(row.slot), row.best);
    return result;
}

// Masks lie where the candidates of sampling come later, which is larger.
void TokenSampler::mask(const std::vector<Choice>& choices) {
    const auto words = static_cast<size_t>(maskWords(vocab()));
    std::vector<int16_t> rows;
    for (const Choice& c : choices) {
        if (c.mask.empty()) continue;
        if (!_masks)
            _masks = std::make_unique<cuda::PinnedBuffer>(sizeof(uint32_t) * words *
                                                          static_cast<size_t>(_pass.layout->headRows));
        if (c.mask.size() != words) throw Error(ErrorKind::Internal, "a mask of another vocabulary");
        std::copy(c.mask.begin(), c.mask.end(), _masks->as<uint32_t>() + words * rows.size());
        rows.push_back(static_cast<int16_t>(c.row));
    }
    if (rows.empty()) return;
    const size_t bytes = sizeof(uint32_t) * words * rows.size();
    if (bytes > cuda::samplingScratchBytes(vocab()))
        throw Error(ErrorKind::Internal, "masks need more scratch than was planned");
    auto* const onDevice = _pass.at<uint32_t>(_pass.layout->sampling);
    _pass.stream.uploadPinned(onDevice, _masks->as<uint32_t>(), bytes);
    cuda::maskRows(_pass.stream, logits(), vocab(), rows, onDevice);
}

// There is room for as many adjustments as there are tokens.
void TokenSampler::choose(const std::vector<Choice>& choices) {
    std::vector<cuda::RowChoice> rows;
    std::vector<TokenAdjustment> adjustments;
    for (const Choice& c : choices) {
        if (static_cast<int64_t>(adjustments.size() + c.adjustments.size()) > vocab()) {
            choosePart(std::exchange(rows, {}), adjustments, choices);
            adjustments.clear();
        }
        rows.push_back({c.draw, c.rule, static_cast<int32_t>(adjustments.size()),
                        static_cast<int32_t>(c.adjustments.size()), static_cast<int16_t>(c.row),
                        static_cast<int16_t>(&c - choices.data())});
        adjustments.insert(adjustments.end(), c.adjustments.begin(), c.adjustments.end());
    }
    choosePart(std::move(rows), adjustments, choices);
}

void TokenSampler::choosePart(std::vector<cuda::RowChoice> rows, const std::vector<TokenAdjustment>& adjustments,
                              const std::vector<Choice>& choices) {
    auto* const onDevice = _pass.at<TokenAdjustment>(_pass.layout->adjustments);
    if (!adjustments.empty())
        _pass.clock.await([&] {  // the copy waits for the pass
            _pass.stream.upload(onDevice, adjustments.data(), sizeof(TokenAdjustment) * adjustments.size());
        });
    std::vector<cuda::RowChoice> scored, adjusted;
    for (cuda::RowChoice& row : rows) {
        if (choices[static_cast<size_t>(row.token)].best < 0) continue;
        scored.push_back(row);
        if (row.adjustments) adjusted.push_back(row);
        row.adjustments = 0;
    }
    cuda::adjustScored(_pass.stream, logits(), vocab(), adjusted, onDevice);
    cuda::sampleTokens(_pass.stream, logits(), vocab(), rows, onDevice, _pass.at<void*>(_pass.layout->sampling),
                       tokens());
    cuda::scoreChosen(_pass.stream, logits(), vocab(), scored, onDevice, tokens(), scores());
}

Score TokenSampler::scoreAt(size_t slot, int32_t best) const {
    const cuda::RowScore& from = _scores.as<cuda::RowScore>()[slot];
    Score score{from.logProbability, {}};
    for (int32_t i = 0; i < best; ++i) score.best.push_back({from.best[i], from.bestLogProbability[i]});
    return score;
}

}  // namespace sharpi
