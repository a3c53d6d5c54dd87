// See weight_stream.h.
#include "memory/stream/weight_stream.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

int32_t WeightStream::addResident(const std::vector<Matrix>& to, const std::vector<Matrix>& file) {
    _groups.push_back(WeightGroup::resident(to, file));
    return static_cast<int32_t>(_groups.size()) - 1;
}

int32_t WeightStream::addStreamed(const std::vector<Matrix>& file, int64_t cpuRows) {
    _groups.push_back(WeightGroup::streamed(_layout, file, cpuRows));
    _streams = true;
    _sharesRows |= cpuRows > 0;
    return static_cast<int32_t>(_groups.size()) - 1;
}

int32_t WeightStream::addStreamedStack(const MatrixStack& file) {
    _groups.push_back(WeightGroup::stack(_layout, file));
    _streams = true;
    return static_cast<int32_t>(_groups.size()) - 1;
}

void WeightStream::take() {
    if (_taken)
        throw Error(ErrorKind::Internal, "the weight stream's buffers cannot grow: captured steps may read them");
    _taken = true;
    if (_headBegin < 0) startHead();
    if (_predictionBegin < 0) _predictionBegin = _headBegin;
    HostRanges ranges;
    size_t pieceBytes = 0, stageBytes = 0;
    int64_t pieces = 0;
    for (const WeightGroup& group : _groups) {
        const bool resident = group.kind() == WeightGroup::Kind::Resident;
        std::vector<HostRange>& readAs = resident                                   ? ranges.once
                                         : group.kind() == WeightGroup::Kind::Stack ? ranges.optional
                                                                                    : ranges.always;
        for (const Matrix& file : group.file()) {
            if (file.data) readAs.push_back({file.data, fileBytes(file)});
        }
        pieceBytes = std::max(pieceBytes, group.pieceBytes());
        stageBytes = std::max(stageBytes, group.stageBytes());
        if (!resident) pieces += group.pieces(PassKind::Full);
    }
    const int64_t buffers = _streams ? std::min<int64_t>(Transfers::kMostBuffers, pieces) : Transfers::kMostBuffers;
    _ring.take(_allocator, pieceBytes, static_cast<int>(buffers));
    if (_layout.stages)
        _staging = Buffer(_allocator, stageBytes * static_cast<size_t>(_layout.stages), "staging for weights");
    if (_transfers) _transfers->prepare(ranges, _staging.as<void>(), stageBytes);
}

void WeightStream::setWanted(int32_t group, std::vector<int32_t> experts, std::vector<StreamOrigin> origins) {
    groupOf(group, WeightGroup::Kind::Stack);
    if (!_taken) throw Error(ErrorKind::Internal, "experts are chosen before the weight stream's buffers are taken");
    _groups[static_cast<size_t>(group)].setWanted(std::move(experts), std::move(origins));
    _ring.drop();
}

void WeightStream::uploadAll() {
    const auto upload = [this](const GroupRange& range) {
        start(PassKind::Full, range);
        for (int32_t i = range.begin; i < range.end; ++i) arrive(i);
        end();
    };
    if (_streams) {
        for (int32_t i = _predictionBegin; _transfers && i < _headBegin; ++i) {
            if (_groups[static_cast<size_t>(i)].kind() == WeightGroup::Kind::Resident) upload({i, i + 1, 0, 0});
        }
        return;
    }
    if (_transfers) {
        upload({0, static_cast<int32_t>(_groups.size()), 0, 0});
        finishUploads();
    }
    _staging = Buffer();
}

void WeightStream::finishUploads() {
    if (_finished) return;
    for (const WeightGroup& group : _groups) {
        if (!group.uploaded()) return;
    }
    _finished = true;
    if (!_transfers) return;
    _transfers->finishOnce();
    const auto now = std::chrono::steady_clock::now();
    if (_onUploaded) _onUploaded(std::chrono::duration<double>(now - _uploadsBegan.value_or(now)).count());
}

const WeightGroup& WeightStream::groupOf(int32_t group, WeightGroup::Kind kind) const {
    const WeightGroup& found = _groups[static_cast<size_t>(group)];
    if (found.kind() != kind)
        throw Error(ErrorKind::Internal, "group " + std::to_string(group) + " is " +
                                             (kind == WeightGroup::Kind::Stack ? "no streamed stack of experts"
                                                                               : "no group of streamed matrices"));
    return found;
}

void WeightStream::begin(Part part, bool step, bool withHead) {
    const PassKind kind = step ? PassKind::Step : PassKind::Full;
    const int32_t end = withHead ? static_cast<int32_t>(_groups.size()) : _headBegin;
    if (part == Part::Model) start(kind, {0, end, _predictionBegin, _headBegin});
    else start(kind, {_predictionBegin, end, 0, 0});
}

void WeightStream::beginHead() { start(PassKind::Full, {_headBegin, static_cast<int32_t>(_groups.size()), 0, 0}); }

void WeightStream::start(PassKind kind, const GroupRange& range) {
    if (!_taken || !_transfers) throw Error(ErrorKind::Internal, "a pass begins before the weights are loaded");
    const auto now = std::chrono::steady_clock::now();
    if (_ring.begin(kind, range) && !_uploadsBegan) _uploadsBegan = now;
}

void WeightStream::arrive(int32_t group) {
    if (group < 0 || _groups[static_cast<size_t>(group)].uploaded()) return;
    WeightGroup& weights = _groups[static_cast<size_t>(group)];
    for (int64_t piece = 0, count = weights.pieces(PassKind::Full); piece < count; ++piece) {
        _ring.acquire(group, piece);
        _ring.release();
    }
    weights.setUploaded();
}

}  // namespace sharpi
