// Which of this build's kernels the calling thread's device runs. findDevice() asks once; everything else reads
// DeviceInfo::codeVersion.
#pragma once

namespace sharpi::cuda {

// The compute capability that they were compiled for, as 10 * major + minor. 0 means that there are none for this
// device or, if `problem` is set to a text, that CUDA failed to say.
int codeVersion(const char** problem);

}  // namespace sharpi::cuda
