// Prefill's attention: a row's bits do not depend on its tile, on the rest of the batch or on the rows behind it. The
// expected bits are those of all sequences in one call, with tiles at multiples of 64 positions.
#include "attention_test.h"
#include "row_cuts.h"

namespace sharpi::cuda {
namespace {

struct Piece {
    int32_t sequence, begin, end;  // positions
};

// What is computed in pieces.
struct Problem {
    Shape shape;
    bool split = false;
    AttentionReach reach = {};
    float softcap = 0;
    bool sinks = false;

    size_t width() const { return static_cast<size_t>(shape.heads) * shape.headDim; }
    // sinks: on the device.
    AttentionRule rule(const float* deviceSinks) const {
        return {scaleOf(shape), reach, softcap, sinks ? deviceSinks : nullptr};
    }
    std::string name() const {
        return nameOf(shape) + (split ? ", split" : "") + ", window " + std::to_string(reach.window) + ", chunk " +
               std::to_string(reach.chunk) + ", softcap " + std::to_string(softcap) + (sinks ? ", sinks" : "");
    }
};

class PrefillRows : public GpuTest {
protected:
    // The queries of all rows of each sequence.
    struct Queries {
        std::vector<std::vector<uint16_t>> hi, lo;  // by sequence
    };

    Queries queries(const Shape& shape, const std::vector<int32_t>& lengths) {
        const bool bf16 = stream().device().major >= 8;
        Queries q;
        for (const int32_t length : lengths) {
            q.hi.emplace_back(), q.lo.emplace_back();
            for (const float x : randomFloats(static_cast<size_t>(length) * shape.heads * shape.headDim)) {
                const uint16_t hi = bf16 ? bf16FromFloat(x) : f16FromFloat(x);
                const float rest = x - (bf16 ? floatFromBf16(hi) : floatFromF16(hi));
                q.hi.back().push_back(hi);
                q.lo.back().push_back(bf16 ? bf16FromFloat(rest) : f16FromFloat(rest));
            }
        }
        return q;
    }

    // Attends for the rows of these pieces in one call and returns [rows, heads * headDim]. The cache of each sequence
    // ends where its piece ends, and what the piece does not see before its first row is given back. anyTiles: tiles
    // are cut anywhere, else at multiples of 64 positions.
    std::vector<float> attend(const Problem& problem, const std::vector<int32_t>& lengths, const Queries& q,
                              const std::vector<Piece>& pieces, bool anyTiles = false) {
        const Shape& shape = problem.shape;
        Cache cache(shape, lengths, 8, 31);
        const size_t width = problem.width();
        std::vector<Row> rows;
        std::vector<int32_t> begin, end;
        std::vector<uint16_t> hi, lo;
        for (const Piece& piece : pieces) {
            const auto sequence = static_cast<size_t>(piece.sequence);
            cache.forget(piece.sequence, piece.end, lengths[sequence]);
            cache.giveBack(piece.sequence, problem.reach.first(piece.begin));
            for (int32_t at = piece.begin; at < piece.end;) {
                int32_t until = std::min(piece.end, (at / kQueryTile + 1) * kQueryTile);
                if (anyTiles)
                    until = std::min<int32_t>(piece.end, at + 1 + static_cast<int32_t>(random()() % kQueryTile));
                begin.push_back(static_cast<int32_t>(rows.size()));
                for (; at < until; at++) rows.push_back({piece.sequence, at});
                end.push_back(static_cast<int32_t>(rows.size()));
            }
            const auto first = static_cast<int64_t>(piece.begin * width),
                       last = static_cast<int64_t>(piece.end * width);
            hi.insert(hi.end(), q.hi[sequence].begin() + first, q.hi[sequence].begin() + last);
            lo.insert(lo.end(), q.lo[sequence].begin() + first, q.lo[sequence].begin() + last);
        }
        const DeviceArray<uint16_t> deviceHi(hi), deviceLo(lo);
        const DeviceArray<int32_t> tileBegin(begin), tileEnd(end);
        const DeviceArray<float> out(hi.size()), sinks(std::vector<float>(static_cast<size_t>(shape.heads), 1.5f));
        const DeviceRows on(rows, cache);
        attentionPrefill(stream(), {deviceHi.get(), problem.split ? deviceLo.get() : nullptr},
                         {shape.heads, shape.kvHeads, shape.headDim}, problem.rule(sinks.get()), on.batch,
                         {tileBegin.get(), tileEnd.get(), static_cast<int64_t>(begin.size())}, cache.onDevice(),
                         {out.get(), {}, {}});
        return out.read();
    }

