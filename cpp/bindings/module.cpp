// The Python module sharpi._core. The bindings convert arguments, release the GIL and turn Error into Python's
// exceptions.
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "core/error.h"

#include <pybind11/stl.h>

namespace sharpi {

namespace {

const char* nameOf(ErrorKind kind) {
    switch (kind) {
    case ErrorKind::InvalidArgument: return "InvalidRequestError";
    case ErrorKind::BadModel: return "ModelFileError";
    case ErrorKind::OutOfMemory: return "OutOfMemoryError";
    case ErrorKind::Busy: return "BusyError";
    case ErrorKind::DeviceLost: return "DeviceLostError";
    case ErrorKind::Internal: return "InternalError";
    }
    return "InternalError";
}

// Raises the class of sharpi.errors that belongs to the error's kind, with the facts of a shortage.
void translate(std::exception_ptr p) {  // NOLINT(performance-unnecessary-value-param): as pybind11 calls it
    const char* name = nullptr;
    std::string what;
    std::optional<Shortage> shortage;
    try {
        if (p) std::rethrow_exception(p);
        return;
    } catch (const Error& e) {
        what = e.what();
        shortage = e.shortage();
        name = nameOf(e.kind());
    } catch (const std::bad_alloc&) {
        name = "OutOfMemoryError";
        what = "out of memory: a smaller context or batch needs less";
    }
    const py::object error = errorOf(name, what);
    if (shortage) {
        error.attr("available") = shortage->available;
        error.attr("wanted") = shortage->wanted;
    }
    PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
}

}  // namespace

py::object errorOf(const char* name, const std::string& what) {
    return py::module_::import("sharpi.errors").attr(name)(what);
}

py::object errorOf(ErrorKind kind, const std::string& what) { return errorOf(nameOf(kind), what); }

}  // namespace sharpi

PYBIND11_MODULE(_core, m) {
    using namespace sharpi;
    m.doc() = "The native core of Sharpi.";
    py::register_exception_translator(translate);
    bindOptions(m);
    bindDescription(m);
    bindEngine(m);
    bindSession(m);
    bindScheduler(m);
    bindHardware(m);
    m.attr("prompt_tile") = kPromptTile;
    std::vector<std::string> roles;
    for (const WeightRole role : kWeightRoles) roles.emplace_back(roleName(role));
    m.attr("tensor_roles") = py::tuple(py::cast(roles));
    m.def("known_architectures", &knownArchitectures);
    m.attr("backends") = SHARPI_BACKENDS;
    m.attr("cuda_state") = SHARPI_CUDA_STATE;
    m.attr("version") = SHARPI_VERSION;
}
