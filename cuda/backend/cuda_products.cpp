// See cuda_products.h.
#include "backend/cuda_products.h"

#include "core/error.h"
#include "kernels/rows/crossing.h"

namespace sharpi {

// Exact rows: matrices that stay on the device share launches.
void CudaProducts::linear(const Activations& x, std::initializer_list<Product> products) {
    std::vector<cuda::MatvecOutput> together;
    for (const Product& p : products) {
        if (shares(p.w)) throw Error(ErrorKind::Internal, "a product that is not added has rows of the CPU");
        float* const to = _pass.floats(p.to);
        _pass.forParts(p.w, [&](const Matrix& part, int64_t begin, bool stays) {
            const float* const bias = p.bias ? p.bias + begin : nullptr;
            const cuda::MatvecOutput output{part, bias, to + begin, p.w.rows};
            if (stays) together.push_back(output);
            else exact(x, {output});
            fast(x, part, bias, to + begin, p.w.rows, cuda::Store::Write);
        });
    }
    if (!together.empty()) exact(x, std::move(together));
}

void CudaProducts::exact(const Activations& x, std::vector<cuda::MatvecOutput> outputs) {
    _pass.forExactGroups([&](int64_t first, int rows) {
        cuda::matvec(_pass.stream, x.from(first), rows, outputs);
        for (cuda::MatvecOutput& output : outputs) output.y += rows * output.stride;
    });
}

// y: where the first row of the batch goes.
void CudaProducts::fast(const Activations& x, const Matrix& part, const float* bias, float* y, int64_t stride,
                        cuda::Store store) {
    const int64_t rows = _pass.fastRows();
    if (rows) cuda::matmul(_pass.stream, part, x.fast, rows, bias, y + _pass.exactRows() * stride, store, stride);
}

void CudaProducts::addLinear(const Activations& x, const Weight& w, const float* bias) {
    if (!shares(w)) return add(x, w, bias);
    if (bias || w.file != _hiddenReader)
        throw Error(ErrorKind::Internal, "the CPU adds rows of the matrix that reads the hidden rows, without a bias");
    if (w.deviceRows()) add(x, w, nullptr);
    receiveAdded(w);
}

void CudaProducts::add(const Activations& x, const Weight& w, const float* bias) {
    float* const residual = _pass.floats(RowBuffer::Residual);
    _pass.forParts(w, [&](const Matrix& part, int64_t begin, bool) {
        const float* const partBias = bias ? bias + begin : nullptr;
        _pass.forExactGroups([&](int64_t first, int rows) {
            float* const y = residual + first * w.rows + begin;
            cuda::matvecAdd(_pass.stream, x.from(first), rows, part, partBias, y, w.rows);
        });
        fast(x, part, partBias, residual + begin, w.rows, cuda::Store::Add);
    });
}

void CudaProducts::gatedLinear(const Activations& x, const Weight& gate, const Weight& up, const Weight& reader) {
    const Activations& hidden = _pass.shape(RowInput::Hidden, {reader}, reader.cols);
    _hiddenReader = reader.file;
    if (shares(gate) || shares(reader)) sharedGated(x, gate, up, reader, hidden);
    else gated(x, gate, up, hidden);
}

// The GPU's columns of the hidden rows. In a step, what stands in the CPU's columns is meaningless until these arrive.
void CudaProducts::gated(const Activations& x, const Weight& gate, const Weight& up, const Activations& hidden) {
    float *const gates = _pass.floats(RowBuffer::Gate), *const ups = _pass.floats(RowBuffer::Up);
    const int64_t width = gate.rows, exactRows = _pass.exactRows(), fastRows = _pass.fastRows();
    bool fused = gate.type == up.type;
    const bool together = _pass.forPairs(gate, up, [&](const Matrix& gatePart, const Matrix& upPart, int64_t begin) {
        if (fused) {
            _pass.forExactGroups([&](int64_t first, int rows) {
                cuda::matvecGated(_pass.stream, x.from(first), rows, gatePart, upPart,
                                  cuda::rowsFrom(hidden.exact, first, hidden.cols), begin, width);
            });
        } else {
            exact(x, {{gatePart, nullptr, gates + begin, width}, {upPart, nullptr, ups + begin, width}});
        }
        fast(x, gatePart, nullptr, gates + begin, width, cuda::Store::Write);
        fast(x, upPart, nullptr, ups + begin, width, cuda::Store::Write);
    });
    if (!together) {
        fused = false;
        linear(x, {{gate, nullptr, RowBuffer::Gate}, {up, nullptr, RowBuffer::Up}});
    }
    if (!fused && exactRows) cuda::siluMul(_pass.stream, gates, ups, exactRows, width, hidden.exact);
    if (fastRows) {
        const int64_t before = exactRows * width;
        cuda::siluMul(_pass.stream, gates + before, ups + before, fastRows, width, {nullptr, {}, hidden.fast});
    }
}

// The CPU computes the last rows of gate and up, or of the matrix that reads the hidden rows, or of all three. Each
// processor needs all hidden rows for that matrix, so they are exchanged in between.
void CudaProducts::sharedGated(const Activations& x, const Weight& gate, const Weight& up, const Weight& reader,
                               const Activations& hidden) {
    if (!gate.cpuRows) {
        gated(x, gate, up, hidden);
        return sendHidden(hidden, gate.rows);
    }
    HostShare* const share = _pass.share;
    const Mailbox& mail = share->mailbox();
    const int64_t rows = _pass.exactRows(), ofGpu = gate.deviceRows();
    const uint32_t sent = _pass.work->nextSent(), returned = _pass.work->nextReturned();
    cuda::sendRows(_pass.stream, x.exact, rows, 0, x.cols, mail.input, mail.sent, sent);
    if (ofGpu) gated(x, gate, up, hidden);
    _hiddenSent = 0;
    if (ofGpu && reader.cpuRows) sendHidden(hidden, ofGpu);
    _pass.work->add([=, gate = gate.inFile(), up = up.inFile(), reader = reader.inFile()] {
        share->gated({gate, up}, reader, rows, ofGpu, sent, returned);
    });
    if (reader.deviceRows())
        cuda::receiveRows(_pass.stream, mail.hidden, rows, ofGpu, gate.rows, mail.returned, returned, hidden.exact);
}

// The GPU's hidden columns [0, end).
void CudaProducts::sendHidden(const Activations& hidden, int64_t end) {
    const Mailbox& mail = _pass.share->mailbox();
    _hiddenSent = _pass.work->nextSent();
    cuda::sendRows(_pass.stream, hidden.exact, _pass.exactRows(), 0, end, mail.hidden, mail.sent, _hiddenSent);
}

// The CPU's rows of the matrix that reads the hidden rows.
void CudaProducts::receiveAdded(const Weight& w) {
    HostShare* const share = _pass.share;
    const Mailbox& mail = share->mailbox();
    const int64_t rows = _pass.exactRows(), begin = w.deviceRows();
    const uint32_t returned = _pass.work->nextReturned();
    _pass.work->add([=, w = w.inFile(), after = _hiddenSent] { share->down(w, rows, begin, after, returned); });
    cuda::receiveAdd(_pass.stream, mail.down, rows, begin, w.rows - begin, mail.returned, returned,
                     _pass.floats(RowBuffer::Residual), w.rows);
}

// inRegion: within the step that may share; else the GPU computes all rows.
void CudaProducts::logits(const cuda::RowOutputs& x, const Weight& output, int64_t rows, bool inRegion) {
    float* const to = _pass.floats(_pass.layout->logits);
    const int64_t width = output.cols;
    const auto multiply = [&](const Matrix& part, int64_t begin, bool) {
        cuda::matvec(_pass.stream, {x.floats, x.quantized}, static_cast<int>(rows),
                     {{part, nullptr, to + begin, output.rows}});
    };
    if (!inRegion || !shares(output)) return _pass.forParts(output, multiply);
    HostShare* const share = _pass.share;
    const Mailbox& mail = share->mailbox();
    const int64_t begin = output.deviceRows();
    const uint32_t sent = _pass.work->nextSent();
    cuda::sendRows(_pass.stream, x, rows, 0, width, mail.input, mail.sent, sent);
    if (begin) _pass.forParts(output, multiply);
    const uint32_t returned = _pass.work->nextReturned();
    _pass.work->add([=, output = output.inFile()] { share->head(output, rows, begin, sent, returned); });
    cuda::receiveRows(_pass.stream, mail.logits, rows, begin, output.rows, mail.returned, returned, {to, {}, {}});
}

}  // namespace sharpi
