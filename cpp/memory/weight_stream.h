// Brings weights from the mapped files to the device in the order in which a pass uses them, each ahead of its use:
// resident ones once, to where they stay; the others in every pass, piece by piece, through a few slots.
//
// Weights are registered in groups, in the order of use. The matrices of a group are used together. In a step (a pass
// over decode rows alone) a piece is the same rows of all of them, so that one kernel can multiply them. In any other
// pass it is rows of one, since products of many rows want large matrices, and one matrix follows the other. A stack of
// experts is a group of its own: a piece is whole experts, of those that are wanted; a step, which uses few of them,
// does without. A pass walks through the groups; while piece k is used, the following ones are on their way, as many as
// there are slots.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/matrix.h"
#include "memory/allocator.h"

namespace sharpi {

// How a device keeps matrices.
struct DeviceLayout {
    std::function<size_t(const Matrix&)> bytes;  // of a matrix of that type and shape
    int stages = 0;  // buffers on the device that file rows pass through before they are rearranged; 0: it keeps the
                     // file's layout
};

// Rows of a matrix on their way.
struct StreamPart {
    Matrix to;  // on the device; a matrix of which these are rows [rowBegin, rowBegin + rows)
    int64_t rowBegin = 0, rows = 0;
    const uint8_t* file = nullptr;
    int64_t fileRow = 0;  // the first one's number in the matrix in the file
    size_t bytes() const { return rowBytes(to.type, to.cols) * static_cast<size_t>(rows); }
};

// Host memory.
struct HostRange {
    const uint8_t* begin = nullptr;
    size_t bytes = 0;
};

// Parts of the mapped files, by how they are read.
struct HostRanges {
    std::vector<HostRange> always;  // in every pass, and by kernels
    std::vector<HostRange> once;    // until all resident weights have arrived
    std::vector<HostRange>
        optional;  // in passes that are no steps; by kernels only where they can. May be more than memory holds
};

// How a device fetches. Work is in order with what the device computes, but for what these calls let run ahead.
class Transfers {
public:
    virtual ~Transfers() = default;
    // Prepares ranges of the mapped files for fetching, neighbours as one; staging: `stages` buffers of stageBytes
    // each. Throws Error(OutOfMemory) where the system refuses the memory for `always`. What it did is told in notes().
    virtual void prepare(const HostRanges& ranges, void* staging, size_t stageBytes) = 0;
    // Everything resident has arrived: lets go of `once`.
    virtual void finishOnce() = 0;
    // Lines for people: what could not be pinned, and what was done instead.
    virtual std::vector<std::string> notes() const { return {}; }
    // Where kernels read a byte of an `always` range.
    virtual const uint8_t* deviceAddress(const uint8_t* file) const { return file; }
    // Where kernels read bytes of an `always` or `optional` range; null if they cannot read all of them, one after
    // another.
    virtual const uint8_t* reachable(const uint8_t* file, size_t) const { return file; }

    // A pass: fetches between begin() and end() come after what was computed before begin(), and what is computed after
    // end() comes after all of them.
    virtual void begin() = 0;
    virtual void end() = 0;
    // Starts to bring parts over, after release(slot) if that was called in this pass. All parts together fit into a
    // stage, each aligned to Allocator::kAlignment.
    virtual void fetch(const std::vector<StreamPart>& parts, int slot) = 0;
    // What is computed from here on comes after the last fetch(slot).
    virtual void await(int slot) = 0;
    // What was computed up to here was the last to read the slot.
    virtual void release(int slot) = 0;
};

// For a device whose memory the host can write, and that keeps the file's layout: copies at once.
class CopyingTransfers : public Transfers {
public:
    explicit CopyingTransfers(DeviceMemory& memory) : _memory(memory) {}
    void prepare(const HostRanges&, void*, size_t) override {}
    void finishOnce() override {}
    void begin() override {}
    void end() override {}
    void fetch(const std::vector<StreamPart>& parts, int slot) override;
    void await(int) override {}
    void release(int) override {}

private:
    DeviceMemory& _memory;
};

class WeightStream {
public:
    // The groups that a pass walks through, beside the output head's.
    enum class Part { Model, Prediction };

