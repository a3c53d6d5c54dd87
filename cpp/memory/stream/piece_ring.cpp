// See piece_ring.h.
#include "memory/stream/piece_ring.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace sharpi {

void PieceRing::take(Allocator& allocator, size_t bytes, int buffers) {
    _buffers = std::max(buffers, 1);
    _bufferBytes = bytes;
    if (bytes > 0) _memory = Buffer(allocator, bytes * static_cast<size_t>(_buffers), "buffers for streamed weights");
}

// Moves a cursor that is behind the last piece of its group to the next piece, or to the end.
void PieceRing::settle(Cursor& cursor) const {
    const GroupRange& range = _pass->groups;
    const auto inGap = [&] { return cursor.group >= range.gapBegin && cursor.group < range.gapEnd; };
    while (cursor.group < range.end &&
           (inGap() || cursor.piece >= _groups[static_cast<size_t>(cursor.group)].pieces(_pass->kind))) {
        cursor.group = inGap() ? range.gapEnd : cursor.group + 1;
        cursor.piece = 0;
    }
}

void PieceRing::advance(Cursor& cursor) const {
    ++cursor.piece;
    ++cursor.number;
    settle(cursor);
}

bool PieceRing::begin(PassKind kind, const GroupRange& groups) {
    const Cursor first{groups.begin, 0, 0};
    _pass = Pass{kind, groups, false, first, first, first};
    settle(_pass->fetch);
    _pass->expect = _pass->use = _pass->fetch;
    _pass->fetches = _pass->use.group < groups.end;
    if (!_pass->fetches) return false;
    _transfers->begin();
    for (int i = 0; i < _buffers; ++i) fetchNext();
    return true;
}

void PieceRing::end() {
    if (!_pass) return;
    settle(_pass->use);
    const Pass pass = *_pass;
    _pass.reset();
    if (pass.use.group < pass.groups.end)
        throw Error(ErrorKind::Internal,
                    "a pass ends before the weights of group " + std::to_string(pass.use.group) + " are used");
    if (pass.fetches) _transfers->end();
}

PassKind PieceRing::kind() const {
    if (!_pass) throw Error(ErrorKind::Internal, "streamed weights are used outside a pass");
    return _pass->kind;
}

const uint8_t* PieceRing::addressOf(const Cursor& cursor) const {
    return _memory.as<uint8_t>() + static_cast<size_t>(bufferOf(cursor)) * _bufferBytes;
}

void PieceRing::expectAhead() {
    const int ahead = _pass->kind == PassKind::Full ? _transfers->looksAhead() : 0;
    Cursor& next = _pass->expect;
    while (ahead > 0 && next.group < _pass->groups.end && next.number <= _pass->fetch.number + ahead) {
        const WeightGroup& group = _groups[static_cast<size_t>(next.group)];
        _transfers->expect(group.parts(_pass->kind, next.piece, addressOf(next)));
        advance(next);
    }
}

void PieceRing::fetchNext() {
    expectAhead();
    const Cursor& next = _pass->fetch;
    if (next.group >= _pass->groups.end) return;
    const WeightGroup& group = _groups[static_cast<size_t>(next.group)];
    _transfers->fetch(group.parts(_pass->kind, next.piece, addressOf(next)), bufferOf(next));
    advance(_pass->fetch);
}

PieceRing::Piece PieceRing::acquire(int32_t group, int64_t piece) {
    const PassKind pass = kind();
    Cursor& use = _pass->use;
    settle(use);
    const bool any = use.group < _pass->groups.end;
    if (!any || use.group != group || use.piece != piece) {
        throw Error(ErrorKind::Internal,
                    "weights of group " + std::to_string(group) + " are used, but " +
                        (any ? "those of group " + std::to_string(use.group) + " come next" : "none are left"));
    }
    _transfers->await(bufferOf(use));
    Piece acquired;
    for (const StreamPart& part : _groups[static_cast<size_t>(group)].parts(pass, piece, addressOf(use))) {
        acquired.parts.push_back(part.to);
        acquired.rowBegin = part.fileRow;
    }
    return acquired;
}

void PieceRing::release() {
    _transfers->release(bufferOf(_pass->use));
    advance(_pass->use);
    fetchNext();
}

}  // namespace sharpi
