// Steps of the model that several texts share.
#pragma once

#include <vector>

#include "engine/texts/continuation.h"

namespace sharpi {

// Gives each of these texts of one engine tokens to hand out, unless it has some or its context is full. Texts share a
// step, as many as its rows allow; those that draft with the prediction layer have steps of their own. Each drafts at
// most `drafts` tokens. What a text gets does not depend on its company. If it throws, no token is lost.
void stepTogether(const std::vector<Continuation*>& texts, int64_t drafts);

}  // namespace sharpi
