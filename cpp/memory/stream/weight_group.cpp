// See weight_group.h.
#include "memory/stream/weight_group.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "memory/allocator.h"

namespace sharpi {

namespace {

// Resident weights come in smaller pieces: if nothing is streamed, the stages serve them alone, and are taken before
// scratch memory is.
constexpr size_t kUploadBytes = size_t{2} << 20;

int64_t divideUp(int64_t n, int64_t by) { return (n + by - 1) / by; }
int64_t roundUp(int64_t n, int64_t to) { return divideUp(n, to) * to; }

}  // namespace

WeightGroup WeightGroup::resident(const std::vector<Matrix>& to, const std::vector<Matrix>& file) {
    WeightGroup group;
    group._file = file;
    group.cutIntoUploads(to);
    return group;
}

WeightGroup WeightGroup::streamed(const DeviceLayout& layout, const std::vector<Matrix>& file, int64_t cpuRows) {
    WeightGroup group;
    group._kind = Kind::Streamed;
    group._bytesOf = layout.bytes;
    group._file = file;
    group._cpuRows = cpuRows;
    group._stepRows = group.pieceRowsOf(file);
    group.reserve(file, group._stepRows);
    for (const Matrix& m : file) {
        group._matrixRows.push_back(group.pieceRowsOf({m}));
        group.reserve({m}, group._matrixRows.back());
    }
    return group;
}

WeightGroup WeightGroup::stack(const DeviceLayout& layout, const MatrixStack& file) {
    WeightGroup group;
    group._kind = Kind::Stack;
    group._bytesOf = layout.bytes;
    for (int32_t i = 0; i < file.count; ++i) {
        group._file.push_back(file.at(i));
        group._wanted.push_back(i);
    }
    const size_t expertBytes = group.deviceBytes({file.first}, file.first.rows);
    const auto most = static_cast<int64_t>(std::max<size_t>(1, kPieceBytes / expertBytes));
    group._mostExperts = divideUp(file.count, divideUp(file.count, most));
    group.reserve(std::vector<Matrix>(static_cast<size_t>(group._mostExperts), file.first), file.first.rows);
    return group;
}

void WeightGroup::cutIntoUploads(const std::vector<Matrix>& to) {
    std::vector<StreamPart> parts;
    size_t bytes = 0;
    const auto finish = [&] {
        if (!parts.empty()) _uploads.push_back(std::move(parts));
        parts.clear();
        _stageBytes = std::max(_stageBytes, bytes);
        bytes = 0;
    };
    for (size_t i = 0; i < to.size(); ++i) {
        const size_t row = rowBytes(to[i].type, to[i].cols);
        const auto step = static_cast<int64_t>(std::max<size_t>(1, kUploadBytes / row));
        for (int64_t begin = 0; begin < to[i].rows; begin += step) {
            const int64_t rows = std::min(step, to[i].rows - begin);
            const size_t taken = Allocator::aligned(row * static_cast<size_t>(rows));
            if (bytes + taken > kUploadBytes) finish();
            const uint8_t* file = _file[i].data ? _file[i].data + row * static_cast<size_t>(begin) : nullptr;
            parts.push_back({to[i], begin, rows, file, begin});
            bytes += taken;
        }
    }
    finish();
}

// Notes what a piece of these rows takes. Each matrix's part is aligned, on the device and in a stage.
void WeightGroup::reserve(const std::vector<Matrix>& files, int64_t rows) {
    size_t staged = 0;
    for (const Matrix& m : files) staged += Allocator::aligned(rowBytes(m.type, m.cols) * static_cast<size_t>(rows));
    _pieceBytes = std::max(_pieceBytes, deviceBytes(files, rows));
    _stageBytes = std::max(_stageBytes, staged);
}

size_t WeightGroup::deviceBytes(const std::vector<Matrix>& files, int64_t rows) const {
    size_t bytes = 0;
    for (const Matrix& m : files) bytes += Allocator::aligned(_bytesOf({m.type, rows, m.cols, nullptr}));
    return bytes;
}

// Pieces are equal, so that none is too small for the bus.
int64_t WeightGroup::pieceRowsOf(const std::vector<Matrix>& files) const {
    const int64_t rows = files[0].rows;
    int64_t count = 1, piece;
    do {
        piece = std::min(rows, roundUp(divideUp(rows, count), kRowStep));
        ++count;
    } while (deviceBytes(files, piece) > kPieceBytes && piece > kRowStep);
    return piece;
}

void WeightGroup::setWanted(std::vector<int32_t> experts, std::vector<StreamOrigin> origins) {
    if (_kind != Kind::Stack) throw Error(ErrorKind::Internal, "experts are chosen from weights that are no stack");
    if (!origins.empty() && origins.size() != experts.size())
        throw Error(ErrorKind::Internal, std::to_string(experts.size()) + " experts are chosen, and it is known of " +
                                             std::to_string(origins.size()) + " where they come from");
    for (size_t i = 0; i < experts.size(); ++i) {
        const int32_t least = i == 0 ? 0 : experts[i - 1] + 1;
        if (experts[i] < least || experts[i] >= static_cast<int32_t>(_file.size()))
            throw Error(ErrorKind::Internal, "expert " + std::to_string(experts[i]) + " of " +
                                                 std::to_string(_file.size()) + " is out of range or out of order");
    }
    _wanted = std::move(experts);
    _origins = std::move(origins);
}

// Pieces are equal, and none is larger than a piece of the whole stack.
int64_t WeightGroup::expertsPerPiece() const {
    return _wanted.empty() ? 0 : divideUp(wantedCount(), divideUp(wantedCount(), _mostExperts));
}

int64_t WeightGroup::pieces(PassKind pass) const {
    if (_kind == Kind::Resident) return static_cast<int64_t>(_uploads.size());
    if (_kind == Kind::Stack) return pass == PassKind::Step ? 0 : divideUp(wantedCount(), _mostExperts);
    return pass == PassKind::Step ? divideUp(_file[0].rows - _cpuRows, _stepRows) : piecesBefore(_file.size());
}

int64_t WeightGroup::piecesBefore(size_t matrix) const {
    int64_t pieces = 0;
    for (size_t i = 0; i < matrix; ++i) pieces += divideUp(_file[i].rows, _matrixRows[i]);
    return pieces;
}

std::vector<StreamPart> WeightGroup::parts(PassKind pass, int64_t piece, const uint8_t* buffer) const {
    if (_kind == Kind::Resident) return _uploads[static_cast<size_t>(piece)];
    if (_kind == Kind::Stack) {
        const int64_t begin = piece * expertsPerPiece(), end = std::min(begin + expertsPerPiece(), wantedCount());
        std::vector<Matrix> experts;
        for (int64_t i = begin; i < end; ++i)
            experts.push_back(_file[static_cast<size_t>(_wanted[static_cast<size_t>(i)])]);
        std::vector<StreamPart> parts = rowsOf(experts, 0, experts[0].rows, buffer);
        for (size_t i = 0; i < parts.size() && !_origins.empty(); ++i) {
            const StreamOrigin& origin = _origins[static_cast<size_t>(begin) + i];
            if (origin.inRam) parts[i].file = origin.inRam;
            parts[i].keep = origin.keep;
        }
        return parts;
    }
    if (pass == PassKind::Step) {
        const int64_t begin = piece * _stepRows;
        return rowsOf(_file, begin, std::min(_stepRows, _file[0].rows - _cpuRows - begin), buffer);
    }
    size_t matrix = 0;
    while (piece >= piecesBefore(matrix + 1)) ++matrix;
    const int64_t begin = (piece - piecesBefore(matrix)) * _matrixRows[matrix];
    return rowsOf({_file[matrix]}, begin, std::min(_matrixRows[matrix], _file[matrix].rows - begin), buffer);
}

std::vector<StreamPart> WeightGroup::rowsOf(const std::vector<Matrix>& files, int64_t begin, int64_t rows,
                                            const uint8_t* buffer) const {
    std::vector<StreamPart> parts;
    for (const Matrix& file : files) {
        const Matrix to{file.type, rows, file.cols, buffer};
        const uint8_t* from =
            file.data ? file.data + rowBytes(file.type, file.cols) * static_cast<size_t>(begin) : nullptr;
        parts.push_back({to, 0, rows, from, begin});
        buffer += Allocator::aligned(_bytesOf(to));
    }
    return parts;
}

MatrixStack WeightGroup::stackOf(const std::vector<Matrix>& experts) const {
    return {experts[0], deviceBytes({experts[0]}, experts[0].rows), static_cast<int32_t>(experts.size())};
}

}  // namespace sharpi
