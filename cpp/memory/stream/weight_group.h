// A group of weights that are used together, and how passes cut it into pieces. Plain arithmetic over addresses in the
// file and sizes on the device: nothing is moved here, and no call depends on the calls before it, except that
// setWanted() chooses a stack's experts and setUploaded() leaves a resident group nothing to fetch.
#pragma once

#include <functional>
#include <vector>

#include "memory/device_layout.h"
#include "memory/stream/transfers.h"

namespace sharpi {

// What a pass uses of the weights. It decides how groups are cut.
enum class PassKind {
    Step,  // over decode rows alone: without the rows that the CPU computes, and without stacks of experts
    Full,  // any other: all rows, and the wanted experts
};

class WeightGroup {
public:
    enum class Kind {
        Resident,  // stays on the device once it is fetched
        Streamed,  // matrices with the same number of rows, fetched in every pass
        Stack,     // a layer's experts, of which full passes fetch those that are wanted
    };
    // Large enough for the bus's full speed, and for products of many rows to fill the device several times over. A
    // piece is at least kRowStep rows, or one expert, however many bytes that takes.
    static constexpr size_t kPieceBytes = size_t{16} << 20;
    static constexpr int64_t kRowStep = 32;

    // to: room on the device for each matrix of `file`; the shapes may differ.
    static WeightGroup resident(const std::vector<Matrix>& to, const std::vector<Matrix>& file);
    // Steps do without the last cpuRows rows.
    static WeightGroup streamed(const DeviceLayout& layout, const std::vector<Matrix>& file, int64_t cpuRows);
    // All experts are wanted at first.
    static WeightGroup stack(const DeviceLayout& layout, const MatrixStack& file);

    Kind kind() const { return _kind; }
    const std::vector<Matrix>& file() const { return _file; }  // of a stack: each expert's matrix
    // The most bytes that a piece takes on the device (0 if the group is resident), and in a stage.
    size_t pieceBytes() const { return _pieceBytes; }
    size_t stageBytes() const { return _stageBytes; }

    // Which experts of a stack are wanted: ascending, none twice. Throws Error(Internal) otherwise. origins: theirs;
    // none: all come from the file.
    void setWanted(std::vector<int32_t> experts, std::vector<StreamOrigin> origins = {});
    // The experts of each piece; the last piece may have fewer.
    int64_t expertsPerPiece() const;

    // The number of pieces in a pass. Of a resident group: those not yet fetched.
    int64_t pieces(PassKind pass) const;
    // The pieces of a full pass that come before those of a matrix: such a piece is rows of one matrix, and the
    // matrices follow each other. In a step a piece is the same rows of all matrices.
    int64_t piecesBefore(size_t matrix) const;
    // A piece's parts, from `buffer` on if the group is not resident.
    std::vector<StreamPart> parts(PassKind pass, int64_t piece, const uint8_t* buffer) const;
    // A resident group has been fetched.
    void setUploaded() { _uploads.clear(); }
    bool uploaded() const { return _uploads.empty(); }
    // Matrices of a stack's piece, as one stack.
    MatrixStack stackOf(const std::vector<Matrix>& experts) const;

private:
    void cutIntoUploads(const std::vector<Matrix>& to);
    void reserve(const std::vector<Matrix>& files, int64_t rows);
    size_t deviceBytes(const std::vector<Matrix>& files, int64_t rows) const;
    int64_t pieceRowsOf(const std::vector<Matrix>& files) const;
    std::vector<StreamPart> rowsOf(const std::vector<Matrix>& files, int64_t begin, int64_t rows,
                                   const uint8_t* buffer) const;
    int64_t wantedCount() const { return static_cast<int64_t>(_wanted.size()); }

    Kind _kind = Kind::Resident;
    std::function<size_t(const Matrix&)> _bytesOf;  // DeviceLayout::bytes
    std::vector<Matrix> _file;
    size_t _pieceBytes = 0, _stageBytes = 0;
    std::vector<std::vector<StreamPart>> _uploads;  // Resident: what is still to be fetched
    int64_t _cpuRows = 0;                           // Streamed
    int64_t _stepRows = 0;                          // Streamed: of a step's piece
    std::vector<int64_t> _matrixRows;               // Streamed: of a full pass's pieces, by matrix
    int64_t _mostExperts = 0;                       // Stack: of a piece
    std::vector<int32_t> _wanted;                   // Stack
    std::vector<StreamOrigin> _origins;             // Stack: of the wanted ones; may be empty
};

}  // namespace sharpi
