// The model's files, mapped read-only and never copied as a whole, and their tensors as matrices.
#pragma once

#include <string>
#include <vector>

#include "core/matrix.h"
#include "model/model_spec.h"

namespace sharpi {

// One file mapped into memory. The mapping lives as long as the object.
class MappedFile {
public:
    // Throws Error(BadModel) naming the file when it cannot be opened or mapped.
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::string& path() const { return _path; }
    const uint8_t* data() const { return _data; }
    uint64_t bytes() const { return _bytes; }
    int descriptor() const { return _descriptor; }

private:
    std::string _path;
    int _descriptor = -1;
    const uint8_t* _data = nullptr;
    uint64_t _bytes = 0;
};

class Weights {
public:
    // Throws Error(BadModel) when a tensor lies outside its file.
    Weights(const std::vector<std::string>& paths, TensorTable tensors);
    // Shapes and types alone, every address null: for planning.
    explicit Weights(TensorTable tensors) : _tensors(std::move(tensors)) {}

    const TensorTable& tensors() const { return _tensors; }
    const std::vector<MappedFile>& files() const { return _files; }
    uint64_t bytes() const;  // of all tensors

    const std::string& name(const WeightSlice& slice) const {
        return _tensors.all().at(static_cast<size_t>(slice.tensor)).name;
    }
    // The matrix that a slice names; expert in [0, slice.experts). For slices of whole rows.
    Matrix matrix(const WeightSlice& slice, int64_t expert = 0) const;
    MatrixStack stack(const WeightSlice& slice) const;
    // Where a tensor's bytes start, and its type: for vectors.
    Matrix whole(const WeightSlice& slice) const;

private:
    TensorTable _tensors;
    std::vector<MappedFile> _files;
};

}  // namespace sharpi
