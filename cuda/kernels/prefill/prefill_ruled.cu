// Prefill's attention with a limited reach, a softcap or sinks.
#include "kernels/prefill/prefill_tile.cuh"

namespace sharpi::cuda {

void prefillRuled(Stream& stream, const PrefillArgs& args) { attendTiles<true>(stream, args); }

}  // namespace sharpi::cuda
