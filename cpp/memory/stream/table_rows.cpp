// See table_rows.h.
#include "memory/stream/table_rows.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <system_error>
#include <thread>

#include "core/error.h"

namespace sharpi {

namespace {

// A thread that copies fewer rows takes longer to start than to copy them.
constexpr int64_t kRowsOfThread = 128, kMostThreads = 8;

void readSome(const Matrix& table, const int32_t* tokens, int64_t count, uint8_t* out) {
    static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const size_t bytes = rowBytes(table.type, table.cols);
    const auto rowOf = [&](int64_t i) { return table.data + bytes * static_cast<size_t>(tokens[i]); };
    // All rows are asked for before the first is waited for; and no more than these rows is read from the disk.
    for (int64_t i = 0; i < count; ++i) {
        const auto begin = reinterpret_cast<uintptr_t>(rowOf(i)), first = begin / page * page;
        ::madvise(reinterpret_cast<void*>(first), begin + bytes - first, MADV_WILLNEED);
    }
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + bytes * static_cast<size_t>(i), rowOf(i), bytes);
}

}  // namespace

void readRows(const Matrix& table, const int32_t* tokens, int64_t count, uint8_t* out) {
    const auto outside = std::find_if(tokens, tokens + count, [&](int32_t t) { return t < 0 || t >= table.rows; });
    if (outside != tokens + count)
        throw Error(ErrorKind::Internal,
                    "row " + std::to_string(*outside) + " of a table of " + std::to_string(table.rows) + " rows");
    const int64_t threads = std::clamp<int64_t>(count / kRowsOfThread, 1, kMostThreads);
    const int64_t part = (count + threads - 1) / threads;
    const size_t bytes = rowBytes(table.type, table.cols);
    const auto read = [&](int64_t first) {
        readSome(table, tokens + first, std::min(part, count - first), out + bytes * static_cast<size_t>(first));
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(threads));
    int64_t first = part;  // of what no other thread reads
    try {
        for (; first < count; first += part) others.emplace_back(read, first);
    } catch (const std::system_error&) {
        // The threads that could be started do their parts, and this one does the rest.
    }
    read(0);
    for (; first < count; first += part) read(first);
    for (std::thread& thread : others) thread.join();
}

TableRows::TableRows(const std::vector<Matrix>& tables, int64_t mostRows, int64_t stepRows,
                     const std::function<uint8_t*(size_t bytes)>& buffer) {
    for (const Matrix& file : tables) {
        const bool known = std::any_of(_tables.begin(), _tables.end(),
                                       [&](const Table& table) { return table.file.data == file.data; });
        if (known) continue;
        const int64_t rows = room(file, mostRows, stepRows);
        const size_t bytes = rowBytes(file.type, file.cols) * static_cast<size_t>(rows);
        _tables.push_back({file, rows, 0, buffer(bytes + kPadding)});
    }
}

void TableRows::begin(const std::vector<int32_t>& tokens) {
    if (_tables.empty()) return;
    _tokens = tokens;
    for (Table& table : _tables) stage(table, 0);
}

TableRows::Table& TableRows::at(const uint8_t* file) {
    const auto found =
        std::find_if(_tables.begin(), _tables.end(), [&](const Table& table) { return table.file.data == file; });
    if (found == _tables.end()) throw Error(ErrorKind::Internal, "rows are read of a table that was not listed");
    return *found;
}

void TableRows::stage(Table& table, int64_t first) {
    const auto rows = static_cast<int64_t>(_tokens.size());
    readRows(table.file, _tokens.data() + first, std::min(table.room, rows - first), table.buffer);
    table.first = first;
}

}  // namespace sharpi
