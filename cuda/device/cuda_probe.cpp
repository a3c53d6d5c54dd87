// See cuda_probe.h.
#include "device/cuda_probe.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "device/marker.h"
#include "kernels/formats/packed.h"
#include "kernels/matmul/matmul.h"
#include "kernels/matvec/matvec.h"

namespace sharpi {

namespace {

constexpr size_t kPiece = size_t{8} << 20;
constexpr size_t kRingPieces = 4;
constexpr size_t kPinnedBytes = size_t{512} << 20;
constexpr int kPiecesASpan = 8;
constexpr size_t kSpansAhead = 8;  // enough that a thread that wakes late leaves no gap
constexpr int64_t kCols = 4096, kRows = 12288;
constexpr int64_t kBatch = 2048, kLeastBatch = 128;
constexpr int kKernels = 200;
// A bus that saves power takes a moment to reach full speed, and so do the GPU's clocks.
constexpr double kWarmSeconds = 0.03;

}  // namespace

CudaProbe::CudaProbe(const cuda::DeviceInfo& gpu, size_t most) : _stream(gpu), _memory(_stream), _allocator(_memory) {
    takePinned(std::max(kPiece, std::min(most, kPinnedBytes) / kPiece * kPiece));
    _ring = Buffer(_allocator, kRingPieces * kPiece, "buffers to measure copies with");
    takeWeights(most);
    takeRows(std::min(most, _allocator.available() / 2));
    _row = Buffer(_allocator, cuda::quantizedRowsBytes(1, kCols) + sizeof(float) * kCols * 2,
                  "activations to measure with");
    fillFromPinned(_row);
}

void CudaProbe::takePinned(size_t bytes) {
    while (!_pinned) {
        try {
            _pinned = std::make_unique<cuda::PinnedBuffer>(bytes);
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::OutOfMemory || bytes < 2 * kPiece) throw;
            bytes = bytes / 2 / kPiece * kPiece;
        }
    }
    auto* words = _pinned->as<uint64_t>();
    const size_t count = _pinned->bytes() / 8;
    fillRandom(words, count, 1);
    // With every byte below 0x40, whatever part of a weight or an activation it becomes, the number is finite.
    for (size_t i = 0; i < count; ++i) words[i] &= 0x3f3f3f3f3f3f3f3fu;
}

void CudaProbe::takeWeights(size_t most) {
    const size_t one = cuda::packedBytes(DType::Q4_K, kRows, kCols);
    // At most half of the free memory, as in takeRows(): the driver needs some for kernels and graphs, and other
    // processes may need some.
    _weights =
        takeUpTo(_allocator, std::max(one, std::min(most, _allocator.available() / 2)), one, "weights to measure with");
    _count = _weights.bytes() / one;
    fillFromPinned(_weights);
}

void CudaProbe::takeRows(size_t most) {
    const auto bytes = [](int64_t rows, int64_t cols, size_t element) {
        return static_cast<size_t>(rows * cols) * element;
    };
    for (_batch = kBatch; _batch > kLeastBatch && bytes(_batch, kRows, sizeof(float)) > most;) _batch /= 2;
    for (;; _batch /= 2) {
        try {
            _rows = Buffer(_allocator, bytes(_batch, kCols, sizeof(uint16_t)), "activations to measure with");
            _results = Buffer(_allocator, bytes(_batch, kRows, sizeof(float)), "results of measuring");
            break;
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::OutOfMemory || _batch <= kLeastBatch) throw;
            _rows = Buffer();
        }
    }
    fillFromPinned(_rows);
}

void CudaProbe::fillFromPinned(const Buffer& buffer) {
    for (size_t done = 0; done < buffer.bytes(); done += _pinned->bytes()) {
        _stream.uploadPinned(buffer.as<uint8_t>() + done, _pinned->as<uint8_t>(),
                             std::min(_pinned->bytes(), buffer.bytes() - done));
    }
    _stream.synchronize();
}

