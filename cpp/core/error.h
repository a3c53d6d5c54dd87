// The one exception type of the core. The bindings turn each kind into a Python exception of its own.
#pragma once

#include <stdexcept>
#include <string>

namespace sharpi {

enum class ErrorKind {
    InvalidArgument,  // the caller asked for something that cannot be
    BadModel,         // the file is damaged, incomplete or of a kind that Sharpi does not know
    OutOfMemory,
    Internal,  // a bug in Sharpi
};

class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), _kind(kind) {}
    ErrorKind kind() const { return _kind; }

private:
    ErrorKind _kind;
};

}  // namespace sharpi
