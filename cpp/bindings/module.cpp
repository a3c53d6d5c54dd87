// The Python module sharpi._core. The bindings convert arguments, release the GIL and turn Error into Python's
// exceptions.
#include "bindings/bindings.h"
#include "core/error.h"

#include <pybind11/stl.h>

namespace sharpi {

namespace {

// Raises the class of sharpi.errors that belongs to the error's kind.
void translate(std::exception_ptr p) {
    const char* name = nullptr;
    std::string what;
    try {
        if (p) std::rethrow_exception(p);
        return;
    } catch (const Error& e) {
        what = e.what();
        switch (e.kind()) {
        case ErrorKind::InvalidArgument: name = "InvalidRequestError"; break;
        case ErrorKind::BadModel: name = "ModelFileError"; break;
        case ErrorKind::OutOfMemory: name = "OutOfMemoryError"; break;
        case ErrorKind::Internal: name = "InternalError"; break;
        }
    } catch (const std::bad_alloc&) {
        name = "OutOfMemoryError";
        what = "out of memory: a smaller context or batch needs less";
    }
    const py::object type = py::module_::import("sharpi.errors").attr(name);
    PyErr_SetString(type.ptr(), what.c_str());
}

}  // namespace

}  // namespace sharpi

PYBIND11_MODULE(_core, m) {
    using namespace sharpi;
    m.doc() = "The native core of Sharpi.";
    py::register_exception_translator(translate);
    bindOptions(m);
    bindDescription(m);
    bindEngine(m);
    bindSession(m);
    bindHardware(m);
    m.def("known_architectures", &knownArchitectures);
    m.attr("backends") = SHARPI_BACKENDS;
    m.attr("cuda_state") = SHARPI_CUDA_STATE;
    m.attr("version") = SHARPI_VERSION;
}
