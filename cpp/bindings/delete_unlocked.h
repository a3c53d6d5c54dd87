// The deleter of objects whose destruction may take a while.
#pragma once

#include <pybind11/pybind11.h>

namespace sharpi {

// Lets go of the GIL first: a destructor may wait for a lock or for threads, or give much memory back, and other
// Python threads go on meanwhile. The thread may not hold the GIL: a session's destructor, which has let go of it, may
// destroy the engine.
struct DeleteUnlocked {
    template <typename T> void operator()(T* object) const {
        if (!PyGILState_Check()) {
            delete object;
            return;
        }
        pybind11::gil_scoped_release release;
        delete object;
    }
};

}  // namespace sharpi
