// See weight_stream.h.
#include "memory/weight_stream.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

// Resident weights come in smaller pieces: where nothing is streamed, staging is taken for them alone, before scratch
// is.
constexpr size_t kUploadBytes = size_t{2} << 20;

size_t stageBytesOf(const std::vector<StreamPart>& parts) {
    size_t bytes = 0;
    for (const StreamPart& part : parts) bytes += Allocator::aligned(part.bytes());
    return bytes;
}

int64_t partsOfAtMost(int64_t n, int64_t most) { return (n + most - 1) / most; }
int64_t roundUp(int64_t n, int64_t to) { return partsOfAtMost(n, to) * to; }

}  // namespace

void CopyingTransfers::fetch(const std::vector<StreamPart>& parts, int) {
    for (const StreamPart& part : parts) {
        const size_t begin = rowBytes(part.to.type, part.to.cols) * static_cast<size_t>(part.rowBegin);
        _memory.upload(const_cast<uint8_t*>(part.to.data) + begin, part.file, part.bytes());
    }
}

int32_t WeightStream::addResident(const std::vector<Matrix>& to, const std::vector<Matrix>& file) {
    Group group;
    group.to = to;
    group.file = file;
    cutIntoUploads(group);
    _groups.push_back(std::move(group));
    return groups() - 1;
}

int32_t WeightStream::addStreamed(const std::vector<Matrix>& file, int64_t cpuRows) {
    Group group;
    group.file = file;
    group.cpuRows = cpuRows;
    group.pieceRows = pieceRowsOf(file);
    for (const Matrix& m : file) group.memberRows.push_back(pieceRowsOf({m}));
    _groups.push_back(std::move(group));
    _streams = true;
    _sharesRows |= cpuRows > 0;
    return groups() - 1;
}

int32_t WeightStream::addStreamedStack(const MatrixStack& file) {
    Group group;
    for (int32_t i = 0; i < file.count; ++i) {
        group.file.push_back(file.at(i));
        group.wanted.push_back(i);
    }
    const size_t expertBytes = slotBytesFor({file.first}, file.first.rows);
    const auto most = static_cast<int64_t>(std::max<size_t>(1, kPieceBytes / expertBytes));
    group.mostExperts = partsOfAtMost(file.count, partsOfAtMost(file.count, most));
    _groups.push_back(std::move(group));
    _streams = true;
    return groups() - 1;
}

// Equal pieces, so that none is too small for the bus.
int64_t WeightStream::pieceRowsOf(const std::vector<Matrix>& files) const {
    const int64_t rows = files[0].rows;
    int64_t count = 1, piece;
    do {
        piece = std::min(rows, roundUp((rows + count - 1) / count, kRowStep));
        ++count;
    } while (slotBytesFor(files, piece) > kPieceBytes && piece > kRowStep);
    return piece;
}

void WeightStream::cutIntoUploads(Group& group) {
    std::vector<StreamPart> parts;
    size_t bytes = 0;
    const auto finish = [&] {
        if (!parts.empty()) group.uploads.push_back(std::move(parts));
        parts.clear();
        bytes = 0;
    };
    for (size_t i = 0; i < group.to.size(); ++i) {
        const Matrix& to = group.to[i];
        const size_t row = rowBytes(to.type, to.cols);
        const auto step = static_cast<int64_t>(std::max<size_t>(1, kUploadBytes / row));
        for (int64_t begin = 0; begin < to.rows; begin += step) {
            const int64_t rows = std::min(step, to.rows - begin);
            const size_t taken = Allocator::aligned(row * static_cast<size_t>(rows));
            if (bytes + taken > kUploadBytes) finish();
            const uint8_t* file = group.file[i].data ? group.file[i].data + row * static_cast<size_t>(begin) : nullptr;
            parts.push_back({to, begin, rows, file, begin});
            bytes += taken;
        }
    }
    finish();
}

