// See cuda_expert_loads.h.
#include "transfers/cuda_expert_loads.h"

#include <set>
#include <string>

#include "core/error.h"
#include "kernels/formats/packed.h"

namespace sharpi {

namespace {

// Floats keep the file's layout, so they need no packing and no staging buffer.
bool staged(const StreamPart& part) { return !info(part.to.type).isFloat; }

}  // namespace

CudaExpertLoads::CudaExpertLoads(Allocator& allocator, cuda::Stream& compute, const cuda::PinnedFiles& files,
                                 const std::vector<ExpertStacks>& experts)
    : _files(files),
      _layout(expertStaging(experts)),
      _copies(compute.device(), cuda::Stream::Role::Feed),
      _packing(compute.device(), cuda::Stream::Role::Feed) {
    for (int i = 0; i < _layout.depth; ++i) _arrived.emplace_back();
    if (_layout.bytes() > 0) _staging = Buffer(allocator, _layout.bytes(), "staging for experts");
    compute.record(_copied);
    _copies.wait(_copied);
    _packing.wait(_copied);
    loadKernels(experts);
}

// The first launch of a kernel loads its code, for which it may have to wait until the GPU is idle. When the first
// expert is loaded, the GPU may be running a step that waits for this very thread: a deadlock. So each kernel is
// launched once now, over the staging buffers alone.
void CudaExpertLoads::loadKernels(const std::vector<ExpertStacks>& experts) {
    std::set<DType> loaded;
    for (const ExpertStacks& layer : experts) {
        for (const Matrix& file : {layer.gate.first, layer.up.first, layer.down.first}) {
            if (info(file.type).isFloat || file.rows == 0 || !loaded.insert(file.type).second) continue;
            const Matrix row{file.type, 1, file.cols, _staging.as<uint8_t>()};
            cuda::packRows(_packing, row, 0, 1, _staging.as<uint8_t>());
        }
    }
    _packing.synchronize();
}

CudaExpertLoads::~CudaExpertLoads() { settleQuietly(); }

void CudaExpertLoads::settle() {
    _packing.use();
    _copies.synchronize();
    _packing.synchronize();
    _finished = _started;
}

void CudaExpertLoads::settleQuietly() noexcept {
    try {
        settle();
    } catch (const Error&) {
        // After a fault nothing runs any more, and whatever uses the device next reports the error.
    }
}

uint64_t CudaExpertLoads::finished() {
    while (_finished < _started && _arrived[static_cast<size_t>((_finished + 1) % _arrived.size())].reached())
        ++_finished;
    return _finished;
}

uint64_t CudaExpertLoads::start(const std::array<StreamPart, 3>& parts) {
    if (_started - finished() >= _arrived.size())
        throw Error(ErrorKind::Internal,
                    "more than " + std::to_string(_arrived.size()) + " experts are being loaded at once");
    size_t bytes = 0;
    for (const StreamPart& part : parts) bytes += staged(part) ? Allocator::aligned(part.bytes()) : 0;
    if (bytes > _layout.stageBytes)
        throw Error(ErrorKind::Internal, "an expert is larger than a staging buffer for experts");
    _packing.use();
    try {
        launch(parts, _staging.as<uint8_t>());
    } catch (...) {
        settleQuietly();  // the slot may be given to another expert
        throw;
    }
    return ++_started;
}

void CudaExpertLoads::launch(const std::array<StreamPart, 3>& parts, uint8_t* stage) {
    const uint64_t number = _started + 1;
    const auto which = static_cast<size_t>(_layout.stages ? number % static_cast<uint64_t>(_layout.stages) : 0);
    stage += which * _layout.stageBytes;
    _copies.wait(_stageFree[which]);
    uint8_t* at = stage;
    for (const StreamPart& part : parts) {
        if (part.rows == 0) continue;  // an expert without a gate has two matrices
        const size_t before = rowBytes(part.to.type, part.to.cols) * static_cast<size_t>(part.rowBegin);
        copy(staged(part) ? at : const_cast<uint8_t*>(part.to.data) + before, part.file, part.bytes());
        if (staged(part)) at += Allocator::aligned(part.bytes());
    }
    _copies.record(_copied);

    _packing.wait(_copied);
    at = stage;
    for (const StreamPart& part : parts) {
        if (!staged(part) || part.rows == 0) continue;
        cuda::packRows(_packing, part.to, part.rowBegin, part.rows, at);
        at += Allocator::aligned(part.bytes());
    }
    _packing.record(_stageFree[which]);
    _packing.record(_arrived[static_cast<size_t>(number % _arrived.size())]);
}

void CudaExpertLoads::copy(uint8_t* to, const uint8_t* file, size_t bytes) {
    while (bytes > 0) {
        const HostRange from = _files.source(file, bytes);
        _copies.uploadPinned(to, from.begin, from.bytes);
        to += from.bytes;
        file += from.bytes;
        bytes -= from.bytes;
    }
}

}  // namespace sharpi
