// How passes cut a group of weights: every row that a pass uses is in exactly one piece, whatever kind of pass, and the
// ring refuses what is not its next piece.
#include "memory/stream/weight_group.h"

#include "memory/stream/copying_transfers.h"
#include "memory/stream/piece_ring.h"
#include "weight_world.h"

namespace {

using namespace streamed;

constexpr int64_t kCols = 4096;
const size_t kRowBytes = rowBytes(DType::Q8_0, kCols);

DeviceLayout fileLayout() {
    DeviceLayout layout;
    layout.bytes = [](const Matrix& m) { return fileBytes(m); };
    return layout;
}

// Addresses that are compared, and never read.
const uint8_t* address(size_t at) { return reinterpret_cast<const uint8_t*>(at); }
Matrix matrix(int64_t rows, size_t at) { return {DType::Q8_0, rows, kCols, address(at)}; }

TEST(WeightGroup, AStepsPieceIsTheSameRowsOfAllMatricesAndAFullPassesIsRowsOfOne) {
    const std::vector<Matrix> file = {matrix(5000, size_t{1} << 40), matrix(5000, size_t{2} << 40)};
    const WeightGroup group = WeightGroup::streamed(fileLayout(), file, 1032);
    int64_t next = 0;
    for (int64_t piece = 0; piece < group.pieces(PassKind::Step); ++piece) {
        const std::vector<StreamPart> parts = group.parts(PassKind::Step, piece, address(256));
        ASSERT_EQ(parts.size(), 2u);
        for (size_t i = 0; i < 2; ++i) {
            EXPECT_EQ(parts[i].fileRow, next);
            EXPECT_EQ(parts[i].rows, parts[0].rows);
            EXPECT_EQ(parts[i].file, file[i].data + static_cast<size_t>(next) * kRowBytes);
        }
        next += parts[0].rows;
    }
    EXPECT_EQ(next, 5000 - 1032) << "the CPU computes the other rows";

    EXPECT_EQ(group.pieces(PassKind::Full), group.piecesBefore(2));
    for (size_t m = 0; m < 2; ++m) {
        next = 0;
        for (int64_t piece = group.piecesBefore(m); piece < group.piecesBefore(m + 1); ++piece) {
            const std::vector<StreamPart> parts = group.parts(PassKind::Full, piece, address(256));
            ASSERT_EQ(parts.size(), 1u);
            EXPECT_EQ(parts[0].fileRow, next);
            EXPECT_EQ(parts[0].file, file[m].data + static_cast<size_t>(next) * kRowBytes);
            next += parts[0].rows;
        }
        EXPECT_EQ(next, 5000);
    }
}

// A piece depends on the pass that is asked for, and not on which was asked for before.
TEST(WeightGroup, APieceOfOnePassIsTheSameAfterAPieceOfTheOther) {
    const WeightGroup group =
        WeightGroup::streamed(fileLayout(), {matrix(5000, size_t{1} << 40), matrix(5000, size_t{2} << 40)}, 0);
    const std::vector<StreamPart> before = group.parts(PassKind::Full, 1, address(256));
    const std::vector<StreamPart> other = group.parts(PassKind::Step, 1, address(256));
    const std::vector<StreamPart> after = group.parts(PassKind::Full, 1, address(256));
    ASSERT_EQ(before.size(), 1u);
    ASSERT_EQ(after.size(), 1u);
    EXPECT_EQ(other.size(), 2u);
    EXPECT_EQ(before[0].file, after[0].file);
    EXPECT_EQ(before[0].rows, after[0].rows);
}

TEST(WeightGroup, AStackHasPiecesInFullPassesAlone) {
    WeightGroup group = WeightGroup::stack(fileLayout(), {matrix(2000, size_t{1} << 40), 2000 * kRowBytes, 7});
    EXPECT_EQ(group.pieces(PassKind::Step), 0);
    EXPECT_EQ(group.pieces(PassKind::Full), 7) << "an expert of 8.7 MB is a piece of its own";
    group.setWanted({1, 5});
    ASSERT_EQ(group.pieces(PassKind::Full), 2);
    EXPECT_EQ(group.parts(PassKind::Full, 1, address(256))[0].file, address(size_t{1} << 40) + 5 * 2000 * kRowBytes);
    group.setWanted({});
    EXPECT_EQ(group.pieces(PassKind::Full), 0);
    for (const std::vector<int32_t>& wrong : {std::vector<int32_t>{7}, {-1}, {2, 2}, {3, 1}})
        expectInternal([&] { group.setWanted(wrong); });
    EXPECT_EQ(group.pieces(PassKind::Full), 0) << "a refused choice changes nothing";
    WeightGroup matrices = WeightGroup::streamed(fileLayout(), {matrix(10, size_t{1} << 40)}, 0);
    expectInternal([&] { matrices.setWanted({0}); });
}

// Of a model that is larger than RAM: some experts are in RAM, some are to stay there once they are read.
TEST(WeightGroup, ExpertsMayComeFromRamAndStayThere) {
    const Matrix first = matrix(400, size_t{1} << 40);  // several of 1.7 MB are a piece
    WeightGroup group = WeightGroup::stack(fileLayout(), {first, 400 * kRowBytes, 12});
    auto* const keep = const_cast<uint8_t*>(address(size_t{3} << 40));
    group.setWanted({1, 5, 8}, {{address(size_t{2} << 40), nullptr}, {}, {nullptr, keep}});
    ASSERT_EQ(group.pieces(PassKind::Full), 1);
    const std::vector<StreamPart> parts = group.parts(PassKind::Full, 0, address(256));
    ASSERT_EQ(parts.size(), 3u);
    EXPECT_EQ(parts[0].file, address(size_t{2} << 40));
    EXPECT_EQ(parts[1].file, first.data + 5 * 400 * kRowBytes);
    EXPECT_EQ(parts[2].file, first.data + 8 * 400 * kRowBytes);
    EXPECT_EQ(parts[1].keep, nullptr);
    EXPECT_EQ(parts[2].keep, keep);
    expectInternal([&] { group.setWanted({1, 2}, {{}}); });
    group.setWanted({1});
    EXPECT_EQ(group.parts(PassKind::Full, 0, address(256))[0].file, first.data + 400 * kRowBytes) << "from the file";
    // In the second piece, too.
    std::vector<int32_t> all;
    std::vector<StreamOrigin> origins;
    for (int32_t i = 0; i < 12; ++i) {
        all.push_back(i);
        origins.push_back({address((size_t{2} << 40) + static_cast<size_t>(i)), nullptr});
    }
    group.setWanted(all, origins);
    ASSERT_GT(group.pieces(PassKind::Full), 1);
    int32_t next = 0;
    for (int64_t piece = 0; piece < group.pieces(PassKind::Full); ++piece) {
        for (const StreamPart& part : group.parts(PassKind::Full, piece, address(256)))
            EXPECT_EQ(part.file, origins[static_cast<size_t>(next++)].inRam);
    }
    EXPECT_EQ(next, 12);
}

TEST(PieceRing, OutsideAPassThereIsNoKindAndNoPiece) {
    World world({0, 3}, 3);
    world.add({{DType::Q8_0}, {256}, 40, 0, false});
    std::vector<WeightGroup> groups{WeightGroup::streamed(fileLayout(), world.groups[0].file, 0)};
    CopyingTransfers transfers(world.device);
    PieceRing ring(groups, &transfers);
    ring.take(world.allocator, groups[0].pieceBytes(), 2);
    expectInternal([&] { ring.kind(); });
    expectInternal([&] { ring.acquire(0, 0); });
    for (const PassKind kind : {PassKind::Step, PassKind::Full}) {
        EXPECT_TRUE(ring.begin(kind, {0, 1, 0, 0}));
        EXPECT_EQ(ring.kind(), kind);
        expectInternal([&] { ring.acquire(0, 1); });
        const PieceRing::Piece piece = ring.acquire(0, 0);
        EXPECT_EQ(piece.rowBegin, 0);
        ASSERT_EQ(piece.parts.size(), 1u);
        EXPECT_EQ(std::memcmp(piece.parts[0].data, world.groups[0].file[0].data, fileBytes(piece.parts[0])), 0);
        ring.release();
        ring.end();
        expectInternal([&] { ring.kind(); });
    }
    EXPECT_TRUE(ring.begin(PassKind::Full, {0, 1, 0, 0}));
    expectError(ErrorKind::Internal, "group 0", [&] { ring.end(); });
    ring.begin(PassKind::Full, {0, 1, 0, 0});
    ring.drop();
    expectInternal([&] { ring.acquire(0, 0); });
    EXPECT_FALSE(ring.begin(PassKind::Step, {0, 1, 0, 1})) << "all groups are left out";
    ring.end();
}

}  // namespace