std::vector<Span> CudaProbe::copies(const std::function<bool()>& enough) {
    _stream.use();
    const size_t pieces = _pinned->bytes() / kPiece;
    std::array<cuda::Marker, kSpansAhead> markers;
    size_t given = 0, taken = 0;
    const auto give = [&] {
        for (int i = 0; i < kPiecesASpan; ++i, ++_copied) {
            _stream.uploadPinned(_ring.as<uint8_t>() + _copied % kRingPieces * kPiece,
                                 _pinned->as<uint8_t>() + _copied % pieces * kPiece, kPiece);
        }
        markers[given++ % kSpansAhead].set(_stream);
    };
    std::vector<Span> spans;
    double last = secondsNow();
    while (given < kSpansAhead) give();
    for (bool more = true; taken < given;) {
        markers[taken++ % kSpansAhead].wait();
        const double now = secondsNow();
        spans.push_back({last, now, static_cast<double>(kPiecesASpan * kPiece)});
        last = now;
        more = more && !enough();
        if (more) give();
    }
    return spans;
}

double CudaProbe::pcieBytesPerSecond() {
    const auto copyFor = [this](double seconds) {
        return copies([end = secondsNow() + seconds] { return secondsNow() >= end; });
    };
    copyFor(kWarmSeconds);
    // A span ends when this thread wakes, which is too inexact for a single span. So the rate is over all of them.
    return rateOf(copyFor(kSampleSeconds));
}

Matrix CudaProbe::matrix(size_t index) const {
    return {DType::Q4_K, kRows, kCols, _weights.as<uint8_t>() + index * cuda::packedBytes(DType::Q4_K, kRows, kCols)};
}

double CudaProbe::secondsOf(const std::function<void()>& launch) {
    const auto run = [&](int times) {
        const double begin = secondsNow();
        for (int i = 0; i < times; ++i) launch();
        _stream.synchronize();
        return (secondsNow() - begin) / times;
    };
    _stream.use();
    _stream.synchronize();
    double once = run(1);  // the first run loads kernels
    for (const double end = secondsNow() + kWarmSeconds; secondsNow() < end;) once = run(1);
    // Long enough that the wait at the end does not matter.
    return run(static_cast<int>(std::clamp(kSampleSeconds / once, 1.0, 10000.0)));
}

double CudaProbe::secondsOfGraph(const std::function<void()>& body) {
    _stream.use();
    body();  // loads kernels, which a capture cannot
    const std::unique_ptr<cuda::Graph> graph = _stream.capture(body);
    return secondsOf([&] { _stream.replay(*graph); });
}

double CudaProbe::vramBytesPerSecond() {
    cuda::MatvecInput x;
    x.floats = _row.as<float>();
    x.quantized = cuda::quantizedRowsOver(_row.as<uint8_t>() + sizeof(float) * kCols * 2, 1, kCols);
    const double seconds = secondsOfGraph([&] {
        for (size_t i = 0; i < _count; ++i) cuda::matvec(_stream, x, 1, {{matrix(i), nullptr, _results.as<float>()}});
    });
    return static_cast<double>(_count * cuda::packedBytes(DType::Q4_K, kRows, kCols)) / seconds;
}

double CudaProbe::kernelSeconds() {
    const float* x = _row.as<float>();
    cuda::RowOutputs out;
    out.quantized = cuda::quantizedRowsOver(_row.as<uint8_t>() + sizeof(float) * kCols * 2, 1, kCols);
    return secondsOfGraph([&] {
               for (int i = 0; i < kKernels; ++i) cuda::rmsNorm(_stream, x, nullptr, x + kCols, 1e-6f, 1, kCols, out);
           }) /
           kKernels;
}

double CudaProbe::flops() {
    const cuda::HalfRows x{_rows.as<uint16_t>(), nullptr};
    size_t next = 0;
    const double seconds = secondsOf([&] {
        cuda::matmul(_stream, matrix(next), x, _batch, nullptr, _results.as<float>(), cuda::Store::Write);
        next = (next + 1) % _count;
    });
    return 2.0 * static_cast<double>(_batch * kRows * kCols) / seconds;
}

}  // namespace sharpi
