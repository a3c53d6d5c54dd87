// Brings weights from the mapped files to the device in the order in which a pass uses them, each ahead of its use.
// Resident weights are fetched once, to their place. The others are fetched in every pass, piece by piece, through a
// ring of buffers.
//
// Weights are added in groups, in the order of use; the matrices of a group are used together (weight_group.h). In a
// step (a pass over decode rows alone) a piece is the same rows of all matrices of a group, so that one kernel can
// multiply them. In a full pass a piece is rows of one matrix, and the matrices follow each other, since products of
// many rows want large matrices. A stack of experts is a group of its own, whose pieces are whole experts, and only
// those that are wanted; steps use few experts and fetch none here.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/matrix.h"
#include "memory/allocator.h"
#include "memory/device_layout.h"
#include "memory/stream/piece_ring.h"
#include "memory/stream/transfers.h"
#include "memory/stream/weight_group.h"

namespace sharpi {

class WeightStream {
public:
    // The groups that a pass walks through, besides the output head's.
    enum class Part { Model, Prediction };

    // transfers: nullptr when only planning.
    WeightStream(Allocator& allocator, DeviceLayout layout, Transfers* transfers)
        : _allocator(allocator), _layout(std::move(layout)), _transfers(transfers), _ring(_groups, transfers) {}
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    // --- loading, in the order of use. file: null addresses when only planning. ---

    // Matrices with room on the device (to[i].data), of any shapes. Returns the group's number.
    int32_t addResident(const std::vector<Matrix>& to, const std::vector<Matrix>& file);
    // Matrices with the same number of rows. Steps do without the last cpuRows of them.
    int32_t addStreamed(const std::vector<Matrix>& file, int64_t cpuRows);
    // A stack of experts, which only full passes use. All of them are wanted at first.
    int32_t addStreamedStack(const MatrixStack& file);
    // A table of which single rows are read (table_rows.h). Nothing of it is fetched.
    void addTable(const Matrix& file) { _tables.push_back(file); }
    const std::vector<Matrix>& tables() const { return _tables; }
    // What is added from here on is a prediction layer's: passes of their own walk through it. Before startHead().
    void startPrediction() { _predictionBegin = static_cast<int32_t>(_groups.size()); }
    // What is added from here on is used by the output head alone.
    void startHead() { _headBegin = static_cast<int32_t>(_groups.size()); }
    // Takes the ring and the stages, and prepares the files. Once, after the last add. Throws Error(OutOfMemory).
    void take();
    // If nothing is streamed, fetches everything and gives the stages back. Otherwise the first pass fetches resident
    // weights, and computes meanwhile; only the prediction layer's are fetched now. There may never be a pass over it,
    // and no page of the files is unpinned before the last resident weight has arrived.
    void uploadAll();
    // Calls `told` once, when all resident weights have arrived, with the seconds since the first was asked for. The
    // next finishUploads() makes the call, so it comes before the second pass.
    void onUploaded(std::function<void(double seconds)> told) { _onUploaded = std::move(told); }
    // Releases what only uploads needed, if all uploads have been made. Not while a step is captured.
    void finishUploads();
    // Whether finishUploads() has found all uploads made.
    bool uploaded() const { return _finished; }

    // From now on full passes fetch only these experts of a streamed stack: ascending, none twice; there may be none.
    // origins: see WeightGroup::setWanted(). Not within a pass: a pass that was left half way ends here.
    void setWanted(int32_t group, std::vector<int32_t> experts, std::vector<StreamOrigin> origins = {});

    // --- passes ---

    // Over a part's groups, and with the head's if withHead. step: over decode rows alone.
    void begin(Part part, bool step, bool withHead);
    // A full pass over the head's groups alone.
    void beginHead();
    void end() { _ring.end(); }
    bool streams() const { return _streams; }        // whether some group is not resident
    bool sharesRows() const { return _sharesRows; }  // whether the CPU computes rows of some group

    // A resident group is there for what is computed next.
    void arrive(int32_t group);
    // Calls body(parts, rowBegin) for each piece of a streamed group: rows [rowBegin, rowBegin + parts[0].rows) of each
    // of its matrices. In a step; a group of one matrix in any pass.
    template <typename Body> void forPieces(int32_t group, const Body& body) {
        const WeightGroup& weights = groupOf(group, WeightGroup::Kind::Streamed);
        const PassKind pass = _ring.kind();
        if (pass != PassKind::Step && weights.file().size() > 1)
            throw Error(ErrorKind::Internal, "a full pass uses the matrices of a group together");
        for (int64_t piece = 0, count = weights.pieces(pass); piece < count; ++piece) {
            const PieceRing::Piece acquired = _ring.acquire(group, piece);
            body(acquired.parts, acquired.rowBegin);
            _ring.release();
        }
    }
    // In a full pass: calls body(part, rowBegin) for each piece of one matrix of a streamed group.
    template <typename Body> void forPieces(int32_t group, int32_t matrix, const Body& body) {
        const WeightGroup& weights = groupOf(group, WeightGroup::Kind::Streamed);
        if (_ring.kind() != PassKind::Full) throw Error(ErrorKind::Internal, "a step uses one matrix of a group alone");
        const int64_t end = weights.piecesBefore(static_cast<size_t>(matrix) + 1);
        for (int64_t piece = weights.piecesBefore(static_cast<size_t>(matrix)); piece < end; ++piece) {
            const PieceRing::Piece acquired = _ring.acquire(group, piece);
            body(acquired.parts[0], acquired.rowBegin);
            _ring.release();
        }
    }
    // Calls body(part, first) for each piece of a streamed stack: a stack of its own, whose element i is the
    // (first + i)-th of the wanted experts. A step has no such pieces.
    template <typename Body> void forExperts(int32_t group, const Body& body) {
        const WeightGroup& weights = groupOf(group, WeightGroup::Kind::Stack);
        for (int64_t piece = 0, count = weights.pieces(_ring.kind()); piece < count; ++piece) {
            const PieceRing::Piece acquired = _ring.acquire(group, piece);
            body(weights.stackOf(acquired.parts), static_cast<int32_t>(piece * weights.expertsPerPiece()));
            _ring.release();
        }
    }

private:
    const WeightGroup& groupOf(int32_t group, WeightGroup::Kind kind) const;
    void start(PassKind kind, const GroupRange& range);

    Allocator& _allocator;
    DeviceLayout _layout;
    Transfers* _transfers;
    std::vector<WeightGroup> _groups;
    std::vector<Matrix> _tables;
    int32_t _predictionBegin = -1, _headBegin = -1;  // take() sets those that were not started to the next one's
    bool _streams = false, _sharesRows = false, _taken = false, _finished = false;
    std::function<void(double)> _onUploaded;
    std::optional<std::chrono::steady_clock::time_point> _uploadsBegan;
    Buffer _staging;
    PieceRing _ring;
};

}  // namespace sharpi
