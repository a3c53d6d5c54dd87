// What the core may ask the interpreter without the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace sharpi {

// A thread that asks for the GIL then never comes back.
inline bool isEnding() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

}  // namespace sharpi
