// See architecture.h.
#include "model/architecture.h"

namespace sharpi {

const std::vector<Architecture>& architectures() {
    using Pairing = RopeSpec::Pairing;
    using QkNorm = AttentionSpec::QkNorm;
    static const std::vector<Architecture> table = {
        // name        rotary pairs       norm of q and k   router sums to 1  always experts  hybrid  feed-forward norm
        {"llama", Pairing::Adjacent, QkNorm::None, true, false, false, "ffn_norm"},
        {"qwen2", Pairing::Halves, QkNorm::None, true, false, false, "ffn_norm"},
        {"qwen3", Pairing::Halves, QkNorm::PerHead, true, false, false, "ffn_norm"},
        {"qwen3moe", Pairing::Halves, QkNorm::PerHead, true, true, false, "ffn_norm"},
        {"olmoe", Pairing::Halves, QkNorm::FullRow, false, true, false, "ffn_norm"},
        {"qwen35", Pairing::Halves, QkNorm::PerHead, true, false, true, "post_attention_norm"},
        {"qwen35moe", Pairing::Halves, QkNorm::PerHead, true, true, true, "post_attention_norm"},
    };
    return table;
}

std::vector<std::string> knownArchitectures() {
    std::vector<std::string> names;
    for (const Architecture& a : architectures()) names.emplace_back(a.name);
    return names;
}

}  // namespace sharpi
