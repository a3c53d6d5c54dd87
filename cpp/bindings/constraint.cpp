// See constraint.h.
#include "bindings/constraint.h"

#include <pybind11/numpy.h>

#include <ctime>

#include <algorithm>
#include <optional>
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

// Seconds of the processor that this thread has had.
double threadSeconds() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// What sharpi.constraints.grammar.Matcher does, by calling the library's object itself. A step drives the interpreter's
// lines and their objects out of the processor's caches, so each line of Python that is run between two steps is slow.
class DirectMatcher {
public:
    explicit DirectMatcher(const py::object& matcher)
        : _check(matcher.attr("check")),
          _width(matcher.attr("width").cast<size_t>()),
          _slowest(matcher.attr("slowest_mask").cast<double>()) {
        const py::object library = matcher.attr("library");
        _compute = library.attr("unsafe_compute_mask_ptr");
        _isError = library.attr("is_error");
        _consume = library.attr("consume_token");
        _isStopped = library.attr("is_stopped");
        _rollback = library.attr("rollback");
    }

    bool mask(std::vector<uint32_t>& words) const {
        if (words.size() < _width) throw Error(ErrorKind::InvalidArgument, "the vocabulary is larger than the model's");
        const double began = threadSeconds();
        _compute(reinterpret_cast<uintptr_t>(words.data()), _width * sizeof(uint32_t));
        const double seconds = threadSeconds() - began;
        std::fill(words.begin() + static_cast<std::ptrdiff_t>(_width), words.end(), 0);
        const bool isEmpty = std::all_of(words.begin(), words.end(), [](uint32_t word) { return word == 0; });
        if (isEmpty || seconds > _slowest || _isError().cast<bool>()) _check(isEmpty, seconds);
        return true;
    }
    // Returns whether the answer then ends.
    bool accept(int32_t token) const {
        if (!_consume(token).cast<bool>()) _check(false, 0.0);
        return _isStopped().cast<bool>();
    }
    void rollback(int64_t tokens) const {
        if (!_rollback(tokens).cast<bool>()) _check(false, 0.0);
    }
    // Leaves the interpreter's objects alone, if it is ending.
    void release() {
        for (py::object* object : {&_check, &_compute, &_isError, &_consume, &_isStopped, &_rollback})
            object->release();
    }

private:
    py::object _check;  // throws what is wrong
    size_t _width;      // words of a mask
    double _slowest;    // seconds of a mask
    py::object _compute, _isError, _consume, _isStopped, _rollback;
};

class PythonConstraint : public TokenConstraint {
public:
    explicit PythonConstraint(py::object object)
        : _object(std::move(object)), _mayBeDirect(py::hasattr(_object, "matcher")) {
        findMatcher();
    }
    ~PythonConstraint() override {
        if (isEnding()) {
            _object.release();
            _words.release();
            if (_direct) _direct->release();
            return;
        }
        const py::gil_scoped_acquire gil;
        _object = {};
        _words = {};
        _direct.reset();
    }
    PythonConstraint(const PythonConstraint&) = delete;
    PythonConstraint& operator=(const PythonConstraint&) = delete;

    bool mask(std::vector<uint32_t>& words) override {
        return withGil([&] {
            if (_direct) return _direct->mask(words);
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
        withGil([&] {
            if (_direct) {
                _hasEnded = _direct->accept(token);
                ++_directTokens;
                return;
            }
            _object.attr("accept")(token);
            findMatcher();
        });
    }
    void rollback(int64_t tokens) override {
        withGil([&] {
            const int64_t direct = std::min(tokens, _directTokens);
            if (direct > 0) _direct->rollback(direct);
            _directTokens -= direct;
            _hasEnded = false;
            if (tokens == direct) return;
            _direct.reset();
            _object.attr("rollback")(tokens - direct);
            findMatcher();
        });
    }
    bool hasEnded() override {
        if (_directTokens > 0) return _hasEnded;
        return withGil([&] { return _object.attr("ended")().cast<bool>(); });
    }

private:
    // Whether one matcher alone decides from here on. The constraint is not told of the tokens that follow.
    void findMatcher() {
        if (!_mayBeDirect) return;
        const py::object matcher = _object.attr("matcher")();
        if (!matcher.is_none()) _direct.emplace(matcher);
    }

    py::object _object;
    py::object _words;  // the array that fill() writes to
    const bool _mayBeDirect;
    std::optional<DirectMatcher> _direct;
    int64_t _directTokens = 0;  // that _direct has accepted
    bool _hasEnded = false;     // after the last of these
};

}  // namespace

std::shared_ptr<TokenConstraint> constraintOf(const py::object& object) {
    if (object.is_none()) return nullptr;
    return std::make_shared<PythonConstraint>(object);
}

}  // namespace sharpi
