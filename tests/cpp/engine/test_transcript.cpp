// The tokens of a sequence with their kinds, and the pieces in which they are computed. However tokens are appended and
// cut, and wherever pieces should end, the pieces cover each token once, as its kind, and keep the rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/texts/transcript.h"
#include "seed.h"

namespace {

using namespace sharpi;

Transcript transcript(int64_t prompt, int64_t decode, int32_t first = 0) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < prompt + decode; ++i) tokens.push_back(first + static_cast<int32_t>(i));
    Transcript text;
    text.append(tokens.data(), prompt, RowKind::Prompt);
    text.append(tokens.data() + prompt, decode, RowKind::Decode);
    return text;
}

PieceRules rules(int64_t step, int64_t rows, int64_t decodeRows) { return {false, step, rows, decodeRows}; }

void expectPiece(const Stretch& piece, RowKind kind, int64_t begin, int64_t end) {
    EXPECT_EQ(piece.kind, kind);
    EXPECT_EQ(piece.begin, begin);
    EXPECT_EQ(piece.end, end);
}

TEST(Transcript, PromptRowsMakePromptRowsOfAllBefore) {
    Transcript text = transcript(3, 4);
    EXPECT_EQ(text.promptTokens(), 3);
    EXPECT_EQ(text.size(), 7);
    const int32_t more[] = {8, 9};
    text.append(more, 0, RowKind::Prompt);
    EXPECT_EQ(text.promptTokens(), 3) << "nothing was appended";
    text.append(more, 2, RowKind::Prompt);
    EXPECT_EQ(text.promptTokens(), 9);
    text.append(more, 1, RowKind::Decode);
    EXPECT_EQ(text.promptTokens(), 9);
    EXPECT_EQ(text.tokens(), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 8, 9, 8}));
    text.truncate(9);
    EXPECT_EQ(text.promptTokens(), 9);
    text.truncate(4);
    EXPECT_EQ(text.promptTokens(), 4);
    text.truncate(0);
    EXPECT_EQ(text.promptTokens(), 0);
}

TEST(Transcript, FollowsALongerOnePieceByPiece) {
    Transcript text = transcript(10, 5), longer = text;
    const int32_t more[] = {15, 16, 17};
    longer.append(more, 3, RowKind::Prompt);
    text.follow(longer, 16);
    EXPECT_EQ(text.promptTokens(), 16);
    text.follow(longer, 18);
    EXPECT_EQ(text.promptTokens(), 18);
    EXPECT_EQ(text.tokens(), longer.tokens());
    Transcript decoded = transcript(10, 2);
    decoded.follow(transcript(10, 9), 15);
    EXPECT_EQ(decoded.promptTokens(), 10);
    EXPECT_EQ(decoded.size(), 15);
}

TEST(Transcript, AgreesAsFarAsTokensAndKindsAreTheSame) {
    const Transcript text = transcript(10, 5);
    EXPECT_EQ(text.agreement(text, false), 15);
    EXPECT_EQ(text.agreement(transcript(10, 3), false), 13);
    EXPECT_EQ(text.agreement(transcript(15, 0), false), 10);
    EXPECT_EQ(transcript(15, 0).agreement(text, false), 10);
    EXPECT_EQ(text.agreement(transcript(12, 9), false), 10);
    EXPECT_EQ(text.agreement(transcript(6, 9), false), 6);
    EXPECT_EQ(text.agreement(transcript(15, 0), true), 15);
    EXPECT_EQ(text.agreement(transcript(6, 20), true), 15);
    EXPECT_EQ(text.agreement(transcript(10, 5, 1), false), 0);
    EXPECT_EQ(text.agreement(Transcript(), false), 0);
    Transcript other = transcript(7, 0);
    const int32_t elsewhere[] = {99, 8, 9};
    other.append(elsewhere, 3, RowKind::Prompt);
    EXPECT_EQ(text.agreement(other, false), 7);
    EXPECT_EQ(text.agreement(other, true), 7);
}

TEST(Transcript, PiecesEndAtTilesKindsAndTheEnd) {
    const Transcript text = transcript(200, 30);
    const PieceRules tiles = rules(64, 130, 8);
    expectPiece(text.piece(0, 1, tiles), RowKind::Prompt, 0, 64);
    expectPiece(text.piece(0, 64, tiles), RowKind::Prompt, 0, 64);
    expectPiece(text.piece(0, 65, tiles), RowKind::Prompt, 0, 128);
    expectPiece(text.piece(0, 1000, tiles), RowKind::Prompt, 0, 128);  // 130 rows hold two tiles
    expectPiece(text.piece(128, 1000, tiles), RowKind::Prompt, 128, 200);
    expectPiece(text.piece(192, 193, tiles), RowKind::Prompt, 192, 200);
    expectPiece(text.piece(200, 1000, tiles), RowKind::Decode, 200, 208);
    expectPiece(text.piece(203, 0, tiles), RowKind::Decode, 203, 204);
    expectPiece(text.piece(225, 1000, tiles), RowKind::Decode, 225, 230);
    const PieceRules rows = rules(1, 100, 100);
    expectPiece(text.piece(0, 7, rows), RowKind::Prompt, 0, 7);
    expectPiece(text.piece(7, 1000, rows), RowKind::Prompt, 7, 107);
    expectPiece(text.piece(107, 1000, rows), RowKind::Prompt, 107, 200);
    expectPiece(text.piece(200, 1000, rows), RowKind::Decode, 200, 230);
}

TEST(Transcript, RefusesPromptRowsThatTheBackendDoesNotTake) {
    const Transcript text = transcript(200, 0);
    EXPECT_THROW(text.piece(3, 200, rules(64, 128, 8)), Error);
    EXPECT_THROW(text.piece(64, 200, rules(64, 63, 8)), Error);
    // A context may be shorter than a tile.
    expectPiece(transcript(40, 0).piece(0, 40, rules(64, 40, 8)), RowKind::Prompt, 0, 40);
}

TEST(Transcript, PiecesCoverEveryTokenOnce) {
    std::mt19937 random(sharpi::testSeed(1));
    for (int round = 0; round < 2000; ++round) {
        const int64_t step = random() % 2 ? 64 : 1;
        const PieceRules limits =
            rules(step, step + static_cast<int64_t>(random() % 200), 1 + static_cast<int64_t>(random() % 20));
        const Transcript text = transcript(static_cast<int64_t>(random() % 400), static_cast<int64_t>(random() % 60));
        for (int64_t at = 0; at < text.size();) {
            const int64_t wanted = static_cast<int64_t>(random() % 500);
            const Stretch piece = text.piece(at, wanted, limits);
            const bool prompt = at < text.promptTokens();
            ASSERT_EQ(piece.kind, prompt ? RowKind::Prompt : RowKind::Decode);
            ASSERT_EQ(piece.begin, at);
            ASSERT_GT(piece.end, at);
            ASSERT_LE(piece.end, prompt ? text.promptTokens() : text.size());
            ASSERT_LE(piece.end - at, prompt ? limits.rows : limits.decodeRows);
            if (prompt && piece.end < text.promptTokens()) {
                ASSERT_EQ(piece.end % step, 0);
            }
            if (piece.end < wanted) {  // then the rules allow no longer one
                ASSERT_TRUE(piece.end == (prompt ? text.promptTokens() : text.size()) ||
                            piece.end - at + (prompt ? step : 1) > (prompt ? limits.rows : limits.decodeRows));
            }
            at = piece.end;
        }
    }
}

}  // namespace
