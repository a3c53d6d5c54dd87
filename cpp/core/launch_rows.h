// The limits on the rows of a step, on which kernels, the CPU's share and drafts depend.
#pragma once

namespace sharpi {

// The most rows that follow the contract (contract.h) in one launch on a GPU: all decode rows of a batch. More rows
// take several launches.
constexpr int kExactLaunchRows = 64;
// The most texts with prompt rows in one pass.
constexpr int kMostPrompts = 16;
// The rows that one sequence usually has in a step: its last token and the drafts of those that follow. The recurrent
// layers have a kernel for that many, and each draft needs a state of its own to roll back to.
constexpr int kMostDraftRows = 8;

}  // namespace sharpi
