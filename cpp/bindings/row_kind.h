// The kinds of rows by their names.
#pragma once

#include <string>

#include "core/error.h"
#include "operations/batch.h"

namespace sharpi {

inline RowKind toRowKind(const std::string& kind) {
    if (kind == "prompt") return RowKind::Prompt;
    if (kind == "decode") return RowKind::Decode;
    throw Error(ErrorKind::InvalidArgument, "unknown kind of rows '" + kind + "': known are prompt and decode");
}

}  // namespace sharpi
