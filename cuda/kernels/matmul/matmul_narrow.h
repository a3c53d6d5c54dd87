// Products of F32 matrices with few rows, such as routers: see matmul.h, whose calls they are.
#pragma once

#include "device/stream.h"

namespace sharpi::cuda {

struct MatmulCall;

// Returns false, and has launched nothing, if the matrix of this call is not narrow. The whole
// matrix's shape alone decides it.
bool matmulNarrow(Stream& stream, const MatmulCall& call);

}  // namespace sharpi::cuda
