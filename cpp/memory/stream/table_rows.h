// Tables of which a pass reads single rows: a token's row of an embedding. They stay in the mapped file. Before a pass
// the host reads its tokens' rows into staging buffers, where the device finds them. So a table of any size takes
// neither the device's memory nor pinned memory, and the system may drop its pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/matrix.h"

namespace sharpi {

// Copies rows tokens[0], tokens[1], ... of a table in a mapped file to `out`. Pages that are not in memory are read
// from the disk, several at a time.
void readRows(const Matrix& table, const int32_t* tokens, int64_t count, uint8_t* out);

class TableRows {
public:
    // The most bytes of a staging buffer, unless the rows of one step need more.
    static constexpr size_t kStagingBytes = size_t{32} << 20;
    // Bytes after a buffer's last row that the device may read.
    static constexpr size_t kPadding = 16;

    // Rows of a table that its staging buffer holds.
    static int64_t room(const Matrix& table, int64_t mostRows, int64_t stepRows) {
        const auto held = static_cast<int64_t>(kStagingBytes / std::max<size_t>(1, rowBytes(table.type, table.cols)));
        return std::min(mostRows, std::max(held, stepRows));
    }

    // tables: in mapped files; one may be named twice. mostRows: of a pass. stepRows: the first rows of a pass that are
    // staged before it begins, at least; what is replayed reads no others. buffer(bytes): memory that the device reads
    // and that outlives this object.
    TableRows(const std::vector<Matrix>& tables, int64_t mostRows, int64_t stepRows,
              const std::function<uint8_t*(size_t bytes)>& buffer);

    // Stages the first rows for a pass over these tokens. The device is done with the last pass's.
    void begin(const std::vector<int32_t>& tokens);
    // Calls body(rows, first) for each part of the pass's rows that a buffer holds: row i of `rows` is the row of the
    // pass's token first + i. finished(): waits until the device is done with the part before.
    template <typename Finished, typename Body>
    void forParts(const uint8_t* file, const Finished& finished, const Body& body) {
        Table& table = at(file);
        const auto rows = static_cast<int64_t>(_tokens.size());
        for (int64_t first = 0; first < rows; first += table.room) {
            if (first != table.first) {
                finished();
                stage(table, first);
            }
            body(Matrix{table.file.type, std::min(table.room, rows - first), table.file.cols, table.buffer}, first);
        }
    }

private:
    struct Table {
        Matrix file;
        int64_t room = 0;   // rows
        int64_t first = 0;  // the pass's row that the buffer begins with
        uint8_t* buffer = nullptr;
    };
    Table& at(const uint8_t* file);
    void stage(Table& table, int64_t first);

    std::vector<Table> _tables;
    std::vector<int32_t> _tokens;  // of the pass at hand
};

}  // namespace sharpi
