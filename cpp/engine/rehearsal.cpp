// See rehearsal.h.
#include "engine/rehearsal.h"

#include <algorithm>

#include "engine/texts/drafter.h"

namespace sharpi {

namespace {

// A sequence of this many rows of one kind. Decode rows all give a token, as drafts do, and may be rolled back.
void rehearseRows(const LockedModel& model, const ModelSpec& spec, const EngineOptions& options, RowKind kind,
                  int64_t rows) {
    const int32_t sequence = model.kv().createSequence();
    Batch batch;
    for (int64_t i = 0; i < rows; ++i)
        batch.add(kind, 0, static_cast<int32_t>(i), sequence, i + 1 == rows || kind == RowKind::Decode);
    std::vector<int64_t> marks;
    for (int64_t length = 1; length < rows && kind == RowKind::Decode; ++length) marks.push_back(length);
    model.kv().extend(sequence, rows, marks);
    model.forward().run(batch, nullptr);
    model.forward().sample(std::vector<Choice>(batch.logitRows.size()));
    if (!spec.predictions.empty()) {
        Sampler sampler(SamplingParams(), spec.vocabSize);
        const std::vector<int32_t> history;
        Drafter::Text text{sampler, history, {}, rows < options.context ? 2 : 1};
        const Drafter::Rows drafted{kind, sequence, 0, std::vector<int32_t>(static_cast<size_t>(rows), 0)};
        Drafter().predict(model.forward(), model.kv(), drafted, &text);
    }
    model.kv().releaseSequence(sequence);
}

}  // namespace

void rehearse(ModelRunner& runner, const ModelSpec& spec, const EngineOptions& options) {
    const LockedModel model = runner.lock();
    // Prompts of 512 rows use all kernels that longer ones do. Only exact ones of a model with few heads may need more
    // rows to fill a large GPU: then attention's kernel for many rows is loaded with the first such prompt.
    const int64_t most = std::min(options.batch, options.context);
    rehearseRows(model, spec, options, RowKind::Prompt, std::min<int64_t>(most, 512));
    rehearseRows(model, spec, options, RowKind::Decode, 1);
    if (!spec.predictions.empty() && most > 1) rehearseRows(model, spec, options, RowKind::Decode, 2);
}

}  // namespace sharpi
