// The one limit on the rows of a step's launch, on which kernels, the CPU's share and drafts depend.
#pragma once

namespace sharpi {

// The most rows that follow the contract (contract.h) in one launch on a GPU. More rows take several launches.
constexpr int kExactLaunchRows = 8;

}  // namespace sharpi
