// Tells whether copies of pages and states may be used by another process.
#pragma once

#include <string>

#include "core/digest.h"
#include "engine/engine.h"

namespace sharpi {

// A digest of all that decides the bits of a page or a state beside the text: the model, the contract, how the cache is
// laid out, the arithmetic of prompts, and, if that is the device's own, the device. file: tells the model's file from
// any other.
Digest bitsIdentity(const std::string& file, const Engine& engine, const LockedModel& model);

}  // namespace sharpi
