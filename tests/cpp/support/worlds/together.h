// Texts that share passes, to be compared with each text alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "tiny_pass.h"

namespace tiny {

// Texts that share passes, a few rows of each at a time, and the logits of each when it is computed alone.
template <typename BackendType> struct Together {
    // rows: the most of a batch. context: the longest text. states: one for each text, and one more for each text that
    // continues in a batch in which others begin.
    template <typename... Arguments>
    Together(const Model& model, int64_t rows, int64_t context, sharpi::KvType type, int32_t states,
             Arguments&&... backendArguments)
        : pass(model, rows, context, type, 64, std::forward<Arguments>(backendArguments)...),
          vocab(static_cast<size_t>(model.options().vocab)) {
        using sharpi::KvCache;
        const int64_t pages = (context + KvCache::kPageTokens - 1) / KvCache::kPageTokens;
        sharpi::Allocator& allocator = pass.backend.allocator();
        pass.kv = KvCache(allocator, kvShapes(pass.spec), type, states * pages * KvCache::kPageTokens,
                          sharpi::RecurrentState(allocator, recurrentShapes(pass.spec), states));
    }
    void add(const std::vector<int32_t>& text, const std::vector<float>& expected) {
        texts.push_back(text);
        alone.push_back(expected);
        got.emplace_back(expected.size(), NAN);
        handles.push_back(pass.kv.createSequence());
        done.push_back(0);
    }
    size_t left(size_t text) const { return texts[text].size() - done[text]; }
    bool finished() const {
        for (size_t s = 0; s < texts.size(); ++s) {
            if (left(s)) return false;
        }
        return true;
    }
    // Draws up to 3 next rows of each of some texts, `rows` in all or fewer.
    std::vector<size_t> draw(std::mt19937& random, size_t rows) const {
        std::vector<size_t> counts(texts.size(), 0);
        for (size_t look = 0; look < 2 * texts.size() && rows; ++look) {
            const size_t s = random() % texts.size();
            if (counts[s]) continue;
            counts[s] = std::min({size_t{1} + random() % 3, rows, left(s)});
            rows -= counts[s];
        }
        return counts;
    }
    // Computes the next counts[s] rows of each text s in one batch, if there are any.
    void run(const std::vector<size_t>& counts, sharpi::RowKind kind) {
        sharpi::Batch batch;
        std::vector<std::pair<size_t, size_t>> rows;
        for (size_t s = 0; s < texts.size(); ++s) {
            if (!counts[s]) continue;
            pass.kv.extend(handles[s], static_cast<int64_t>(counts[s]));
            for (size_t i = 0; i < counts[s]; ++i, ++done[s]) {
                batch.add(kind, texts[s][done[s]], static_cast<int32_t>(done[s]), handles[s], true);
                rows.emplace_back(s, done[s]);
            }
        }
        if (rows.empty()) return;
        std::vector<float> logits(rows.size() * vocab, NAN);
        pass.forward.run(batch, logits.data());
        for (size_t i = 0; i < rows.size(); ++i) {
            const auto [s, at] = rows[i];
            std::copy_n(&logits[i * vocab], vocab, &got[s][at * vocab]);
        }
    }

    Pass<BackendType> pass;
    size_t vocab;
    std::vector<std::vector<int32_t>> texts;
    std::vector<std::vector<float>> alone, got;
    std::vector<int32_t> handles;
    std::vector<size_t> done;
};

}  // namespace tiny
