// Walks through the groups of a pass: fetches their pieces ahead into a ring of buffers, and hands each out when its
// turn comes. While one piece is used, as many of the next are on their way as there are buffers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "memory/allocator.h"
#include "memory/stream/transfers.h"
#include "memory/stream/weight_group.h"

namespace sharpi {

// Groups [begin, end), without [gapBegin, gapEnd).
struct GroupRange {
    int32_t begin = 0, end = 0;
    int32_t gapBegin = 0, gapEnd = 0;
};

class PieceRing {
public:
    // A piece in use: the same rows of each matrix, or whole experts.
    struct Piece {
        std::vector<Matrix> parts;
        int64_t rowBegin = 0;  // the first row's number in the matrices in the file
    };

    // transfers: nullptr when only planning. Both must outlive this.
    PieceRing(const std::vector<WeightGroup>& groups, Transfers* transfers) : _groups(groups), _transfers(transfers) {}

    // The ring: `buffers` of `bytes` bytes each. If bytes is 0, every piece has a place of its own.
    void take(Allocator& allocator, size_t bytes, int buffers);

    // Begins a pass; one that was left half way is given up. Returns whether there is anything to fetch.
    bool begin(PassKind kind, const GroupRange& groups);
    // Throws Error(Internal) if pieces of the pass were not used. Does nothing outside a pass.
    void end();
    // Gives up the pass, if there is one.
    void drop() { _pass.reset(); }
    // The kind of the pass. Throws Error(Internal) outside a pass.
    PassKind kind() const;

    // What is computed from here on finds the piece. Throws Error(Internal) unless it is the next of the pass.
    Piece acquire(int32_t group, int64_t piece);
    // What was computed up to here was the last to read the piece that was acquired last.
    void release();

private:
    // The next piece to announce, to fetch, or to use.
    struct Cursor {
        int32_t group = 0;
        int64_t piece = 0;
        int64_t number = 0;  // of pieces before it in the pass
    };
    struct Pass {
        PassKind kind = PassKind::Full;
        GroupRange groups;
        bool fetches = false;  // Transfers::begin() was called
        Cursor expect, fetch, use;
    };
    void settle(Cursor& cursor) const;
    void advance(Cursor& cursor) const;
    void expectAhead();
    void fetchNext();
    int bufferOf(const Cursor& cursor) const { return static_cast<int>(cursor.number % _buffers); }
    const uint8_t* addressOf(const Cursor& cursor) const;

    const std::vector<WeightGroup>& _groups;
    Transfers* const _transfers;
    int _buffers = 1;
    size_t _bufferBytes = 0;
    Buffer _memory;
    std::optional<Pass> _pass;
};

}  // namespace sharpi
