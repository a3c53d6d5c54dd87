// The functions of CUDA's driver that Sharpi looks up: memory that is mapped behind reserved addresses.
#pragma once

namespace sharpi::emulator {

// Null if it is not emulated.
void* driverFunction(const char* name);

}  // namespace sharpi::emulator
