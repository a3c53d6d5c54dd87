// The deleter of objects whose destruction may take a while.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/interpreter.h"

namespace sharpi {

// Releases the GIL first, so that other Python threads run while a destructor waits for a lock or for threads, or gives
// much memory back. The calling thread need not hold the GIL: the destructor of the last session, which has released
// it, destroys the engine.
struct DeleteUnlocked {
    template <typename T> void operator()(T* object) const {
        if (!PyGILState_Check()) {
            delete object;
            return;
        }
        const ReleasedGil release;
        delete object;
    }
};

}  // namespace sharpi
