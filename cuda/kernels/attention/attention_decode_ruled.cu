// The decode kernels of layers with a window, chunks, sinks or a softcap, and of the widest heads. They are apart from
// those of other layers, which do without the branches; see attention_decode.cu.
#include "kernels/attention/decode_kernel.cuh"

namespace sharpi::cuda::decode {

void launchRuled(Stream& stream, const Args& args, int pages) {
    withKvType(args.pages.type, [&](auto tag) { chooseWidth<decltype(tag)::kType, false>(stream, args, pages); });
}

}  // namespace sharpi::cuda::decode
