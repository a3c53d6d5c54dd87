// A kind of device as planning and loading see it: whether and how it keeps weights, and what a backend on it takes
// beside them. A description needs no device of its kind, so a plan for a GPU can be made on a machine without one.
// hardware/devices.h finds the kinds by name and makes their backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "memory/device_layout.h"
#include "model/model_spec.h"
#include "operations/batch.h"
#include "operations/step_limits.h"

namespace sharpi {

class DeviceKind {
public:
    virtual const char* name() const = 0;        // "cpu", "cuda"
    virtual const char* memoryName() const = 0;  // of its memory, for people: "ram", "vram"
    // Its memory is taken in multiples of this.
    virtual size_t granularity() const = 0;
    // How it keeps matrices in its memory; nothing if it reads weights in the mapped file. A plan's homes then mean
    // nothing.
    virtual std::optional<DeviceLayout> layout() const = 0;
    bool keepsWeights() const { return layout().has_value(); }
    // A backend's working memory. threads: the CPU's.
    virtual size_t scratchBytes(const StepLimits& limits, int threads) const = 0;
    // What a driver takes for recorded steps and the code of kernels, beside what a backend allocates: an estimate.
    virtual size_t recordBytes(const StepLimits& limits) const = 0;
    // The fewest rows that a batch must have room for, unless the context is shorter.
    virtual int64_t promptTile(PromptMode mode) const = 0;
    // Throws Error(InvalidArgument) that says which part of this model the kind has no kernels for.
    virtual void requireCanRun(const ModelSpec& spec) const = 0;

protected:
    ~DeviceKind() = default;  // kinds are constants
};

// One device of a kind. ordinal: its number among those of its kind, as the driver counts them.
struct Device {
    const DeviceKind* kind = nullptr;
    int ordinal = 0;
};

}  // namespace sharpi
