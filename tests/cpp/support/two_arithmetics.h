// A backend whose prompt rows have other bits than its decode rows, like a GPU's in Fast mode. It refuses batches for
// which a GPU could not keep the bits.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "draft_world.h"
#include "forwarding.h"

namespace tiny {

class TwoArithmetics : public Watched {
public:
    static constexpr int64_t kDecodeRows = 9;

    // step: promptStep(), 1 or kPromptTile.
    explicit TwoArithmetics(int64_t step) : _step(step) {}

    int64_t decodeRows() const override { return std::min(Watched::decodeRows(), kDecodeRows); }
    bool oneArithmetic() const override { return false; }
    int64_t promptStep() const override { return _step; }
    void takeScratch(const StepLimits& limits) override {
        _embedding = limits.embedding;
        Watched::takeScratch(limits);
    }
    void begin(const Batch& batch, const KvCache& kv) override {
        _rows = batch;
        if (batch.sources.empty()) checkTiles(kv);
        Watched::begin(batch, kv);
    }
    Operations& operations() override { return _marked; }

private:
    // Changes a prompt row's bits in a way that depends only on its token and its position.
    void markPromptRows() {
        for (int64_t t = _rows.decodeRows; t < _rows.size(); ++t) {
            const auto token = static_cast<uint32_t>(_rows.tokens[static_cast<size_t>(t)]);
            const auto position = static_cast<uint32_t>(_rows.positions[static_cast<size_t>(t)]);
            for (int64_t i = 0; i < _embedding; ++i) {
                const uint32_t hash =
                    (token * 2654435761u ^ position * 40503u ^ static_cast<uint32_t>(i) * 97u) * 2246822519u;
                rows(RowBuffer::Residual)[t * _embedding + i] *=
                    1.0f + 0.05f * static_cast<float>(hash >> 16) / 65536.0f;
            }
        }
    }
    void checkTiles(const KvCache& kv) const {
        for (int64_t begin = _rows.decodeRows, end = begin; begin < _rows.size(); begin = end) {
            const int32_t sequence = _rows.sequences[static_cast<size_t>(begin)];
            const int64_t position = _rows.positions[static_cast<size_t>(begin)];
            while (end < _rows.size() && _rows.sequences[static_cast<size_t>(end)] == sequence) ++end;
            if (position % _step) throw std::logic_error("prompt rows begin at position " + std::to_string(position));
            const std::vector<StateStep> steps = kv.states().steps(sequence);
            for (size_t i = 0; i + 1 < steps.size(); ++i) {
                const int64_t length = position + steps[i].end;
                if (length % _step)
                    throw std::logic_error("a state is wanted after " + std::to_string(length) + " tokens");
            }
        }
    }

    // Marks the rows that go into a pass.
    class Marked : public Forwarding {
    public:
        explicit Marked(TwoArithmetics& owner) : Forwarding(owner.Watched::operations()), _owner(owner) {}
        void embed(const Weight& table, float scale) override {
            Forwarding::embed(table, scale);
            _owner.markPromptRows();
        }
        void linear(RowInput x, std::initializer_list<Product> products) override {
            Forwarding::linear(x, products);
            if (x == RowInput::Joined) _owner.markPromptRows();
        }

    private:
        TwoArithmetics& _owner;
    };

    int64_t _step, _embedding = 0;
    Batch _rows;
    Marked _marked{*this};
};

// An engine on such a backend, which counts the rows that it computes.
struct TwoArithmeticsEngine {
    TwoArithmeticsEngine(const Model& model, const EngineOptions& options, int64_t step) {
        auto made = std::make_unique<TwoArithmetics>(step);
        backend = made.get();
        engine = std::make_shared<Engine>(model.spec(), model.weights(), options, std::move(made));
    }
    // The numbers of prompt rows and of decode rows that the model has computed since the last call.
    std::pair<int64_t, int64_t> rowsSeen() const {
        std::pair<int64_t, int64_t> rows;
        for (const auto& [pass, batch] : backend->seen) {
            if (pass != sharpi::Pass::Model) continue;
            rows.first += batch.size() - batch.decodeRows;
            rows.second += batch.decodeRows;
        }
        backend->seen.clear();
        return rows;
    }
    TwoArithmetics* backend;
    std::shared_ptr<Engine> engine;
};

// The step of such a backend for a model: whole tiles where a state goes through them.
inline int64_t promptStepOf(const Options& options) {
    return describe(options) == describe(hybrids()[0]) || family(options.architecture).mamba ? sharpi::kPromptTile : 1;
}

}  // namespace tiny
