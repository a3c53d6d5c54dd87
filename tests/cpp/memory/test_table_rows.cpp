// Rows of tables in mapped files: the bytes are the file's, whatever the batch and however little a buffer holds.
#include "memory/stream/table_rows.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>

#include "core/error.h"
#include "memory/host_memory.h"
#include "seed.h"

namespace {

using namespace sharpi;

constexpr uint8_t kPoison = 0xa5;

// A table whose row r is r's bytes, again and again.
struct FileTable {
    FileTable(DType type, int64_t rows, int64_t cols) : bytes(rowBytes(type, cols) * static_cast<size_t>(rows)) {
        const size_t row = rowBytes(type, cols);
        for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = byteOf(static_cast<int64_t>(i / row), i % row);
        matrix = {type, rows, cols, bytes.data()};
    }
    static uint8_t byteOf(int64_t row, size_t at) {
        return static_cast<uint8_t>(static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u >> (8 * (at % 8)));
    }
    std::vector<uint8_t> bytes;
    Matrix matrix;
};

std::vector<int32_t> tokensBelow(int64_t rows, size_t count, std::mt19937& random) {
    std::vector<int32_t> tokens(count);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint64_t>(rows));
    return tokens;
}

struct Buffers {
    uint8_t* operator()(size_t bytes) {
        taken.push_back(std::make_unique<std::vector<uint8_t>>(bytes, kPoison));
        return taken.back()->data();
    }
    std::vector<std::unique_ptr<std::vector<uint8_t>>> taken;
};

TEST(TableRows, RowsAreTheFiles) {
    std::mt19937 random(sharpi::testSeed(31));
    for (const auto& [type, cols] :
         {std::pair{DType::Q6_K, 512}, {DType::Q8_0, 32}, {DType::F32, 3}, {DType::BF16, 5}}) {
        const FileTable table(type, 700, cols);
        const size_t row = rowBytes(type, cols);
        for (const size_t count : {0, 1, 2, 127, 128, 256, 259, 1500}) {
            const std::vector<int32_t> tokens = tokensBelow(700, count, random);
            std::vector<uint8_t> out(count * row + 1, kPoison);
            readRows(table.matrix, tokens.data(), static_cast<int64_t>(count), out.data());
            for (size_t i = 0; i < count; ++i) {
                const size_t from = static_cast<size_t>(tokens[i]) * row;
                ASSERT_EQ(std::memcmp(out.data() + i * row, table.bytes.data() + from, row), 0) << i << " of " << count;
            }
            ASSERT_EQ(out.back(), kPoison);
        }
    }
    const FileTable table(DType::Q8_0, 700, 32);
    std::vector<uint8_t> out(4 * rowBytes(DType::Q8_0, 32));
    for (const int32_t outside : {-1, 700}) {
        const int32_t tokens[] = {5, outside, 7};
        EXPECT_THROW(readRows(table.matrix, tokens, 3, out.data()), Error);
    }
}

// A pass is given each of its rows once, and waits before a buffer that the device may still read is written.
TEST(TableRows, LargePassesGoPartByPart) {
    std::mt19937 random(sharpi::testSeed(32));
    constexpr int64_t kCols = 1 << 16, kMostRows = 900;
    const FileTable large(DType::F32, 40, kCols), small(DType::Q8_0, 40, 32);
    const auto held = static_cast<int64_t>(TableRows::kStagingBytes / rowBytes(DType::F32, kCols));
    ASSERT_LT(held, kMostRows);
    EXPECT_EQ(TableRows::room(large.matrix, kMostRows, 64), held);
    EXPECT_EQ(TableRows::room(large.matrix, kMostRows, held + 7), held + 7) << "a step is not cut";
    EXPECT_EQ(TableRows::room(small.matrix, kMostRows, 64), kMostRows);

    Buffers buffers;
    TableRows tables({large.matrix, small.matrix, large.matrix}, kMostRows, 64, std::ref(buffers));
    ASSERT_EQ(buffers.taken.size(), 2u) << "a table that is named twice has one buffer";
    EXPECT_LE(buffers.taken[0]->size(), TableRows::kStagingBytes + TableRows::kPadding);
    for (const size_t count : {1, 64, 300, 900, 3}) {
        SCOPED_TRACE(count);
        const std::vector<int32_t> tokens = tokensBelow(40, count, random);
        tables.begin(tokens);
        for (const FileTable* table : {&large, &small, &large}) {
            const size_t row = rowBytes(table->matrix.type, table->matrix.cols);
            int64_t next = 0, waits = 0;
            const auto check = [&](const Matrix& rows, int64_t first) {
                ASSERT_EQ(first, next);
                for (int64_t i = 0; i < rows.rows; ++i) {
                    const auto token = static_cast<size_t>(tokens[static_cast<size_t>(first + i)]);
                    ASSERT_EQ(
                        std::memcmp(rows.data + row * static_cast<size_t>(i), table->bytes.data() + token * row, row),
                        0);
                }
                next = first + rows.rows;
            };
            tables.forParts(table->matrix.data, [&] { ++waits; }, check);
            EXPECT_EQ(next, static_cast<int64_t>(count));
            const bool parts = table == &large && static_cast<int64_t>(count) > held;
            if (parts) EXPECT_GE(waits, (next - 1) / held);
            else EXPECT_EQ(waits, 0) << "all rows were staged before the pass";
        }
    }
    EXPECT_THROW(tables.forParts(nullptr, [] {}, [](const Matrix&, int64_t) {}), Error);
}

TEST(TableRows, NothingIsDoneWithoutTables) {
    Buffers buffers;
    TableRows tables({}, 16, 16, std::ref(buffers));
    tables.begin({1, 2, 3});
    EXPECT_TRUE(buffers.taken.empty());
}

}  // namespace
