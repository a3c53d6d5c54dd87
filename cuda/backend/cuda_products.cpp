// See cuda_products.h.
#include "backend/cuda_products.h"

#include "core/error.h"

namespace sharpi {

// Matrices that stay on the device share launches.
void CudaProducts::linear(const Activations& x, std::initializer_list<Product> products) {
    std::vector<cuda::MatvecOutput> together;
    for (const Product& p : products) {
        if (shares(p.w) && !p.w.deviceRows()) continue;
        float* const to = _pass.floats(p.to);
        _pass.forParts(p.w, [&](const Matrix& part, int64_t begin, bool stays) {
            const float* const bias = p.bias ? p.bias + begin : nullptr;
            const cuda::MatvecOutput output{part, bias, to + begin, p.w.rows};
            if (stays) together.push_back(output);
            else multiply(x, {output});
        });
    }
    if (!together.empty()) multiply(x, together);
    for (const Product& p : products) {
        if (shares(p.w)) sharedProduct(p.w, p.bias, _pass.floats(p.to), false);
    }
}

void CudaProducts::multiply(const Activations& x, const std::vector<cuda::MatvecOutput>& outputs) {
    exact(x, outputs);
    fast(x, outputs, cuda::Store::Write);
}

void CudaProducts::exact(const Activations& x, std::vector<cuda::MatvecOutput> outputs) {
    _pass.forExactGroups([&](int64_t first, int rows) {
        cuda::matvec(_pass.stream, x.from(first), rows, outputs);
        for (cuda::MatvecOutput& output : outputs) output.y += rows * output.stride;
    });
}

void CudaProducts::fast(const Activations& x, const std::vector<cuda::MatvecOutput>& outputs, cuda::Store store) {
    const int64_t rows = _pass.fastRows();
    if (rows == 0) return;
    std::vector<cuda::MatvecOutput> behind = outputs;
    for (cuda::MatvecOutput& output : behind) output.y += _pass.exactRows() * output.stride;
    cuda::matmul(_pass.stream, x.fast, rows, behind, store);
}

void CudaProducts::addLinear(const Activations& x, const Weight& w, const float* bias) {
    if (!shares(w)) return add(x, w, bias);
    if (w.deviceRows()) add(x, w, bias);
    sharedProduct(w, bias, _pass.floats(RowBuffer::Residual), true);
}

// The other processor's rows of the matrix that reads the hidden rows.
void CudaProducts::sharedProduct(const Weight& w, const float* bias, float* to, bool adds) {
    if (w.file != _hiddenReader)
        throw Error(ErrorKind::Internal, "another processor shares a product that does not read the hidden rows");
    _sharer.product(w, bias, _pass.exactRows(), w.deviceRows(), to, adds);
}

void CudaProducts::add(const Activations& x, const Weight& w, const float* bias) {
    float* const residual = _pass.floats(RowBuffer::Residual);
    _pass.forParts(w, [&](const Matrix& part, int64_t begin, bool) {
        const float* const partBias = bias ? bias + begin : nullptr;
        _pass.forExactGroups([&](int64_t first, int rows) {
            float* const y = residual + first * w.rows + begin;
            cuda::matvecAdd(_pass.stream, x.from(first), rows, part, partBias, y, w.rows);
        });
        fast(x, {{part, partBias, residual + begin, w.rows}}, cuda::Store::Add);
    });
}

void CudaProducts::gatedLinear(const Activations& x, const GatedProduct& product, const Weight& reader) {
    const Activations& hidden = _pass.shape(RowInput::Hidden, {reader}, reader.cols);
    _hiddenReader = reader.file;
    if (shares(product.gate)) _pass.withoutColumns(RowInput::Hidden);  // another processor's part comes in rows
    if (shares(product.gate) || shares(reader)) sharedGated(x, product, reader, hidden);
    else gated(x, product, hidden);
}

// The GPU's columns of the hidden rows. In a step, what stands in the other processor's columns is meaningless until
// these arrive.
void CudaProducts::gated(const Activations& x, const GatedProduct& product, const Activations& hidden) {
    float *const gates = _pass.floats(RowBuffer::Gate), *const ups = _pass.floats(RowBuffer::Up);
    const Weight &gate = product.gate, &up = product.up;
    const int64_t width = gate.rows;
    cuda::GatedJoin join{product.activation, product.gateBias, product.upBias};
    if (!product.gated()) {
        join.gated = false;
        _pass.forParts(gate, [&](const Matrix& part, int64_t begin, bool) {
            multiply(x, {{part, nullptr, gates + begin, width}});
        });
        return activate(hidden, _pass.exactRows(), join, _pass.fastRows(), join);
    }
    bool fused = gate.type == up.type;
    const bool together = _pass.forPairs(gate, up, [&](const Matrix& gatePart, const Matrix& upPart, int64_t begin) {
        const std::vector<cuda::MatvecOutput> outputs = {{gatePart, nullptr, gates + begin, width},
                                                         {upPart, nullptr, ups + begin, width}};
        if (fused) {
            _pass.forExactGroups([&](int64_t first, int rows) {
                cuda::matvecGated(_pass.stream, x.from(first), rows, gatePart, upPart,
                                  cuda::rowsFrom(hidden.exact, first, hidden.cols), begin, width, join);
            });
        } else {
            exact(x, outputs);
        }
        fast(x, outputs, cuda::Store::Write);
    });
    if (!together) {
        fused = false;
        linear(x, {{gate, nullptr, RowBuffer::Gate}, {up, nullptr, RowBuffer::Up}});
    }
    // Exact rows of gates and ups have their place before the fast ones even if the fused kernel did not write them.
    activate(hidden, _pass.exactRows(), join, _pass.fastRows(), join, fused);
}

void CudaProducts::activate(const Activations& hidden, int64_t exactRows, const cuda::GatedJoin& ofExact,
                            int64_t fastRows, const cuda::GatedJoin& ofFast, bool exactDone) {
    float *const gates = _pass.floats(RowBuffer::Gate), *const ups = _pass.floats(RowBuffer::Up);
    const int64_t width = hidden.cols, before = exactRows * width;
    if (!exactDone) cuda::gatedActivation(_pass.stream, ofExact, gates, ups, exactRows, width, hidden.exact);
    cuda::gatedActivation(_pass.stream, ofFast, gates + before, ups + before, fastRows, width,
                          {nullptr, {}, hidden.fast});
}

// The other processor computes the last rows of gate and up, or of the matrix that reads the hidden rows, or of all
// three. Each processor needs all hidden rows for that matrix, so they are exchanged in between.
void CudaProducts::sharedGated(const Activations& x, const GatedProduct& product, const Weight& reader,
                               const Activations& hidden) {
    const Weight& gate = product.gate;
    const int64_t rows = _pass.exactRows(), ofGpu = gate.deviceRows();
    if (!gate.cpuRows) {
        gated(x, product, hidden);
        return _sharer.sendHidden(hidden.exact, rows, gate.rows);
    }
    _sharer.sendInput(x.exact, rows, x.cols);
    if (ofGpu) gated(x, product, hidden);
    if (ofGpu && reader.cpuRows) _sharer.sendHidden(hidden.exact, rows, ofGpu);
    _sharer.gated(product, reader, rows, ofGpu);
    if (reader.deviceRows()) _sharer.receiveHidden(hidden.exact, rows, ofGpu, gate.rows);
}

// inRegion: within the step that may share; else the GPU computes all rows.
void CudaProducts::logits(const cuda::RowOutputs& x, const Weight& output, int64_t rows, bool inRegion) {
    float* const to = _pass.floats(_pass.layout->logits);
    const auto multiply = [&](const Matrix& part, int64_t begin, bool) {
        CudaPass::forGroups(rows, cuda::kMaxMatvecRows, [&](int64_t first, int count) {
            cuda::matvec(_pass.stream, cuda::rowsFrom(cuda::MatvecInput{x.floats, x.quantized}, first, output.cols),
                         count, {{part, nullptr, to + first * output.rows + begin, output.rows}});
        });
    };
    if (!inRegion || !shares(output)) return _pass.forParts(output, multiply);
    _sharer.sendInput(x, rows, output.cols);
    if (output.deviceRows()) _pass.forParts(output, multiply);
    _sharer.head(output, rows, output.deviceRows(), to);
}

}  // namespace sharpi
