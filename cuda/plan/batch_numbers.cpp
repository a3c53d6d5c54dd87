// See batch_numbers.h.
#include "plan/batch_numbers.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace sharpi {

static_assert(cuda::kQueryTile == kPromptTile && cuda::kDeltaChunk == kPromptTile,
              "tiles begin at multiples of kPromptTile");

BatchNumbers::List BatchNumbers::take(int64_t room) {
    const List list{_count, room};
    _count += room;
    return list;
}

// A sequence's fast rows are cut at multiples of kPromptTile positions: into whole tiles, and a shorter one at either
// end. Those of a recurrent layer begin at a multiple.
BatchNumbers::BatchNumbers(const Room& room) : _room(room) {
    const int64_t rows = room.rows, wholeTiles = rows / kPromptTile;
    const int64_t queryTiles = room.fastSequences ? std::min(rows, wholeTiles + 2 * room.fastSequences) : 0;
    const int64_t stateTiles =
        room.fastSequences && room.recurrent ? std::min(rows, wholeTiles + room.fastSequences) : 0;
    _tokens = take(rows);
    _positions = take(rows);
    _sequence = take(rows);
    _logitRows = take(rows);
    _sources = take(room.drafts ? rows : 0);
    _joined = take(room.drafts ? 2 * rows : 0);
    _stateFrom = take(room.recurrent ? rows : 0);
    _stateTo = take(room.recurrent ? rows : 0);
    const int64_t exactSequences = !room.recurrent ? 0 : room.captured ? rows : room.sequences;
    _exactBegin = take(exactSequences);
    _exactEnd = take(exactSequences);
    _fastBegin = take(room.recurrent ? room.fastSequences : 0);
    _fastEnd = take(room.recurrent ? room.fastSequences : 0);
    _queryBegin = take(queryTiles);
    _queryEnd = take(queryTiles);
    const int64_t exactTiles = room.exactPrompts ? rows / cuda::kManyRowsTile + rows / cuda::kManyRows : 0;
    _manyBegin = take(exactTiles);
    _manyEnd = take(exactTiles);
    _tileBegin = take(stateTiles);
    _tileEnd = take(stateTiles);
    _tables = take(room.sequences * room.lists * room.pages);
}

// Upper bounds become powers of two, and `all` the nearest power of two or one and a half of one.
static cuda::BatchDepth rounded(const cuda::BatchDepth& exact) {
    constexpr int64_t kShort = 128;  // pages of all texts together
    if (exact.all <= kShort) return {};
    cuda::BatchDepth depth{16, kShort, 1};
    while (depth.deepest < exact.deepest) depth.deepest *= 2;
    while (depth.rowsOfText < exact.rowsOfText) depth.rowsOfText *= 2;
    while (exact.all * 4 >= depth.all * 7) depth.all *= 2;
    if (exact.all * 4 >= depth.all * 5) depth.all = depth.all / 2 * 3;
    return depth;
}

// One call of fill().
class BatchNumbers::Writer {
public:
    Writer(const BatchNumbers& layout, const Batch& batch, const KvCache& kv, int64_t exactRows, int32_t* host)
        : _layout(layout), _batch(batch), _kv(kv), _exactRows(exactRows), _host(host) {}

    void write() {
        const Room& room = _layout._room;
        require(_batch.size() <= room.rows, "rows", room.rows);
        require(_kv.lists() <= room.lists, "lists of pages", room.lists);
        std::copy(_batch.tokens.begin(), _batch.tokens.end(), to(_layout._tokens));
        std::copy(_batch.positions.begin(), _batch.positions.end(), to(_layout._positions));
        std::copy(_batch.logitRows.begin(), _batch.logitRows.end(), to(_layout._logitRows));
        if (room.drafts) writeSources();
        _batch.forSequences([&](int64_t begin, int64_t end) {
            if (begin < _exactRows && end > _exactRows)
                throw Error(ErrorKind::Internal, "a sequence's rows in a batch are of two kinds");
            writeTable(begin, end);
            if (begin >= _exactRows) writeTiles(begin, end, _layout._queryBegin, _layout._queryEnd, _queryTiles);
            else if (room.exactPrompts) divideExactRows(begin, end);
            if (room.recurrent) writeStates(begin, end);
        });
        if (room.recurrent && room.captured) padSequences();
    }

