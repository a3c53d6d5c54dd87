// Which of this build's kernels the device runs.
#pragma once

namespace sharpi::cuda {

// The compute capability that they were compiled for, as 10 * major + minor; 0: there are none for this device, or
// `problem`, if given, says in words why that cannot be told.
int codeVersion(const char** problem = nullptr);

}  // namespace sharpi::cuda
