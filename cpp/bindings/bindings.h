// What the sources of sharpi._core share. Each source binds one part of the core; module.cpp puts them together.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "engine/engine.h"
#include "engine/texts/drafter.h"
#include "model/model_spec.h"
#include "model/weights.h"

namespace sharpi {

namespace py = pybind11;

// What Python read from a file's header: the spec, and the table that it was read from.
struct Description {
    ModelSpec spec;
    TensorTable tensors;
};

// Throws Error(InvalidArgument) for a name that is not known.
KvType toKvType(const std::string& name);

// Throws Error(InvalidArgument) for a source of drafts that is not known.
DraftOptions toDraftOptions(const std::string& source, int32_t tokens);

// In the order in which module.cpp calls them: a signature in a docstring names a class only once it is bound.
void bindOptions(py::module_& m);
void bindDescription(py::module_& m);
void bindEngine(py::module_& m);
void bindSession(py::module_& m);
void bindScheduler(py::module_& m);
void bindHardware(py::module_& m);

}  // namespace sharpi