    // A captured step has a range of rows for each sequence that it may have. Those of missing sequences are empty.
    void padSequences() {
        for (; _exactSequences < _exactRows; ++_exactSequences)
            to(_layout._exactBegin)[_exactSequences] = to(_layout._exactEnd)[_exactSequences] = 0;
    }

    int64_t used() const { return _used; }
    int64_t exactSequences() const { return _exactSequences; }
    int64_t mostExact() const { return _mostExact; }
    int64_t mostFast() const { return _mostFast; }
    int64_t fastSequences() const { return _fastSequences; }
    cuda::BatchDepth depth() const { return rounded({_deepest, _allPages, _mostExact}); }
    int64_t queryTiles() const { return _queryTiles; }
    int64_t exactTiles() const { return _exactTiles; }
    int64_t tiledRows() const { return _tiledRows; }
    std::vector<std::pair<int64_t, int64_t>>& untiledRows() { return _untiledRows; }
    int64_t stateTiles() const { return _stateTiles; }

private:
    static size_t at(int64_t row) { return static_cast<size_t>(row); }
    int32_t* to(const List& list) const { return _host + list.at; }
    static int32_t number(int64_t n) { return static_cast<int32_t>(n); }
    static void require(bool fits, const char* what, int64_t most) {
        if (!fits) throw Error(ErrorKind::Internal, "a batch of more than " + std::to_string(most) + " " + what);
    }
    // The first row after `row` whose position is a multiple of kPromptTile, or `end`.
    int64_t tileEnd(int64_t row, int64_t end) const {
        return std::min(end, row + kPromptTile - _batch.positions[at(row)] % kPromptTile);
    }

    void writeTable(int64_t begin, int64_t end) {
        const Room& room = _layout._room;
        require(_sequences < room.sequences, "sequences", room.sequences);
        const int64_t pages = _batch.positions[at(end - 1)] / KvCache::kPageTokens + 1;
        require(pages <= room.pages, "pages for a sequence", room.pages);
        for (int32_t list = 0; list < _kv.lists(); ++list) {
            int32_t* const table = to(_layout._tables) + (_sequences * room.lists + list) * room.pages;
            std::copy_n(_kv.pageTable(_batch.sequences[at(begin)], list), pages, table);
            _used = table + pages - _host;
        }
        std::fill(to(_layout._sequence) + begin, to(_layout._sequence) + end, number(_sequences));
        ++_sequences;
        if (begin < _exactRows) {
            ++_exactSequences, _mostExact = std::max(_mostExact, end - begin);
            _deepest = std::max(_deepest, pages), _allPages += pages;
        } else {
            require(++_fastSequences <= room.fastSequences, "prompts", room.fastSequences);
            _mostFast = std::max(_mostFast, end - begin);
        }
    }

    // Appends the tiles of fast rows [begin, end) to a list that has `count`.
    void writeTiles(int64_t begin, int64_t end, const List& begins, const List& ends, int64_t& count) {
        for (int64_t row = begin; row < end; row = tileEnd(row, end)) {
            to(begins)[count] = number(row - _exactRows);
            to(ends)[count++] = number(tileEnd(row, end) - _exactRows);
        }
    }

    void divideExactRows(int64_t begin, int64_t end) {
        if (end - begin < cuda::kManyRows) {
            if (_untiledRows.empty() || _untiledRows.back().second != begin) _untiledRows.emplace_back(begin, begin);
            _untiledRows.back().second = end;
            return;
        }
        _tiledRows += end - begin;
        const int64_t tiles = (end - begin + cuda::kManyRowsTile - 1) / cuda::kManyRowsTile;
        require(_exactTiles + tiles <= _layout._manyBegin.room, "tiles of exact rows", _layout._manyBegin.room);
        for (int64_t row = begin; row < end; row += cuda::kManyRowsTile) {
            to(_layout._manyBegin)[_exactTiles] = number(row);
            to(_layout._manyEnd)[_exactTiles++] = number(std::min(end, row + cuda::kManyRowsTile));
        }
    }

