// Constraints that are written in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine/answers/token_constraint.h"

namespace sharpi {

// Calls an object with the methods of sharpi.constraints.Constraint. Any thread may use and destroy it; it takes the
// GIL. No thread that holds the GIL may wait for that thread. None: nullptr.
std::shared_ptr<TokenConstraint> constraintOf(const pybind11::object& object);

}  // namespace sharpi
