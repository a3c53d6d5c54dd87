// Compressed keys on the GPU: rows of blocks of tokens, the choice among them, and attention over them and a window.
// Exact and fast rows differ in products and in attention; blocks are made and chosen alike.
#pragma once

#include "backend/cuda_pass.h"
#include "operations/operations.h"

namespace sharpi {

class CudaBlocks final : public BlockOperations {
public:
    explicit CudaBlocks(CudaPass& pass) : _pass(pass) {}

    void compress(const CompressCall& call) override;
    void choose(const IndexCall& call) override;

    // Whether these heads are those of a layer whose keys are its values, which the operations below are for.
    static bool has(const HeadsCall& call) { return call.rotatesBack; }
    void prepareHeads(const HeadsCall& call, const KvPages& pages);
    void attend(const HeadsCall& call, const KvPages& pages, const Weight& reader);

private:
    CudaPass& _pass;
};

}  // namespace sharpi