// Of a piece of so many rows: each matrix's part begins at a whole alignment.
size_t WeightStream::slotBytesFor(const std::vector<Matrix>& files, int64_t rows) const {
    size_t bytes = 0;
    for (const Matrix& m : files) bytes += Allocator::aligned(_layout.bytes({m.type, rows, m.cols, nullptr}));
    return bytes;
}

void WeightStream::addTable(const Matrix& file) {
    if (file.data) _tables.push_back({file.data, fileBytes(file)});
}

void WeightStream::take() {
    if (_taken)
        throw Error(ErrorKind::Internal, "the weight stream's slots cannot grow: steps that read them may be captured");
    _taken = true;
    HostRanges ranges;
    ranges.always = _tables;
    size_t stageBytes = 0;
    int64_t pieces = 0;
    for (const Group& group : _groups) {
        std::vector<HostRange>& readAs = group.resident()  ? ranges.once
                                         : group.isStack() ? ranges.optional
                                                           : ranges.always;
        for (const Matrix& file : group.file) {
            if (file.data) readAs.push_back({file.data, fileBytes(file)});
        }
        for (const auto& parts : group.uploads) stageBytes = std::max(stageBytes, stageBytesOf(parts));
        if (group.resident()) continue;
        pieces += pieceCount(group);
        if (group.isStack()) {
            const std::vector<StreamPart> parts = expertParts(group, 0, 0);
            _slotBytes = std::max(_slotBytes, slotBytesFor({group.file[0]}, group.file[0].rows) * parts.size());
            stageBytes = std::max(stageBytes, stageBytesOf(parts));
            continue;
        }
        const auto reserve = [&](const std::vector<Matrix>& files, int64_t rows) {
            _slotBytes = std::max(_slotBytes, slotBytesFor(files, rows));
            stageBytes = std::max(stageBytes, stageBytesOf(partsOf(files, 0, rows, 0)));
        };
        reserve(group.file, group.pieceRows);
        for (size_t i = 0; i < group.file.size(); ++i) reserve({group.file[i]}, group.memberRows[i]);
    }
    _slots = static_cast<int>(_streams ? std::min<int64_t>(kSlots, pieces) : kSlots);
    if (_streams)
        _slotMemory =
            Buffer(_allocator, _slotBytes * static_cast<size_t>(_slots), "slots for weights that are not resident");
    if (_layout.stages)
        _staging = Buffer(_allocator, stageBytes * static_cast<size_t>(_layout.stages), "staging for weights");
    if (_transfers) _transfers->prepare(ranges, _staging.as<void>(), stageBytes);
}

void WeightStream::setWanted(int32_t group, std::vector<int32_t> experts) {
    requireKind(group, true);
    Group& stack = _groups[group];
    const auto wrong = [&](size_t i) {
        return experts[i] < (i == 0 ? 0 : experts[i - 1] + 1) || experts[i] >= static_cast<int32_t>(stack.file.size());
    };
    for (size_t i = 0; i < experts.size(); ++i) {
        if (wrong(i))
            throw Error(ErrorKind::Internal, "expert " + std::to_string(experts[i]) + " is wanted where it cannot be");
    }
    if (!_taken) throw Error(ErrorKind::Internal, "experts are chosen before the weight stream's slots were taken");
    _active = false;
    stack.wanted = std::move(experts);
}

void WeightStream::uploadAll() {
    if (_streams) return uploadPrediction();
    if (_transfers) {
        start(false, 0, groups(), 0, 0);
        for (int32_t i = 0; i < groups(); ++i) arrive(i);
        end();
        finishUploads();
    }
    _staging = Buffer();
}

void WeightStream::uploadPrediction() {
    for (int32_t i = predictionBegin(); _transfers && i < headBegin(); ++i) {
        if (!_groups[i].resident()) continue;
        start(false, i, i + 1, 0, 0);
        arrive(i);
        end();
    }
}

