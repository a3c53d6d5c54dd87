// A Python function that is told lines for people.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>

#include "bindings/interpreter.h"

namespace sharpi {

// Any thread may call it and destroy it. A line that the function cannot take is lost.
inline std::function<void(const std::string&)> noticeOf(const pybind11::object& function) {
    const auto release = [](pybind11::object* object) {
        if (isEnding()) {
            object->release();
        } else {
            const pybind11::gil_scoped_acquire gil;
            *object = {};
        }
        delete object;
    };
    const std::shared_ptr<pybind11::object> held(new pybind11::object(function), release);
    return [held](const std::string& line) {
        if (isEnding()) return;
        const pybind11::gil_scoped_acquire gil;
        try {
            (*held)(line);
        } catch (const pybind11::error_already_set&) {
        }
    };
}

}  // namespace sharpi
