// Hyper-connections on the GPU, by the rule of core/rules/streams.h. They have one arithmetic: exact and fast rows
// differ only in the form in which products read them.
#pragma once

#include "backend/cuda_pass.h"
#include "operations/operations.h"

namespace sharpi {

class CudaStreams final : public StreamOperations {
public:
    explicit CudaStreams(CudaPass& pass) : _pass(pass) {}

    void begin() override;
    void norm(float eps, const Weight& reader) override;
    void enter(const StreamsCall& call) override;
    void leave(const StreamsCall& call) override;
    void end(const StreamsCall& call) override;

private:
    CudaPass& _pass;
};

}  // namespace sharpi
