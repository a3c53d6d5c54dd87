// Translates the text of a kernel.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "ptx/program.h"

namespace sharpi::emulator {

class Module;

std::unique_ptr<Kernel> translate(const Module& module, const std::string& name, std::string_view head,
                                  std::string_view body);

}  // namespace sharpi::emulator
