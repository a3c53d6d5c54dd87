// See cpu_kind.h.
#include "cpu/cpu_kind.h"

#include "cpu/cpu_backend.h"

namespace sharpi {

namespace {

class CpuKind final : public DeviceKind {
public:
    const char* name() const override { return "cpu"; }
    const char* memoryName() const override { return "ram"; }
    size_t granularity() const override { return size_t{4} << 10; }
    std::optional<DeviceLayout> layout() const override { return std::nullopt; }
    size_t scratchBytes(const StepLimits& limits, int threads) const override {
        return CpuBackend::scratchBytes(threads, limits);
    }
    size_t recordBytes(const StepLimits&) const override { return 0; }
    int64_t promptTile(PromptMode) const override { return 1; }
    void requireCanRun(const ModelSpec&) const override {}
};

}  // namespace

const DeviceKind& cpuKind() {
    static const CpuKind kind;
    return kind;
}

}  // namespace sharpi
