// See architecture.h.
#include "model/architecture.h"

namespace sharpi {

const std::vector<Architecture>& architectures() {
    using Pairing = RopeSpec::Pairing;
    using QkNorm = AttentionSpec::QkNorm;
    static const std::vector<Architecture> table = {
        // name        rotary pairs       norm of q and k   router weights sum to 1   always experts
        {"llama",      Pairing::Adjacent, QkNorm::None,     true,                     false},
        {"qwen2",      Pairing::Halves,   QkNorm::None,     true,                     false},
        {"qwen3",      Pairing::Halves,   QkNorm::PerHead,  true,                     false},
        {"qwen3moe",   Pairing::Halves,   QkNorm::PerHead,  true,                     true},
        {"olmoe",      Pairing::Halves,   QkNorm::FullRow,  false,                    true},
    };
    return table;
}

std::vector<std::string> knownArchitectures() {
    std::vector<std::string> names;
    for (const Architecture& a : architectures()) names.emplace_back(a.name);
    return names;
}

}  // namespace sharpi
