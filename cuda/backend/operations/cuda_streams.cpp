// See cuda_streams.h.
#include "backend/operations/cuda_streams.h"

#include "kernels/streams/streams.h"

namespace sharpi {

namespace {

cuda::StreamRule ruleOf(const CudaPass& pass, const StreamsCall& call) {
    return {call.count, call.iterations, call.epsilon, call.base, call.scale, pass.limits.embedding};
}

}  // namespace

void CudaStreams::begin() {
    const cuda::StreamRule rule = ruleOf(_pass, {_pass.limits.streams});
    cuda::beginStreams(_pass.stream, rule, _pass.floats(RowBuffer::Residual), _pass.view.rows,
                       _pass.floats(RowBuffer::Streams));
}

void CudaStreams::norm(float eps, const Weight& reader) {
    const int64_t all = reader.cols, exact = _pass.exactRows();
    const Activations& to = _pass.shape(RowInput::Streams, {reader}, all);
    const float* const streams = _pass.floats(RowBuffer::Streams);
    cuda::rmsNorm(_pass.stream, streams, nullptr, nullptr, eps, exact, all, to.exact);
    cuda::rmsNorm(_pass.stream, streams + exact * all, nullptr, nullptr, eps, _pass.fastRows(), all,
                  {nullptr, {}, to.fast});
}

void CudaStreams::enter(const StreamsCall& call) {
    cuda::enterStreams(_pass.stream, ruleOf(_pass, call), _pass.floats(RowBuffer::Streams),
                       _pass.floats(RowBuffer::StreamMix), _pass.view.rows, _pass.floats(RowBuffer::Residual));
}

void CudaStreams::leave(const StreamsCall& call) {
    cuda::leaveStreams(_pass.stream, ruleOf(_pass, call), _pass.floats(RowBuffer::StreamMix),
                       _pass.floats(RowBuffer::PartOut), _pass.view.rows, _pass.floats(RowBuffer::Streams));
}

void CudaStreams::end(const StreamsCall& call) {
    cuda::endStreams(_pass.stream, ruleOf(_pass, call), _pass.floats(RowBuffer::Streams),
                     _pass.floats(RowBuffer::StreamMix), _pass.view.rows, _pass.floats(RowBuffer::Residual));
}

}  // namespace sharpi
