// Puts weights where a processor reads them. The engine loads through this, and planning runs the same loading with a
// placer that copies nothing.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core/matrix.h"
#include "memory/allocator.h"

namespace sharpi {

class Placer {
public:
    virtual ~Placer() = default;
    // Throw Error(OutOfMemory). `host` is the mapped file's; its data is null when only planning.
    virtual Matrix matrix(const Matrix& host, const std::string& name) = 0;
    virtual MatrixStack stack(const MatrixStack& host, const std::string& name) = 0;
    // `count` floats; null: room for them only.
    virtual const float* vector(const float* host, size_t count, const std::string& name) = 0;
};

// The CPU's: matrices stay in the mapped file.
class MappedPlacer : public Placer {
public:
    explicit MappedPlacer(Allocator& allocator) : _allocator(allocator) {}
    Matrix matrix(const Matrix& host, const std::string&) override { return host; }
    MatrixStack stack(const MatrixStack& host, const std::string&) override { return host; }
    const float* vector(const float* host, size_t count, const std::string& name) override;

private:
    Allocator& _allocator;
    std::vector<Buffer> _buffers;
};

// How a device keeps a matrix.
struct DeviceLayout {
    std::function<size_t(const Matrix&)> bytes;
    // Fills `to` (allocated, bytes(to)) from the file's rows.
    std::function<void(const Matrix& to, const Matrix& host)> fill;
};

// Copies everything into memory of its own.
class CopyingPlacer : public Placer {
public:
    CopyingPlacer(Allocator& allocator, DeviceLayout layout) : _allocator(allocator), _layout(std::move(layout)) {}
    Matrix matrix(const Matrix& host, const std::string& name) override;
    MatrixStack stack(const MatrixStack& host, const std::string& name) override;
    const float* vector(const float* host, size_t count, const std::string& name) override;

private:
    Allocator& _allocator;
    DeviceLayout _layout;
    std::vector<Buffer> _buffers;
};

}  // namespace sharpi
