// Compressed keys on the CPU.
#pragma once

#include "cpu/cpu_work.h"
#include "operations/operations.h"

namespace sharpi {

class CpuBlocks final : public BlockOperations {
public:
    explicit CpuBlocks(CpuWork& work) : _work(work) {}

    void compress(const CompressCall& call) override;
    void choose(const IndexCall& call) override;

private:
    CpuWork& _work;
};

}  // namespace sharpi
