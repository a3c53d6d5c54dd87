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

// Gives the GIL to others while it exists, for work that may last until the program ends. If it lasts longer, the
// thread never comes back. Before 3.14 Python would end it in the middle of the destructor, and that ends the process
// if, as pybind11's class promises, the destructor throws nothing.
class ReleasedGil {
public:
    ReleasedGil() : _state(PyEval_SaveThread()) {}
    ~ReleasedGil() noexcept(false) {
        while (isEnding()) std::this_thread::sleep_for(std::chrono::hours(1));
        PyEval_RestoreThread(_state);
    }
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

private:
    PyThreadState* const _state;
};

}  // namespace sharpi
