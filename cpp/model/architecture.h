// The table of architectures: what tells one transformer from another when both have the same parts.
// A new model is a new line in architecture.cpp, and code only if it brings a part that none has yet.
#pragma once

#include "model/model_spec.h"

namespace sharpi {

struct Architecture {
    const char* name;  // general.architecture, and the prefix of the metadata keys
    RopeSpec::Pairing pairing;
    AttentionSpec::QkNorm qkNorm;
    bool expertsRenormalized;
    bool needsExperts;
    bool hybrid;          // layers of Gated DeltaNet between those of attention, which is gated
    const char* ffnNorm;  // the name of the norm before the feed-forward part
};

const std::vector<Architecture>& architectures();

}  // namespace sharpi
