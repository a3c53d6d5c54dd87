// The numbers of a batch that kernels read: tokens, positions, page tables, tiles, states. They lie in one block of
// int32, which the host fills and uploads before a pass. The block is laid out from the most that a batch may hold, so
// a captured step finds each of them at the same address every time. No CUDA here.
#pragma once

#include <utility>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/delta/gated_delta.h"
#include "memory/kv_cache.h"
#include "operations/batch.h"

namespace sharpi {

// Where kernels find a batch's numbers, in device memory. Rows [0, exactRows) follow core/contract.h; the others go
// through tensor cores. What belongs to one of the two ranges counts its rows from the range's first.
struct BatchView {
    int64_t rows = 0, exactRows = 0;
    const int32_t *tokens = nullptr, *logitRows = nullptr;
    const int32_t* sources = nullptr;  // [rows]: Batch::sources
    // [2 * rows]: rows t and rows + t, in turn: a draft's two inputs are joined in this order.
    const int32_t* joined = nullptr;
    cuda::BatchRows exact, fast;          // with the page tables of list 0
    int64_t mostExact = 0, mostFast = 0;  // the most exact and the most fast rows of one sequence
    cuda::DeltaBatch exactStates, fastStates;
    cuda::QueryTiles queryTiles;  // of the fast rows, for attention
    cuda::RowRanges stateTiles;   // of the fast rows, for recurrent layers
    cuda::QueryTiles exactTiles;  // for attention, of the sequences that have many exact rows
    int64_t tiledRows = 0;        // all rows of these tiles
    // The ranges [begin, end) of the other exact rows. Empty if there are no tiles.
    std::vector<std::pair<int64_t, int64_t>> untiledRows;
    int64_t fastRows() const { return rows - exactRows; }
    // With the page tables that a layer with these pages has.
    cuda::BatchRows exactOf(const KvPages& pages) const { return withTables(exact, pages); }
    cuda::BatchRows fastOf(const KvPages& pages) const { return withTables(fast, pages); }
    // Rows of both kinds.
    cuda::BatchRows allOf(const KvPages& pages) const {
        cuda::BatchRows all = withTables(exact, pages);
        all.rows = rows;
        return all;
    }
    const int32_t* tablesOf(const KvPages& pages) const { return exact.pageTables + pages.list * exact.listPages; }

private:
    cuda::BatchRows withTables(cuda::BatchRows part, const KvPages& pages) const {
        part.pageTables += pages.list * part.listPages;
        return part;
    }
};

class BatchNumbers {
public:
    struct Room {
        int64_t rows = 0, sequences = 0;
        int64_t fastSequences = 0;  // sequences that have fast rows; 0: no batch has fast rows
        bool exactPrompts = false;  // sequences may have many exact rows
        int64_t pages = 0;          // of a sequence
        int32_t lists = 1;          // of its pages: see KvPages::list
        bool recurrent = false, drafts = false;
        bool captured = false;  // batches of n rows are replayed from one capture, of up to n sequences
    };
    explicit BatchNumbers(const Room& room);
    const Room& room() const { return _room; }
    int64_t count() const { return _count; }  // int32 in the block
    int64_t stateTiles() const { return _tileBegin.room; }

    struct Filled {
        BatchView view;
        int64_t used = 0;  // host[0, used) must be uploaded
    };
    // Writes the numbers of a batch whose rows [0, exactRows) are exact to host[0, used). device: the block that they
    // will be uploaded to. Throws Error(Internal) for a batch that there is no room for, and for fast rows of a
    // recurrent sequence that do not begin at a tile or keep a state within one.
    Filled fill(const Batch& batch, const KvCache& kv, int64_t exactRows, int32_t* host, const int32_t* device) const;

private:
    struct List {
        int64_t at = 0, room = 0;
    };
    class Writer;
    List take(int64_t room);

    Room _room;
    int64_t _count = 0;
    List _tokens, _positions, _sequence, _logitRows, _sources, _joined;
    List _stateFrom, _stateTo, _exactBegin, _exactEnd, _fastBegin, _fastEnd;
    List _queryBegin, _queryEnd, _manyBegin, _manyEnd, _tileBegin, _tileEnd;
    List _tables;
};

}  // namespace sharpi