void WeightStream::finishUploads() {
    if (_finished) return;
    for (const Group& group : _groups) {
        if (!group.uploads.empty()) return;
    }
    _finished = true;
    if (!_transfers) return;
    _transfers->finishOnce();
    const auto now = std::chrono::steady_clock::now();
    if (_onUploaded) _onUploaded(std::chrono::duration<double>(now - _uploadsBegan.value_or(now)).count());
}

int64_t WeightStream::pieceCount(const Group& group) const {
    if (group.resident()) return static_cast<int64_t>(group.uploads.size());
    if (group.isStack()) return _step ? 0 : stackPieces(group);
    if (!_step) return firstPiece(group, static_cast<int32_t>(group.file.size()));
    return partsOfAtMost(group.file[0].rows - group.cpuRows, group.pieceRows);
}

int64_t WeightStream::stackPieces(const Group& group) {
    return partsOfAtMost(static_cast<int64_t>(group.wanted.size()), group.mostExperts);
}

// Of a stack of which some are wanted. Equal pieces, no larger than the slots.
int64_t WeightStream::expertsOfPiece(const Group& group) {
    return partsOfAtMost(static_cast<int64_t>(group.wanted.size()), stackPieces(group));
}

void WeightStream::requireTogether(int32_t group) const {
    if (!_step && _groups[group].file.size() > 1)
        throw Error(ErrorKind::Internal, "matrices of a group together in a pass that is no step");
}

// Of a matrix, in a pass that is no step.
int64_t WeightStream::firstPiece(const Group& group, int32_t member) const {
    if (_step) throw Error(ErrorKind::Internal, "one matrix of a group in a step");
    int64_t pieces = 0;
    for (size_t i = 0; i < static_cast<size_t>(member); ++i)
        pieces += partsOfAtMost(group.file[i].rows, group.memberRows[i]);
    return pieces;
}

std::vector<StreamPart> WeightStream::partsOf(const Group& group, int64_t piece, int64_t number) const {
    if (group.resident()) return group.uploads[static_cast<size_t>(piece)];
    if (group.isStack()) return expertParts(group, piece, number);
    if (_step) {
        const int64_t begin = piece * group.pieceRows,
                      rows = std::min(group.pieceRows, group.file[0].rows - group.cpuRows - begin);
        return partsOf(group.file, begin, rows, number);
    }
    int32_t member = 0;
    while (piece >= firstPiece(group, member + 1)) ++member;
    const auto i = static_cast<size_t>(member);
    const int64_t begin = (piece - firstPiece(group, member)) * group.memberRows[i];
    return partsOf({group.file[i]}, begin, std::min(group.memberRows[i], group.file[i].rows - begin), number);
}

std::vector<StreamPart> WeightStream::partsOf(const std::vector<Matrix>& files, int64_t begin, int64_t rows,
                                              int64_t number) const {
    const uint8_t* slot = _slotMemory.as<uint8_t>() + static_cast<size_t>(number % std::max(_slots, 1)) * _slotBytes;
    std::vector<StreamPart> parts;
    for (const Matrix& file : files) {
        const Matrix to{file.type, rows, file.cols, slot};
        const uint8_t* from =
            file.data ? file.data + rowBytes(file.type, file.cols) * static_cast<size_t>(begin) : nullptr;
        parts.push_back({to, 0, rows, from, begin});
        slot += Allocator::aligned(_layout.bytes(to));
    }
    return parts;
}

std::vector<StreamPart> WeightStream::expertParts(const Group& group, int64_t piece, int64_t number) const {
    const int64_t most = expertsOfPiece(group), begin = piece * most,
                  end = std::min(begin + most, static_cast<int64_t>(group.wanted.size()));
    std::vector<Matrix> experts;
    for (int64_t i = begin; i < end; ++i)
        experts.push_back(group.file[static_cast<size_t>(group.wanted[static_cast<size_t>(i)])]);
    return partsOf(experts, 0, experts[0].rows, number);
}

