// Operations that pass everything on to others, for tests that change or watch some of them.
#pragma once

#include "operations/operations.h"

namespace tiny {

using namespace sharpi;

class Forwarding : public Operations {
public:
    explicit Forwarding(Operations& to) : _to(to) {}
    void embed(const Weight& table, float scale) override { _to.embed(table, scale); }
    void norm(const OptionalPart& part, const NormCall& norm, Readers readers, bool floats) override {
        _to.norm(part, norm, readers, floats);
    }
    void addPart(const PartCall& part) override { _to.addPart(part); }
    void linear(RowInput x, std::initializer_list<Product> products) override { _to.linear(x, products); }
    void addLinear(RowInput x, const Weight& w, const float* bias) override { _to.addLinear(x, w, bias); }
    void gatedLinear(RowInput x, const GatedProduct& product, const Weight& reader) override {
        _to.gatedLinear(x, product, reader);
    }
    void copyRows(const OptionalPart& part, Readers readers) override { _to.copyRows(part, readers); }
    void joinLayerInputs(const LayerInputsCall& call) override { _to.joinLayerInputs(call); }
    void gateLayerInput(int32_t layer, int64_t width, const Weight& reader) override {
        _to.gateLayerInput(layer, width, reader);
    }
    void prepareHeads(const HeadsCall& heads, const KvPages& pages) override { _to.prepareHeads(heads, pages); }
    void takeRows(const TakenRows& rows, RowInput to, Readers readers) override { _to.takeRows(rows, to, readers); }
    void linearByHead(RowInput x, const HeadProduct& call) override { _to.linearByHead(x, call); }
    void prepareLatent(const LatentCall& call, const KvPages& pages) override { _to.prepareLatent(call, pages); }
    void attend(const HeadsCall& heads, const KvPages& pages, const Weight& reader) override {
        _to.attend(heads, pages, reader);
    }
    void deltaRule(const DeltaCall& call, const RecurrentLayer& state, const Weight& reader) override {
        _to.deltaRule(call, state, reader);
    }
    void mamba(const MambaCall& call, const RecurrentLayer& state, const Weight& reader) override {
        _to.mamba(call, state, reader);
    }
    BlockOperations& blocks() override { return _to.blocks(); }
    StreamOperations& streams() override { return _to.streams(); }
    void route(const ExpertCall& call) override { _to.route(call); }
    void experts(const ExpertCall& call) override { _to.experts(call); }
    void joinDraft(const Weight& table, const float* norms, const float* sourceNorm, float eps,
                   const Weight& reader) override {
        _to.joinDraft(table, norms, sourceNorm, eps, reader);
    }
    void head(const HeadCall& call, int64_t first, int64_t count) override { _to.head(call, first, count); }

private:
    Operations& _to;
};

}  // namespace tiny
