// The one exception type of the core. The bindings turn each kind into a Python exception of its own.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace sharpi {

enum class ErrorKind {
    InvalidArgument,  // the caller asked for something that cannot be
    BadModel,         // the file is damaged, incomplete or of a kind that Sharpi does not know
    OutOfMemory,
    Busy,        // too many requests wait already
    DeviceLost,  // the device has failed, and does nothing more in this process
    Internal,    // a bug in Sharpi
};

// What a device lacked, in bytes, so that the caller can ask for less.
struct Shortage {
    uint64_t available = 0;  // that can be taken now, after everything was given back
    uint64_t wanted = 0;     // that was asked for in all; no more than `available` if other memory was short
};

class Error : public std::runtime_error {
public:
    Error(ErrorKind kind, const std::string& what) : std::runtime_error(what), _kind(kind) {}
    // OutOfMemory
    Error(const std::string& what, const Shortage& shortage)
        : std::runtime_error(what), _kind(ErrorKind::OutOfMemory), _shortage(shortage) {}
    ErrorKind kind() const { return _kind; }
    const std::optional<Shortage>& shortage() const { return _shortage; }

private:
    ErrorKind _kind;
    std::optional<Shortage> _shortage;
};

}  // namespace sharpi