MatrixStack WeightStream::stackOf(const std::vector<Matrix>& experts) const {
    return {experts[0], slotBytesFor({experts[0]}, experts[0].rows), static_cast<int32_t>(experts.size())};
}

void WeightStream::requireKind(int32_t group, bool isStack) const {
    if (_groups[group].isStack() != isStack)
        throw Error(ErrorKind::Internal, "group " + std::to_string(group) + " is used as what it is not");
}

// To the next piece that there is, or to the end.
void WeightStream::settle(Cursor& cursor) const {
    const auto leaveOut = [&] { return cursor.group >= _leaveOut && cursor.group < _goOn; };
    while (cursor.group < _end && (leaveOut() || cursor.piece >= pieceCount(_groups[cursor.group]))) {
        cursor.group = leaveOut() ? _goOn : cursor.group + 1;
        cursor.piece = 0;
    }
}

void WeightStream::advance(Cursor& cursor) const {
    ++cursor.piece;
    ++cursor.number;
    settle(cursor);
}

void WeightStream::begin(Part part, bool step, bool withHead) {
    const int32_t end = withHead ? groups() : headBegin();
    if (part == Part::Model) start(step, 0, end, predictionBegin(), headBegin());
    else start(step, predictionBegin(), end, 0, 0);
}

void WeightStream::beginHead() { start(false, headBegin(), groups(), 0, 0); }

void WeightStream::start(bool step, int32_t first, int32_t end, int32_t leaveOut, int32_t goOn) {
    if (!_taken || !_transfers) throw Error(ErrorKind::Internal, "a pass before the weights were loaded");
    _step = step;
    _end = end;
    _leaveOut = leaveOut;
    _goOn = goOn;
    _fetch = _use = Cursor{first, 0, 0};
    settle(_fetch);
    settle(_use);
    _active = _use.group < _end;
    if (!_active) return;
    if (!_uploadsBegan) _uploadsBegan = std::chrono::steady_clock::now();
    _transfers->begin();
    for (int i = 0; i < _slots; ++i) fetchNext();
}

void WeightStream::end() {
    if (!_active) return;
    _active = false;
    settle(_use);
    if (_use.group < _end)
        throw Error(ErrorKind::Internal, "a pass left weights of group " + std::to_string(_use.group) + " unused");
    _transfers->end();
}

void WeightStream::fetchNext() {
    if (_fetch.group >= _end) return;
    _transfers->fetch(partsOf(_groups[_fetch.group], _fetch.piece, _fetch.number),
                      static_cast<int>(_fetch.number % _slots));
    advance(_fetch);
}

void WeightStream::arrive(int32_t group) {
    if (group < 0 || _groups[group].uploads.empty()) return;
    const auto pieces = static_cast<int64_t>(_groups[group].uploads.size());
    for (int64_t piece = 0; piece < pieces; ++piece) {
        acquire(group, piece);
        release();
    }
    _groups[group].uploads.clear();
}

const std::vector<Matrix>& WeightStream::acquire(int32_t group, int64_t piece) {
    settle(_use);
    const bool any = _active && _use.group < _end;
    if (!any || _use.group != group || _use.piece != piece) {
        throw Error(ErrorKind::Internal, "weights of group " + std::to_string(group) + " are used where " +
                                             (any ? "those of group " + std::to_string(_use.group) : "none") +
                                             " come next");
    }
    _transfers->await(static_cast<int>(_use.number % _slots));
    _parts.clear();
    for (const StreamPart& part : partsOf(_groups[group], piece, _use.number)) {
        _parts.push_back(part.to);
        _rowBegin = part.fileRow;
    }
    return _parts;
}

void WeightStream::release() {
    _transfers->release(static_cast<int>(_use.number % _slots));
    advance(_use);
    fetchNext();
}

}  // namespace sharpi
