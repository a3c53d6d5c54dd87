// Passes of the model that several texts share: steps of answers, and pieces of prompts.
#pragma once

#include <vector>

#include "engine/texts/continuation.h"

namespace sharpi {

// Gives each of these texts of one engine tokens to hand out, unless it has some or its context is full. Texts share a
// step, as many as its rows allow; those that draft with the prediction layer have steps of their own. Each drafts at
// most `drafts` tokens. What a text gets does not depend on its company. If it throws, no token is lost.
void stepTogether(const std::vector<Continuation*>& texts, int64_t drafts);

// Computes a piece of each text's prompt in one pass of at most `rows` rows, of as many of the texts as have room in
// it; the first one always has. Returns for each text whether nothing is missing any more. All prompts must have begun.
// What a text gets does not depend on its company. If it throws, it can be called again, also with other texts.
std::vector<bool> prepareTogether(const std::vector<Continuation*>& texts, int64_t rows);

}  // namespace sharpi
