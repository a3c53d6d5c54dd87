// See weight_registry.h.
#include "model/weight_registry.h"

namespace sharpi {

const char* roleName(WeightRole role) {
    switch (role) {
    case WeightRole::Embedding: return "embedding";
    case WeightRole::LayerEmbedding: return "layer_embedding";
    case WeightRole::Vector: return "vector";
    case WeightRole::Attention: return "attention";
    case WeightRole::Router: return "router";
    case WeightRole::FfnGate: return "ffn_gate";
    case WeightRole::FfnUp: return "ffn_up";
    case WeightRole::FfnDown: return "ffn_down";
    case WeightRole::Experts: return "experts";
    case WeightRole::Head: return "head";
    }
    return "";
}

}  // namespace sharpi
