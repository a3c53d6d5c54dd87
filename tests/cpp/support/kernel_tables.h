// The tables of CPU kernels that this machine can run, for tests that compare them.
#pragma once

#include <vector>

#include "cpu/kernels.h"

inline std::vector<const sharpi::cpu::Kernels*> tables() {
    std::vector<const sharpi::cpu::Kernels*> found;
    for (const char* name : {"scalar", "avx2", "avx512", "amx"})
        if (const sharpi::cpu::Kernels* table = sharpi::cpu::kernelsFor(name)) found.push_back(table);
    return found;
}