    static constexpr int kSlots = 6;
    // Large enough for the bus's full speed, and for products of many rows to fill the device several times over. A
    // piece is at least 32 rows, or one expert, whatever they take.
    static constexpr size_t kPieceBytes = size_t{16} << 20;
    static constexpr int64_t kRowStep = 32;

    // transfers: nullptr when only planning.
    WeightStream(Allocator& allocator, DeviceLayout layout, Transfers* transfers)
        : _allocator(allocator), _layout(std::move(layout)), _transfers(transfers) {}

    // Loading, in the order of use. file: null addresses when only planning.
    // Matrices with room on the device (to[i].data), of any shapes. Returns the group's number.
    int32_t addResident(const std::vector<Matrix>& to, const std::vector<Matrix>& file);
    // Matrices of the same number of rows, the last cpuRows of which steps do without.
    int32_t addStreamed(const std::vector<Matrix>& file, int64_t cpuRows);
    // A stack of experts, which only passes that are no steps use. All of them are wanted at first.
    int32_t addStreamedStack(const MatrixStack& file);
    // A table of which single rows are read where they are in the file.
    void addTable(const Matrix& file);
    // Takes slots and staging and prepares the files. Once, after the last add. Throws Error(OutOfMemory).
    void take();
    // What is added from here on is a prediction layer's: passes of their own walk through it. Before startHead().
    void startPrediction() { _predictionBegin = groups(); }
    // What is added from here on is used by the output head alone.
    void startHead() { _headBegin = groups(); }
    // Unless something is streamed (then the first pass does it, and computes meanwhile): brings everything over, and
    // gives staging back. What of the prediction layer is resident comes now in any case: there may never be a pass
    // over it, and until the last upload is made none of the files' pages are let go of.
    void uploadAll();
    // Calls `told` once all that is resident has arrived, with the seconds since the first of it was asked for: by the
    // next finishUploads(), so before the second pass at the latest.
    void onUploaded(std::function<void(double seconds)> told) { _onUploaded = std::move(told); }
    // Lets go of what only uploads needed, if all have been made. Not while a step is captured.
    void finishUploads();
    // Whether finishUploads() has found all of them made.
    bool uploaded() const { return _finished; }

    // From now on passes bring only these experts of a streamed stack: ascending, none twice; there may be none. Not
    // within a pass: one that was left half way ends here.
    void setWanted(int32_t group, std::vector<int32_t> experts);

    // A pass over a part's groups, and the head's or not. step: without the rows that the CPU computes.
    void begin(Part part, bool step, bool withHead);
    // A pass over the head's alone, with all rows.
    void beginHead();
    void end();
    bool streams() const { return _streams; }        // whether some group is not resident
    bool sharesRows() const { return _sharesRows; }  // whether the CPU computes rows of some group

