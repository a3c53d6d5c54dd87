// The modules of the program, as its objects register them before main().
#pragma once

#include <string>

#include "ptx/module.h"

namespace sharpi::emulator {

struct Function {
    std::string name;
    Module* module = nullptr;
    size_t allowedShared = 48 * 1024;
    int codeVersion = 0;
};

// Null if it is none.
Function* findFunction(const void* host);

}  // namespace sharpi::emulator
