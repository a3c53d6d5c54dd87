// See cuda_transfers.h.
#include "transfers/cuda_transfers.h"

#include <utility>

#include "core/error.h"
#include "kernels/formats/packed.h"

namespace sharpi {

namespace {

std::unique_ptr<cuda::Stream> feedBeside(const cuda::Stream& compute) {
    return std::make_unique<cuda::Stream>(compute.device(), cuda::Stream::Role::Feed);
}

// Floats keep the file's layout, so they need no packing and no staging buffer.
bool staged(const StreamPart& part) { return !info(part.to.type).isFloat; }

}  // namespace

CudaTransfers::CudaTransfers(cuda::Stream& compute, cuda::PinnedFiles::RoomNow room)
    : _compute(compute),
      _copies{feedBeside(compute), feedBeside(compute)},
      _packing(feedBeside(compute)),
      _files(compute.device(), std::move(room)) {}

CudaTransfers::~CudaTransfers() {
    try {
        settle();
        synchronize();
    } catch (const Error&) {
        // After a fault nothing runs any more, and whatever uses the device next reports the error.
    }
}

void CudaTransfers::synchronize() {
    _compute.use();
    for (const auto& copies : _copies) copies->synchronize();
    _packing->synchronize();
    _compute.synchronize();
}

void CudaTransfers::prepare(const HostRanges& ranges, void* staging, size_t stageBytes) {
    // RAM is short if there is a reader: what is copied once comes from the page cache, which may then drop it.
    if (_reader) _files.pin({ranges.always, {}, {}});
    else _files.pin(ranges);
    if (_reader) _disk.emplace(*_reader, ranges.optional);
    _staging = static_cast<uint8_t*>(staging);
    _stageBytes = stageBytes;
}

void CudaTransfers::finishOnce() {
    synchronize();
    _files.unpinOnce();
}

void CudaTransfers::settle() {
    if (!_open) return;
    _compute.use();
    const bool recording = _compute.capturing();
    bool left = false;
    for (std::unique_ptr<cuda::Stream>* stream : {&_copies[0], &_copies[1], &_packing}) {
        // Nothing of a capture has run, and its end releases the streams. A stream that it keeps is of no use any more.
        if (!(*stream)->capturing()) (*stream)->synchronize();
        else if (recording) left = true;
        else *stream = feedBeside(_compute);
    }
    _open = left;
}

void CudaTransfers::begin() {
    settle();
    _compute.use();
    if (_disk) _disk->forget();
    _open = true;
    _fetches = 0;
    for (RingBuffer& buffer : _ring) buffer.fetched = buffer.isReleased = false;
    _compute.record(_forked);
    for (const auto& copies : _copies) copies->wait(_forked);  // and packing waits for copies
}

void CudaTransfers::end() {
    if (!_open) throw Error(ErrorKind::Internal, "a pass ends that was not begun");
    for (const auto& copies : _copies) {
        copies->record(_joined);
        _packing->wait(_joined);
    }
    _packing->record(_joined);
    _compute.wait(_joined);
    _open = false;
}

CudaTransfers::RingBuffer& CudaTransfers::bufferAt(int buffer) {
    if (!_open) throw Error(ErrorKind::Internal, "weights are fetched or used outside of a pass");
    return _ring.at(static_cast<size_t>(buffer));
}

// Merges copies that are adjacent in the file and on the device: single experts are too small for the bus's full speed.
void CudaTransfers::addCopy(std::vector<Copy>& copies, const Copy& next) {
    if (!copies.empty()) {
        Copy& last = copies.back();
        if (next.file == last.file + last.bytes && next.to == last.to + last.bytes) {
            last.bytes += next.bytes;
            return;
        }
    }
    copies.push_back(next);
}

void CudaTransfers::start(cuda::Stream& stream, Copy copy) const {
    while (copy.bytes > 0) {
        const HostRange from = _files.source(copy.file, copy.bytes);
        stream.uploadPinned(copy.to, from.begin, from.bytes);
        copy.to += from.bytes;
        copy.file += from.bytes;
        copy.bytes -= from.bytes;
    }
}

void CudaTransfers::fetch(const std::vector<StreamPart>& parts, int buffer) {
    RingBuffer& target = bufferAt(buffer);
    const auto stage = static_cast<size_t>(_fetches % kTransferStages);
    cuda::Stream& copies = *_copies[static_cast<size_t>(_fetches) % _copies.size()];
    uint8_t* const staging = _staging + stage * _stageBytes;
    if (_fetches >= kTransferStages) copies.wait(_stageFree[stage]);
    ++_fetches;

    const bool read = _disk && _disk->reads(parts);
    const std::vector<const uint8_t*> inRam = read ? _disk->take() : std::vector<const uint8_t*>();
    size_t used = 0;
    std::vector<Copy> toStage, toRing;
    for (size_t i = 0; i < parts.size(); ++i) {
        const StreamPart& part = parts[i];
        const uint8_t* const from = read ? inRam[i] : part.file;
        if (!read) _files.expect(from, part.bytes());
        if (staged(part)) {
            if (used + part.bytes() > _stageBytes)
                throw Error(ErrorKind::Internal, "the weights to fetch are larger than a staging buffer");
            addCopy(toStage, {staging + used, from, part.bytes()});
            used += Allocator::aligned(part.bytes());
        } else {
            uint8_t* const to = const_cast<uint8_t*>(part.to.data) +
                                rowBytes(part.to.type, part.to.cols) * static_cast<size_t>(part.rowBegin);
            addCopy(toRing, {to, from, part.bytes()});
        }
    }
    // Copies straight to the ring come last, so that the others need not wait until the buffer is free.
    for (const Copy& copy : toStage) start(copies, copy);
    if (!toRing.empty() && target.isReleased) copies.wait(target.released);
    for (const Copy& copy : toRing) start(copies, copy);
    copies.record(_copied);
    if (read) _disk->copied(copies);

    _packing->wait(_copied);
    if (target.isReleased) _packing->wait(target.released);
    used = 0;
    for (const StreamPart& part : parts) {
        if (!staged(part)) continue;
        cuda::packRows(*_packing, part.to, part.rowBegin, part.rows, staging + used);
        used += Allocator::aligned(part.bytes());
    }
    _packing->record(_stageFree[stage]);
    _packing->record(target.ready);
    target.fetched = true;
}

void CudaTransfers::await(int buffer) {
    const RingBuffer& target = bufferAt(buffer);
    if (!target.fetched) throw Error(ErrorKind::Internal, "weights are used that were not fetched");
    _compute.wait(target.ready);
}

void CudaTransfers::release(int buffer) {
    RingBuffer& target = bufferAt(buffer);
    _compute.record(target.released);
    target.isReleased = true;
}

}  // namespace sharpi
