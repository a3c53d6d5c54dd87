// Hyper-connections on the CPU, by the rule of core/rules/streams.h.
#pragma once

#include "cpu/cpu_work.h"
#include "operations/operations.h"

namespace sharpi {

class CpuStreams : public StreamOperations {
public:
    explicit CpuStreams(CpuWork& work) : _work(work) {}

    void begin() override;
    void norm(float eps, const Weight& reader) override;
    void enter(const StreamsCall& call) override;
    void leave(const StreamsCall& call) override;
    void end(const StreamsCall& call) override;

private:
    CpuWork& _work;
};

}  // namespace sharpi