    // In a pass: a resident group is there for what is computed next.
    void arrive(int32_t group);
    // In a step: body(parts, rowBegin) for each piece of a streamed group: its matrices' rows
    // [rowBegin, rowBegin + parts[0].rows), each a matrix of its own.
    // With one matrix in the group, in any pass.
    template <typename Body> void forPieces(int32_t group, const Body& body) {
        requireKind(group, false);
        requireTogether(group);
        for (int64_t piece = 0, count = pieceCount(_groups[group]); piece < count; ++piece) {
            const std::vector<Matrix>& parts = acquire(group, piece);
            body(parts, _rowBegin);
            release();
        }
    }
    // In a pass that is no step: body(part, rowBegin) for each piece of one matrix of a streamed group.
    template <typename Body> void forPieces(int32_t group, int32_t member, const Body& body) {
        requireKind(group, false);
        const int64_t first = firstPiece(_groups[group], member);
        for (int64_t piece = first, end = firstPiece(_groups[group], member + 1); piece < end; ++piece) {
            const std::vector<Matrix>& parts = acquire(group, piece);
            body(parts[0], _rowBegin);
            release();
        }
    }
    // In a pass that is no step: body(part, first) for each piece of a streamed stack: a stack of its own, whose
    // element i is the (first + i)-th of the wanted experts. In a step there are none.
    template <typename Body> void forExperts(int32_t group, const Body& body) {
        requireKind(group, true);
        for (int64_t piece = 0, count = pieceCount(_groups[group]); piece < count; ++piece) {
            const std::vector<Matrix>& parts = acquire(group, piece);
            body(stackOf(parts), static_cast<int32_t>(piece * expertsOfPiece(_groups[group])));
            release();
        }
    }
    const uint8_t* deviceAddress(const uint8_t* file) const {
        return _transfers ? _transfers->deviceAddress(file) : file;
    }

private:
    struct Group {
        std::vector<Matrix> file;  // of a stack: each expert's
        std::vector<Matrix> to;    // empty: streamed
        int64_t cpuRows = 0;
        int64_t pieceRows = 0;                         // streamed: of a piece of all matrices
        std::vector<int64_t> memberRows;               // of a piece of one
        int64_t mostExperts = 0;                       // streamed stacks, and they alone: of a piece
        std::vector<int32_t> wanted;                   // of a stack
        std::vector<std::vector<StreamPart>> uploads;  // resident: until it has been fetched
        bool resident() const { return !to.empty(); }
        bool isStack() const { return mostExperts > 0; }
    };
    // The next piece to fetch, or to use.
    struct Cursor {
        int32_t group = 0;
        int64_t piece = 0, number = 0;
    };
    int32_t groups() const { return static_cast<int32_t>(_groups.size()); }
    int32_t headBegin() const { return _headBegin < 0 ? groups() : _headBegin; }
    int32_t predictionBegin() const { return _predictionBegin < 0 ? headBegin() : _predictionBegin; }
    void uploadPrediction();
    void start(bool step, int32_t first, int32_t end, int32_t leaveOut, int32_t goOn);
    void requireKind(int32_t group, bool isStack) const;
    void requireTogether(int32_t group) const;
    int64_t pieceCount(const Group& group) const;
    static int64_t stackPieces(const Group& group);
    static int64_t expertsOfPiece(const Group& group);
    int64_t firstPiece(const Group& group, int32_t member) const;
    size_t slotBytesFor(const std::vector<Matrix>& files, int64_t rows) const;
    int64_t pieceRowsOf(const std::vector<Matrix>& files) const;
    MatrixStack stackOf(const std::vector<Matrix>& experts) const;
    void cutIntoUploads(Group& group);
    std::vector<StreamPart> partsOf(const Group& group, int64_t piece, int64_t number) const;
    std::vector<StreamPart> partsOf(const std::vector<Matrix>& files, int64_t begin, int64_t rows,
                                    int64_t number) const;
    std::vector<StreamPart> expertParts(const Group& group, int64_t piece, int64_t number) const;
    void advance(Cursor& cursor) const;
    void settle(Cursor& cursor) const;
    void fetchNext();
    const std::vector<Matrix>& acquire(int32_t group, int64_t piece);
    void release();

    Allocator& _allocator;
    DeviceLayout _layout;
    Transfers* _transfers;
    std::vector<Group> _groups;
    std::vector<HostRange> _tables;
    int32_t _predictionBegin = -1, _headBegin = -1;
    bool _streams = false, _sharesRows = false, _taken = false, _finished = false;
    std::function<void(double)> _onUploaded;
    std::optional<std::chrono::steady_clock::time_point> _uploadsBegan;
    size_t _slotBytes = 0;
    int _slots = 0;
    Buffer _slotMemory, _staging;

    bool _active = false;  // between begin() and end(), with something to bring over
    bool _step = false;
    int32_t _end = 0;
    int32_t _leaveOut = 0, _goOn = 0;  // groups [_leaveOut, _goOn) are passed over
    Cursor _fetch, _use;
    std::vector<Matrix> _parts;  // of the piece in use
    int64_t _rowBegin = 0;       // the first of its rows
};

}  // namespace sharpi