    void expectIndependent(const Problem& problem) {
        SCOPED_TRACE(problem.name());
        const std::vector<int32_t> lengths = {330, 130, 65, 64, 1};
        const size_t width = problem.width();
        const Queries q = queries(problem.shape, lengths);
        std::vector<Piece> all;
        for (size_t s = 0; s < lengths.size(); s++) all.push_back({static_cast<int32_t>(s), 0, lengths[s]});
        const std::vector<float> together = attend(problem, lengths, q, all);
        std::vector<std::vector<float>> whole;
        size_t at = 0;
        for (const int32_t length : lengths) {
            whole.emplace_back(together.begin() + static_cast<int64_t>(at * width),
                               together.begin() + static_cast<int64_t>((at + length) * width));
            at += length;
        }
        const auto expectPieces = [&](const std::vector<Piece>& pieces, const std::vector<float>& got) {
            std::vector<float> expected;
            for (const Piece& p : pieces) {
                const std::vector<float>& of = whole[static_cast<size_t>(p.sequence)];
                expected.insert(expected.end(), of.begin() + static_cast<int64_t>(p.begin * width),
                                of.begin() + static_cast<int64_t>(p.end * width));
            }
            ASSERT_TRUE(sameBits(expected, got))
                << "sequence " << pieces[0].sequence << " from " << pieces[0].begin << " to " << pieces[0].end;
        };
        for (size_t s = 0; s < lengths.size(); s++) {
            for (const RowCut& cut : randomCuts(lengths[s], random())) {
                const Piece piece = {static_cast<int32_t>(s), static_cast<int32_t>(cut.begin),
                                     static_cast<int32_t>(cut.end)};
                ASSERT_NO_FATAL_FAILURE(expectPieces({piece}, attend(problem, lengths, q, {piece})));
            }
        }
        for (const int32_t position : {0, 1, 63, 64, 65, 127, 128, 200, 329}) {
            const Piece one = {0, position, position + 1};
            ASSERT_NO_FATAL_FAILURE(expectPieces({one}, attend(problem, lengths, q, {one})));
        }
        // Another part of each sequence, beside other rows and in other tiles.
        for (const bool anyTiles : {false, true}) {
            std::vector<Piece> pieces;
            for (size_t s = 0; s < lengths.size(); s++) {
                const auto begin = static_cast<int32_t>(random()() % static_cast<uint32_t>(lengths[s]));
                pieces.push_back(
                    {static_cast<int32_t>(s), begin,
                     begin + 1 + static_cast<int32_t>(random()() % static_cast<uint32_t>(lengths[s] - begin))});
            }
            std::shuffle(pieces.begin(), pieces.end(), random());
            ASSERT_NO_FATAL_FAILURE(expectPieces(pieces, attend(problem, lengths, q, pieces, anyTiles)));
        }
    }
};

TEST_F(PrefillRows, InHalves) {
    for (const Shape& shape : std::vector<Shape>{{KvType::BF16, 4, 2, 128},
                                                 {KvType::BF16, 3, 3, 64},
                                                 {KvType::BF16, 4, 1, 16},
                                                 {KvType::BF16, 2, 2, 80},
                                                 {KvType::BF16, 2, 1, 256},
                                                 {KvType::BF16, 2, 1, 512}})
        ASSERT_NO_FATAL_FAILURE(expectIndependent({shape}));
}

TEST_F(PrefillRows, InSplitForm) {
    for (const KvType type : {KvType::F32, KvType::F16, KvType::BF16})
        for (const int32_t headDim : {32, 64, 128, 256, 512})
            ASSERT_NO_FATAL_FAILURE(expectIndependent({{type, 4, 2, headDim}, true}));
}

// A row's first tiles of keys may hold only keys that earlier rows of its tile of queries see.
TEST_F(PrefillRows, WithWindowsAndChunks) {
    for (const int32_t headDim : {64, 128, 256, 512})
        for (const AttentionReach& reach : std::vector<AttentionReach>{{1, 0}, {64, 0}, {100, 0}, {0, 64}, {0, 100}})
            ASSERT_NO_FATAL_FAILURE(expectIndependent({{KvType::BF16, 4, 2, headDim}, false, reach}));
}

TEST_F(PrefillRows, WithSinksAndSoftcap) {
    for (const int32_t headDim : {64, 256, 512}) {
        ASSERT_NO_FATAL_FAILURE(expectIndependent({{KvType::BF16, 3, 1, headDim}, false, {}, 2.0f, true}));
        ASSERT_NO_FATAL_FAILURE(expectIndependent({{KvType::BF16, 3, 1, headDim}, false, {100, 0}, 2.0f, true}));
        ASSERT_NO_FATAL_FAILURE(expectIndependent({{KvType::F32, 4, 2, headDim}, true, {100, 0}, 2.0f, true}));
    }
}

}  // namespace
}  // namespace sharpi::cuda
