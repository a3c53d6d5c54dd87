// Exceptions of sharpi.errors.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/error.h"

namespace sharpi {

// An exception of the class that belongs to this kind, or has this name.
pybind11::object errorOf(ErrorKind kind, const std::string& what);
pybind11::object errorOf(const char* name, const std::string& what);

}  // namespace sharpi
