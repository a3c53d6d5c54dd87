// See constraint.h.
#include "bindings/constraint.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <string>

#include "bindings/interpreter.h"
#include "core/error.h"

namespace py = pybind11;

namespace sharpi {

namespace {

// An exception of Python's as an Error, which needs no GIL.
Error errorOf(const py::error_already_set& error) {
    std::string text = py::str(error.type().attr("__name__"));
    try {
        text += ": " + std::string(py::str(error.value()));
    } catch (const py::error_already_set&) {
        text += ", which has no text";
    }
    return {ErrorKind::InvalidArgument, text};
}

// Keeps what the interpreter knows of a thread of the core until the thread ends. Otherwise each call would make it
// anew, with pages of memory for its stack.
class KnownThread {
public:
    // The interpreter must not be ending.
    void begin() {
        if (_isKnown || PyGILState_GetThisThreadState()) return;  // the latter: a thread of Python's
        py::gil_scoped_acquire gil;
        gil.inc_ref();
        _isKnown = true;
    }
    ~KnownThread() {
        if (!_isKnown || isEnding()) return;
        py::gil_scoped_acquire gil;
        gil.dec_ref();
    }

private:
    bool _isKnown = false;
};

template <typename Call> auto withGil(const Call& call) {
    if (isEnding()) throw Error(ErrorKind::InvalidArgument, "the interpreter is ending");
    thread_local KnownThread thread;
    thread.begin();
    const py::gil_scoped_acquire gil;
    try {
        return call();
    } catch (const py::error_already_set& error) {
        throw errorOf(error);
    }
}

class PythonConstraint : public TokenConstraint {
public:
    explicit PythonConstraint(py::object object) : _object(std::move(object)) {}
    ~PythonConstraint() override {
        if (isEnding()) {
            _object.release();
            _words.release();
            return;
        }
        const py::gil_scoped_acquire gil;
        _object = {};
        _words = {};
    }
    PythonConstraint(const PythonConstraint&) = delete;
    PythonConstraint& operator=(const PythonConstraint&) = delete;

    bool mask(std::vector<uint32_t>& words) override {
        return withGil([&] {
            const auto count = static_cast<py::ssize_t>(words.size());
            if (!_words) _words = py::array_t<uint32_t>(count);
            const auto array = py::reinterpret_borrow<py::array_t<uint32_t>>(_words);
            const bool forbids = _object.attr("fill")(array).cast<bool>();
            if (array.size() != count) throw Error(ErrorKind::InvalidArgument, "fill() has changed the array's size");
            std::copy_n(array.data(), words.size(), words.begin());
            return forbids;
        });
    }
    void accept(int32_t token) override {
        withGil([&] { _object.attr("accept")(token); });
    }
    void rollback(int64_t tokens) override {
        withGil([&] { _object.attr("rollback")(tokens); });
    }
    bool hasEnded() override {
        return withGil([&] { return _object.attr("ended")().cast<bool>(); });
    }

private:
    py::object _object;
    py::object _words;  // the array that fill() writes to
};

}  // namespace

std::shared_ptr<TokenConstraint> constraintOf(const py::object& object) {
    if (object.is_none()) return nullptr;
    return std::make_shared<PythonConstraint>(object);
}

}  // namespace sharpi
