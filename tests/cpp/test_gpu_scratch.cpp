// The GPU's working memory: parts that are in use at the same time lie apart, each with the bytes that the kernels fill. Runs without
// a GPU; what overlaps would show there as wrong answers only.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/gpu_scratch.h"
#include "kernels/attention.h"
#include "kernels/expert_cache.h"
#include "kernels/packed_shape.h"
#include "kernels/router.h"
#include "kernels/sampling.h"

namespace {

using namespace sharpi;

constexpr int64_t kFloat = 4, kHalf = 2, kInt = 4;

struct Part {
    const char* name;
    size_t begin;
    int64_t bytes;
};

// One behind the other, without a gap but for alignment. Returns where the last one ends.
size_t expectApart(std::vector<Part> parts, size_t end) {
    parts.erase(std::remove_if(parts.begin(), parts.end(), [](const Part& p) { return p.bytes == 0; }), parts.end());
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
    for (size_t i = 0; i < parts.size(); ++i) {
        EXPECT_GE(parts[i].bytes, 0) << parts[i].name;
        const bool last = i + 1 == parts.size();
        const size_t ends = parts[i].begin + static_cast<size_t>(parts[i].bytes), next = last ? end : parts[i + 1].begin;
        EXPECT_LE(ends, next) << parts[i].name << " reaches into " << (last ? "what comes behind" : parts[i + 1].name);
        if (!last) {
            EXPECT_LT(next, ends + 256) << parts[i].name << " has more than it needs";
        }
        EXPECT_EQ(parts[i].begin % 256, 0u) << parts[i].name;
    }
    return parts.back().begin + static_cast<size_t>(parts.back().bytes);
}

// That of hybrid() below.
cuda::DeltaShape deltaShape() {
    cuda::DeltaShape shape;
    shape.dim = 64, shape.valueHeads = 8, shape.keyHeads = 4, shape.convWidth = 4;
    return shape;
}

int64_t quantized(int64_t rows, int64_t cols) { return static_cast<int64_t>(cuda::quantizedRowsBytes(rows, cols)); }

// What is held all through a step. few: rows of a step of few.
std::vector<Part> always(const GpuScratch& s, const StepLimits& l, int64_t few) {
    const int64_t attended = std::max(l.queryWidth, l.deltaWidth), pairs = few * l.expertsUsed;
    const int64_t hidden = std::max({l.denseHidden, l.expertsUsed * l.expertHidden, l.sharedHidden});
    const int64_t hiddenForms = std::max({quantized(few, l.denseHidden), quantized(pairs, l.expertHidden), quantized(few, l.sharedHidden)});
    const int64_t counted = kInt * l.expertLayers * l.experts, slotted = l.expertSlots ? 1 : 0;
    std::vector<Part> parts = {
        {"x", s.x, kFloat * l.maxRows * l.embedding},
        {"logits", s.logits, kFloat * few * l.vocab},
        {"chosen", s.chosen, kInt * l.maxRows * l.expertsUsed},
        {"weight", s.weight, kFloat * l.maxRows * l.expertsUsed},
        {"few", s.few.at, kInt * s.few.total},
        {"normed", s.normed, kFloat * few * l.embedding},
        {"normedQuant", s.normedQuant, quantized(few, l.embedding)},
        {"attended", s.attended, kFloat * few * attended},
        {"attendedQuant", s.attendedQuant, quantized(few, attended)},
        {"hidden", s.hidden, kFloat * few * hidden},
        {"hiddenQuant", s.hiddenQuant, hiddenForms},
        {"gate", s.gate, kFloat * few * hidden},
        {"up", s.up, kFloat * few * hidden},
        {"routerLogits", s.routerLogits, kFloat * few * l.experts},
        {"attention", s.attention, static_cast<int64_t>(cuda::decodeAttentionBytes(few, {l.heads, l.kvHeads, l.headDim}, l.context, l.pageTokens))},
        {"sampling", s.sampling, static_cast<int64_t>(cuda::samplingScratchBytes(l.vocab))},
        {"adjustments", s.adjustments, static_cast<int64_t>(sizeof(TokenAdjustment)) * l.vocab},
        {"token", s.token, kInt * few},
        {"sharedScale", s.sharedScale, l.sharedHidden ? kFloat * l.maxRows : 0},
        {"joined", s.joined, l.drafts ? kFloat * 2 * few * l.embedding : 0},
        {"joinedQuant", s.joinedQuant, l.drafts ? quantized(few, 2 * l.embedding) : 0},
        {"deltaReaders", s.deltaReaders, static_cast<int64_t>(s.deltaReaderBytes)},
        {"expertUses", s.expertUses, counted},
        {"expertTable", s.expertTable, slotted * counted},
        {"expertOrdinal", s.expertOrdinal, slotted * counted},
        {"slot", s.slot, slotted * kInt * pairs},
        {"foreseen", s.foreseen, slotted * kInt * pairs},
        {"foreseenWeight", s.foreseenWeight, slotted * kFloat * pairs},
        {"foreseenRows", s.foreseenRows, slotted * kFloat * few * l.embedding},
        {"foreseenQuant", s.foreseenQuant, slotted * quantized(few, l.embedding)},
        {"answers", s.answers, slotted * kFloat * pairs * l.embedding},
        {"orders", s.orders, slotted * static_cast<int64_t>(sizeof(cuda::DeviceOrders))},
    };
    if (l.maxRows <= few) return parts;
    const int64_t split = l.floatWeights ? 1 : 0;
    const std::vector<Part> many = {
        {"many", s.many.at, kInt * s.many.total},
        {"normedHi", s.normedHi, kHalf * l.maxRows * l.embedding},
        {"normedLo", s.normedLo, split * kHalf * l.maxRows * l.embedding},
        {"manyRouterLogits", s.manyRouterLogits, kFloat * l.maxRows * l.experts},
        {"grouping", s.grouping, l.expertsUsed ? static_cast<int64_t>(cuda::expertGroupingBytes(l.maxRows, l.expertsUsed, l.experts)) : 0},
    };
    parts.insert(parts.end(), many.begin(), many.end());
    return parts;
}

std::vector<Part> ofMixer(const GpuScratch& s, const StepLimits& l, int64_t few) {
    const int64_t rows = l.maxRows, attended = std::max(l.queryWidth, l.deltaWidth);
    std::vector<Part> parts = {
        {"q", s.q, kFloat * rows * l.queryWidth},
        {"k", s.k, kFloat * rows * l.kvWidth},
        {"v", s.v, kFloat * rows * l.kvWidth},
        {"gatedQueries", s.gatedQueries, kFloat * rows * l.gatedQueryWidth},
        {"deltaMixed", s.deltaMixed, kFloat * rows * l.deltaChannels},
        {"deltaGate", s.deltaGate, kFloat * rows * l.deltaWidth},
        {"deltaAlpha", s.deltaAlpha, kFloat * rows * l.deltaHeads},
        {"deltaBeta", s.deltaBeta, kFloat * rows * l.deltaHeads},
    };
    if (rows <= few) return parts;
    const int64_t splitQueries = l.kvType != KvType::BF16 ? 1 : 0, split = l.floatWeights ? 1 : 0;
    const int64_t keys = l.deltaHeads ? l.deltaChannels - l.deltaWidth : 0;  // of queries and keys together
    const std::vector<Part> many = {
        {"qHi", s.qHi, kHalf * rows * l.queryWidth},
        {"qLo", s.qLo, splitQueries * kHalf * rows * l.queryWidth},
        {"attendedHi", s.attendedHi, kHalf * rows * attended},
        {"attendedLo", s.attendedLo, split * kHalf * rows * attended},
        {"attendedFloats", s.attendedFloats, kFloat * rows * std::max(l.gatedQueryWidth / 2, l.deltaWidth)},
        {"keysHi", s.keysHi, kHalf * rows * keys},
        {"keysLo", s.keysLo, kHalf * rows * keys},
        {"deltaWindows", s.deltaWindows, l.deltaHeads ? kFloat * s.many.deltaTiles * (l.deltaConvWidth - 1) * l.deltaChannels : 0},
        {"deltaChunks", s.deltaChunks, l.deltaHeads ? static_cast<int64_t>(cuda::deltaChunkBytes(rows, s.many.deltaTiles, deltaShape(), true)) : 0},
    };
    parts.insert(parts.end(), many.begin(), many.end());
    return parts;
}

std::vector<Part> ofFeed(const GpuScratch& s, const StepLimits& l, int64_t few) {
    const int64_t rows = l.maxRows, pairs = rows * l.expertsUsed, split = l.floatWeights ? 1 : 0;
    const int64_t hidden = std::max({rows * l.denseHidden, pairs * l.expertHidden, rows * l.sharedHidden});
    std::vector<Part> parts = {{"sharedOut", s.sharedOut, l.sharedHidden ? kFloat * rows * l.embedding : 0}};
    if (rows <= few) return parts;
    const std::vector<Part> many = {
        {"hiddenHi", s.hiddenHi, kHalf * hidden},
        {"hiddenLo", s.hiddenLo, split * kHalf * hidden},
        {"manyGate", s.manyGate, kFloat * hidden},
        {"manyUp", s.manyUp, kFloat * hidden},
        {"expertOut", s.expertOut, kFloat * pairs * l.embedding},
    };
    parts.insert(parts.end(), many.begin(), many.end());
    return parts;
}

std::vector<Part> ofJoin(const GpuScratch& s, const StepLimits& l, int64_t few) {
    if (!l.drafts) return {};
    const int64_t rows = 2 * l.maxRows * l.embedding;
    std::vector<Part> parts = {{"apart", s.apart, kFloat * rows}};
    if (l.maxRows <= few) return parts;
    parts.push_back({"joinedHi", s.joinedHi, kHalf * rows});
    parts.push_back({"joinedLo", s.joinedLo, l.floatWeights ? kHalf * rows : 0});
    return parts;
}

StepLimits dense(int64_t rows) {
    StepLimits l;
    l.maxRows = rows;
    l.context = 1000;
    l.embedding = 192;
    l.vocab = 777;
    l.heads = 6, l.kvHeads = 2, l.headDim = 64, l.pageTokens = 64;
    l.queryWidth = 384, l.kvWidth = 128;
    l.denseHidden = 640;
    return l;
}

StepLimits withExperts(int64_t rows) {
    StepLimits l = dense(rows);
    l.experts = 24, l.expertsUsed = 4, l.expertLayers = 5, l.expertHidden = 96, l.sharedHidden = 224;
    l.expertSlots = true;
    l.kvType = KvType::F16;
    return l;
}

StepLimits hybrid(int64_t rows) {
    StepLimits l = withExperts(rows);
    l.gatedQueryWidth = 768;
    l.deltaDim = 64, l.deltaHeads = 8, l.deltaWidth = 512, l.deltaChannels = 512 + 2 * 256, l.deltaConvWidth = 4;
    l.drafts = true;
    l.floatWeights = true;
    return l;
}

TEST(GpuScratch, WhatIsUsedTogetherLiesApart) {
    for (const auto make : {dense, withExperts, hybrid}) {
        for (const int64_t rows : {1, 5, 8, 9, 64, 300, 2048}) {
            const StepLimits l = make(rows);
            SCOPED_TRACE(std::to_string(rows) + " rows, experts " + std::to_string(l.experts) + ", heads of delta " + std::to_string(l.deltaHeads));
            const GpuScratch s(l);
            const int64_t few = std::min<int64_t>(rows, 8);
            size_t end = 0;
            for (const auto phase : {ofMixer, ofFeed, ofJoin}) {
                std::vector<Part> parts = always(s, l, few);
                for (const Part& part : phase(s, l, few)) parts.push_back(part);
                end = std::max(end, expectApart(parts, s.bytes()));
            }
            EXPECT_LT(s.bytes(), end + 256) << "no more is taken than the largest phase needs";
        }
    }
}

TEST(GpuScratch, ABatchsNumbersLieApart) {
    for (const auto make : {dense, withExperts, hybrid}) {
        for (const int64_t rows : {1, 8, 9, 300, 2048}) {
            const StepLimits l = make(rows);
            const GpuScratch s(l);
            std::vector<std::pair<const GpuScratch::BatchBlock*, int64_t>> blocks = {{&s.few, std::min<int64_t>(rows, 8)}};
            if (rows > 8) blocks.push_back({&s.many, rows});
            for (const auto& [b, most] : blocks) {
                const bool many = b == &s.many;
                // Of a prompt: tiles of rows, one more for each sequence that ends inside of one.
                const int64_t sequences = many ? std::min<int64_t>(most, GpuScratch::kMaxSequences) : most;
                const int64_t tiles = many ? most / cuda::kQueryTile + sequences : 0, pages = (l.context + 63) / 64;
                const int64_t drafts = l.drafts ? 1 : 0, delta = l.deltaHeads ? 1 : 0;
                EXPECT_EQ(b->rows, most);
                EXPECT_EQ(b->sequences, sequences);
                EXPECT_EQ(b->pages, pages);
                struct Numbers {
                    int64_t at, count;
                };
                std::vector<Numbers> all = {{b->tokens, most}, {b->positions, most}, {b->sequence, most}, {b->logitRows, most},
                                            {b->tileBegin, tiles}, {b->tileEnd, tiles}, {b->sources, drafts * most}, {b->joined, drafts * 2 * most},
                                            {b->stateFrom, delta * most}, {b->stateTo, delta * most}, {b->begin, delta * sequences},
                                            {b->end, delta * sequences}, {b->deltaTileBegin, b->deltaTiles}, {b->deltaTileEnd, b->deltaTiles},
                                            {b->tables, sequences * pages}};
                all.erase(std::remove_if(all.begin(), all.end(), [](const Numbers& n) { return n.count == 0; }), all.end());
                std::sort(all.begin(), all.end(), [](const Numbers& x, const Numbers& y) { return x.at < y.at; });
                int64_t end = 0;
                for (const Numbers& n : all) {
                    EXPECT_EQ(n.at, end) << "nothing overlaps, and nothing is uploaded for nobody";
                    end = n.at + n.count;
                }
                EXPECT_EQ(b->total, end);
            }
            if (rows > 8 && l.deltaHeads) {
                EXPECT_EQ(s.many.deltaTiles, std::min(rows, rows / 64 + GpuScratch::kMorePieces));
            }
        }
    }
}

// The parts inside of a workspace that a kernel divides by itself.
TEST(GpuScratch, WorkspacesHoldWhatTheyAreDividedInto) {
    for (const int64_t rows : {1, 7, 300}) {
        for (const int64_t cols : {32, 192, 4096}) {
            std::vector<uint8_t> memory(static_cast<size_t>(quantized(rows, cols)));
            const cuda::QuantizedRows over = cuda::quantizedRowsOver(memory.data(), rows, cols);
            const auto at = [&](const void* p) { return static_cast<size_t>(static_cast<const uint8_t*>(p) - memory.data()); };
            expectApart({{"values", at(over.q), rows * cols}, {"scales", at(over.scale), kFloat * rows * cols / 32},
                         {"sums", at(over.sums), kInt * rows * cols / 32}}, memory.size());
        }
        for (const int32_t used : {1, 8}) {
            const int32_t experts = 60;
            std::vector<uint8_t> memory(cuda::expertGroupingBytes(rows, used, experts));
            const cuda::ExpertGrouping over = cuda::expertGroupingOver(memory.data(), rows, used, experts);
            const auto at = [&](const void* p) { return static_cast<size_t>(static_cast<const uint8_t*>(p) - memory.data()); };
            const int64_t pairs = rows * used, tiles = cuda::maxExpertTiles(pairs, experts);
            EXPECT_GE(tiles, pairs / 128 + std::min<int64_t>(pairs, experts) - 1) << "each expert may begin a tile of its own";
            expectApart({{"begin", at(over.begin), kInt * (experts + 1)}, {"pairToken", at(over.pairToken), kInt * pairs},
                         {"pairOf", at(over.pairOf), kInt * pairs}, {"tileExpert", at(over.tileExpert), kInt * tiles},
                         {"tileBegin", at(over.tileBegin), kInt * tiles}, {"counts", at(over.counts), kInt * cuda::kMaxPairSegments * experts}},
                        memory.size());
        }
    }
    // Of each tile and head two operands, in halves or twice that, and two floats a row; of each row two numbers.
    for (const int64_t rows : {1, 64, 1000}) {
        const int64_t tiles = rows / 64 + 1, operands = tiles * 8 * 64 * (64 + 64);
        for (const bool split : {false, true}) {
            const int64_t needed = 2 * kInt * rows + (split ? 2 : 1) * kHalf * operands + tiles * 8 * 64 * 2 * kFloat;
            const auto taken = static_cast<int64_t>(cuda::deltaChunkBytes(rows, tiles, deltaShape(), split));
            EXPECT_GE(taken, needed);
            EXPECT_LT(taken, needed + 256);
        }
    }
    // A partial result for each page begun: a maximum, a sum and headDim outputs.
    for (const int64_t context : {1, 64, 65, 1000}) {
        const int64_t partials = 3 * 6 * ((context + 63) / 64);
        EXPECT_GE(cuda::decodeAttentionBytes(3, {6, 2, 128}, context, 64),
                  static_cast<size_t>(cuda::kDecodeCounterBytes + kFloat * partials * (2 + 128)));
    }
}

}  // namespace
