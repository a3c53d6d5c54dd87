// See bits_identity.h.
#include "engine/scheduler/bits_identity.h"

#include "core/contract.h"

namespace sharpi {

Digest bitsIdentity(const std::string& file, const Engine& engine, const LockedModel& model) {
    const KvCache& kv = model.kv();
    const Backend& backend = model.backend();
    Sha256 digest;
    const auto number = [&](int64_t value) { digest.add(&value, sizeof value); };
    digest.add(file);
    number(kContractVersion);
    number(KvCache::kPageTokens);
    number(static_cast<int64_t>(kv.layers()));
    for (size_t i = 0; i < kv.layers(); ++i) {
        const KvPages& layer = kv.layer(i);
        number(static_cast<int64_t>(layer.type));
        number(layer.kvHeads);
        number(layer.headDim);
    }
    for (const RopeSpec& rope : engine.spec().ropes) number(rope.isLong(engine.options().context));
    // A state's floats lie as the kind of device wants them.
    digest.add(kv.states().any() ? engine.options().device.kind->name() : "");
    number(static_cast<int64_t>(kv.states().stateBytes()));
    // Prompts of one arithmetic are the same on all devices.
    digest.add(backend.oneArithmetic() ? "" : backend.name());
    return digest.end();
}

}  // namespace sharpi