    // Which entries hold the states that rows start from and end in.
    void writeStates(int64_t begin, int64_t end) {
        const bool exact = begin < _exactRows;
        const int64_t index = (exact ? _exactSequences : _fastSequences) - 1, first = exact ? 0 : _exactRows;
        to(exact ? _layout._exactBegin : _layout._fastBegin)[index] = number(begin - first);
        to(exact ? _layout._exactEnd : _layout._fastEnd)[index] = number(end - first);
        std::fill(to(_layout._stateFrom) + begin, to(_layout._stateFrom) + end, cuda::kStateIsOfRowBefore);
        std::fill(to(_layout._stateTo) + begin, to(_layout._stateTo) + end, -1);
        if (!_batch.sources.empty()) return;  // a draft's rows go through no recurrent layer
        for (const StateStep& step : _kv.states().steps(_batch.sequences[at(begin)])) {
            if (step.begin == 0) to(_layout._stateFrom)[begin] = step.from < 0 ? cuda::kStateIsZero : step.from;
            to(_layout._stateTo)[begin + step.end - 1] = step.to;
            if (!exact) writeStateTiles(begin + step.begin, begin + step.end);
        }
    }

    void writeStateTiles(int64_t begin, int64_t end) {
        if (_batch.positions[at(begin)] % kPromptTile != 0) {
            throw Error(ErrorKind::Internal, "prompt rows of a recurrent layer begin at position " +
                                                 std::to_string(_batch.positions[at(begin)]) +
                                                 ", which is no multiple of " + std::to_string(kPromptTile));
        }
        writeTiles(begin, end, _layout._tileBegin, _layout._tileEnd, _stateTiles);
    }

    void writeSources() {
        std::copy(_batch.sources.begin(), _batch.sources.end(), to(_layout._sources));
        for (int64_t t = 0; t < _batch.size(); ++t) {
            to(_layout._joined)[2 * t] = number(t);
            to(_layout._joined)[2 * t + 1] = number(_batch.size() + t);
        }
    }

    const BatchNumbers& _layout;
    const Batch& _batch;
    const KvCache& _kv;
    const int64_t _exactRows;
    int32_t* const _host;
    int64_t _used = 0, _sequences = 0, _mostExact = 0, _mostFast = 0, _exactSequences = 0, _fastSequences = 0,
            _queryTiles = 0, _exactTiles = 0, _tiledRows = 0, _stateTiles = 0, _deepest = 0, _allPages = 0;
    std::vector<std::pair<int64_t, int64_t>> _untiledRows;
};

BatchNumbers::Filled BatchNumbers::fill(const Batch& batch, const KvCache& kv, int64_t exactRows, int32_t* host,
                                        const int32_t* device) const {
    Writer writer(*this, batch, kv, exactRows, host);
    writer.write();
    const auto from = [device](const List& list, int64_t first = 0) {
        return list.room ? device + list.at + first : nullptr;
    };
    Filled filled;
    filled.used = writer.used();
    BatchView& view = filled.view;
    view.rows = batch.size();
    view.exactRows = exactRows;
    view.mostExact = writer.mostExact();
    view.mostFast = writer.mostFast();
    view.tokens = from(_tokens);
    view.logitRows = from(_logitRows);
    view.sources = from(_sources);
    view.joined = from(_joined);
    const int64_t table = _room.lists * _room.pages;
    view.exact = {exactRows, from(_positions), from(_sequence), from(_tables), table, _room.pages, writer.depth()};
    view.fast = {view.fastRows(), from(_positions, exactRows), from(_sequence, exactRows), from(_tables), table,
                 _room.pages};
    view.exactStates = {
        exactRows, from(_stateFrom), from(_stateTo), {from(_exactBegin), from(_exactEnd), writer.exactSequences()}};
    view.fastStates = {view.fastRows(),
                       from(_stateFrom, exactRows),
                       from(_stateTo, exactRows),
                       {from(_fastBegin), from(_fastEnd), writer.fastSequences()}};
    view.queryTiles = {from(_queryBegin), from(_queryEnd), writer.queryTiles()};
    view.exactTiles = {from(_manyBegin), from(_manyEnd), writer.exactTiles()};
    view.tiledRows = writer.tiledRows();
    if (view.tiledRows > 0) view.untiledRows = std::move(writer.untiledRows());
    view.stateTiles = {from(_tileBegin), from(_tileEnd), writer.stateTiles()};
    return filled;
}

}  // namespace sharpi
