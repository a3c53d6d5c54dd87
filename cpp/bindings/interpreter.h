// What the core may ask the interpreter without the GIL, and how it waits for the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <thread>

namespace sharpi {

// A thread that asks for the GIL then never comes back.
inline bool isEnding() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

// Gives the GIL to others while it exists. Before 3.14, Python ends a thread that asks for the GIL when the program is
// ending: it unwinds the stack, and the process is aborted where that meets a function that promises to throw nothing,
// as destructors do. So the thread stays here for the moment that is left.
class ReleasedGil {
public:
    ReleasedGil() : _state(PyEval_SaveThread()) {}
    ~ReleasedGil() {
        try {
            PyEval_RestoreThread(_state);
        } catch (...) {
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

private:
    PyThreadState* const _state;
};

}  // namespace sharpi
