// The GPU's working memory: parts that are in use at the same time lie apart, each with the bytes that the kernels
// fill. Runs without a GPU; what overlaps would show there as wrong answers only.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/latent_shape.h"
#include "kernels/delta/mamba.h"
#include "kernels/experts/expert_cache.h"
#include "kernels/experts/router.h"
#include "kernels/formats/packed_shape.h"
#include "kernels/sampling/scores.h"
#include "plan/gpu_scratch.h"

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
        const size_t ends = parts[i].begin + static_cast<size_t>(parts[i].bytes),
                     next = last ? end : parts[i + 1].begin;
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

cuda::LatentShape latentShape(const StepLimits& l) {
    return {l.latentHeads, l.latentRank, l.headDim - l.latentRank, l.plainDim};
}

int64_t quantized(int64_t rows, int64_t cols) { return static_cast<int64_t>(cuda::quantizedRowsBytes(rows, cols)); }

// Bytes of a block's numbers.
int64_t numberBytes(const GpuScratch::Numbers& numbers) { return kInt * numbers.layout->count(); }

const GpuScratch::Input& input(const GpuScratch& s, RowInput which) { return s.inputs[static_cast<size_t>(which)]; }

int64_t attentionBytes(const GpuScratch& s, const StepLimits& l) {
    if (l.outputGroups) return cuda::kDecodeCounterBytes;
    return static_cast<int64_t>(l.latentHeads
                                    ? cuda::latentAttentionBytes(s.exactRows, latentShape(l))
                                    : cuda::decodeAttentionBytes(s.exactRows, {l.heads, l.kvHeads, l.headDim}));
}

// What is held all through a pass.
std::vector<Part> always(const GpuScratch& s, const StepLimits& l) {
    const int64_t rows = l.maxRows, exact = s.exactRows, fast = s.fastRows, head = s.headRows,
                  stepRows = std::min<int64_t>(rows, 64);
    const int64_t counted = kInt * l.expertLayerCount() * l.experts, slotted = l.expertSlots ? 1 : 0,
                  split = l.floatWeights ? 1 : 0;
    return {
        {"step", s.step.at, numberBytes(s.step)},
        {"batch", s.batch.at, numberBytes(s.batch)},
        {"x", s.rows[RowBuffer::Residual], kFloat * rows * l.embedding},
        {"logits", s.logits, kFloat * head * l.vocab},
        {"normed", input(s, RowInput::Normed).exact.floats, kFloat * exact * l.embedding},
        {"normedQuant", input(s, RowInput::Normed).exact.quantized, quantized(exact, l.embedding)},
        {"normedHi", input(s, RowInput::Normed).fast.hi, kHalf * fast * l.embedding},
        {"normedLo", input(s, RowInput::Normed).fast.lo, split * kHalf * fast * l.embedding},
        {"attention", s.attention, attentionBytes(s, l)},
        {"streams", s.rows[RowBuffer::Streams], kFloat * rows * l.streams * l.embedding},
        {"streamMix", s.rows[RowBuffer::StreamMix], kFloat * rows * l.streams * (2 + l.streams)},
        {"stateReaders", s.stateReaders,
         l.deltaHeads ? static_cast<int64_t>(cuda::deltaStepBytes(std::min<int64_t>(rows, 80), deltaShape()))
                      : kInt * std::min<int64_t>(rows, 80) * l.mambaGroups},
        {"sampling", s.sampling, static_cast<int64_t>(cuda::samplingScratchBytes(l.vocab))},
        {"adjustments", s.adjustments, static_cast<int64_t>(sizeof(TokenAdjustment)) * l.vocab},
        {"token", s.token, kInt * head},
        {"scores", s.scores, static_cast<int64_t>(sizeof(cuda::RowScore)) * head},
        {"chosen", s.chosen, kInt * rows * l.expertsUsed},
        {"weight", s.weight, kFloat * rows * l.expertsUsed},
        {"sharedScale", s.sharedScale, l.sharedHidden ? kFloat * rows : 0},
        {"grouping", s.grouping,
         l.expertsUsed && fast ? static_cast<int64_t>(cuda::expertGroupingBytes(fast, l.expertsUsed, l.experts)) : 0},
        {"pairGroups", s.pairGroups,
         l.expertsUsed
             ? static_cast<int64_t>(cuda::pairGroupsBytes(std::min<int64_t>(exact, 64) * l.expertsUsed, l.experts))
             : 0},
        {"expertUses", s.expertUses, counted},
        {"expertTable", s.expertTable, slotted * counted},
        {"expertOrdinal", s.expertOrdinal, slotted * counted},
        {"slot", s.slot, slotted * kInt * exact * l.expertsUsed},
        {"foreseen", s.foreseen, slotted * kInt * stepRows * l.expertsUsed},
        {"foreseenWeight", s.foreseenWeight, slotted * kFloat * stepRows * l.expertsUsed},
        {"foreseenRows", s.foreseenRows.floats, slotted * kFloat * stepRows * l.embedding},
        {"foreseenQuant", s.foreseenRows.quantized, slotted * quantized(stepRows, l.embedding)},
        {"orders", s.orders, slotted * static_cast<int64_t>(sizeof(cuda::DeviceOrders))},
    };
}

std::vector<Part> ofMixer(const GpuScratch& s, const StepLimits& l) {
    const int64_t rows = l.maxRows, exact = s.exactRows, fast = s.fastRows,
                  attended = std::max({l.queryWidth, l.deltaWidth, l.mambaWidth});
    const int64_t splitQueries = l.kvType != KvType::BF16 ? 1 : 0, split = l.floatWeights ? 1 : 0,
                  delta = l.deltaHeads && fast ? 1 : 0;
    const int64_t keys = l.deltaChannels - l.deltaWidth,
                  tiles = s.batch.layout->stateTiles();  // keys: of queries and keys together
    return {
        {"q", s.rows[RowBuffer::Queries], kFloat * rows * l.queryWidth},
        {"k", s.rows[RowBuffer::Keys], kFloat * rows * l.kvWidth},
        {"v", s.rows[RowBuffer::Values], kFloat * rows * l.kvWidth},
        {"gatedQueries", s.rows[RowBuffer::GatedQueries], kFloat * rows * l.gatedQueryWidth},
        {"deltaMixed", s.rows[RowBuffer::DeltaMixed], kFloat * rows * l.deltaChannels},
        {"deltaGate", s.rows[RowBuffer::DeltaGate], kFloat * rows * l.deltaWidth},
        {"deltaAlpha", s.rows[RowBuffer::DeltaAlpha], kFloat * rows * l.deltaHeads},
        {"deltaBeta", s.rows[RowBuffer::DeltaBeta], kFloat * rows * l.deltaHeads},
        {"mambaMixed", s.rows[RowBuffer::MambaMixed], kFloat * rows * l.mambaChannels},
        {"mambaGate", s.rows[RowBuffer::MambaGate], kFloat * rows * l.mambaWidth},
        {"mambaWindows", s.mambaWindows,
         rows > 64
             ? kFloat * (rows / 64 + (fast ? std::min<int64_t>(rows, kMostPrompts) : std::min<int64_t>(rows, 80))) * 3 *
                   l.mambaChannels
             : 0},
        {"mambaChunks", s.mambaChunks,
         l.mambaHeads && fast
             ? static_cast<int64_t>(cuda::mambaChunkBytes(
                   fast, tiles,
                   {l.mambaHeads, l.mambaGroups, static_cast<int32_t>(l.mambaWidth / l.mambaHeads), l.mambaStateDim}))
             : 0},
        {"mambaSteps", s.rows[RowBuffer::MambaSteps], kFloat * rows * l.mambaHeads},
        {"mambaDecays", s.rows[RowBuffer::MambaDecays], kFloat * rows * l.mambaHeads},
        {"attended", input(s, RowInput::Attended).exact.floats, kFloat * exact * attended},
        {"attendedQuant", input(s, RowInput::Attended).exact.quantized, quantized(exact, attended)},
        {"qHi", s.queries.hi, kHalf * fast * l.queryWidth},
        {"qLo", s.queries.lo, splitQueries * kHalf * fast * l.queryWidth},
        {"attendedHi", input(s, RowInput::Attended).fast.hi, kHalf * fast * attended},
        {"attendedLo", input(s, RowInput::Attended).fast.lo, split * kHalf * fast * attended},
        {"attendedFloats", s.attendedFloats, kFloat * fast * std::max(l.gatedQueryWidth / 2, l.deltaWidth)},
        {"keysHi", s.keys.hi, delta * kHalf * fast * keys},
        {"keysLo", s.keys.lo, delta * kHalf * fast * keys},
        {"deltaWindows", s.deltaWindows, delta * kFloat * tiles * (l.deltaConvWidth - 1) * l.deltaChannels},
        {"deltaChunks", s.deltaChunks,
         delta ? static_cast<int64_t>(cuda::deltaChunkBytes(fast, tiles, deltaShape(), true)) : 0},
    };
}

// In latent attention. Products by head read plain queries before attention writes its own.
std::vector<Part> ofLatent(const GpuScratch& s, const StepLimits& l) {
    const int64_t rows = l.maxRows, exact = s.exactRows, fast = s.fastRows, heads = exact * l.latentHeads,
                  fastHeads = fast * l.latentHeads;
    const int64_t split = l.floatWeights ? 1 : 0, splitQueries = l.kvType != KvType::BF16 ? 1 : 0;
    return {
        {"q", s.rows[RowBuffer::Queries], kFloat * rows * l.queryWidth},
        {"qHi", s.queries.hi, kHalf * fast * l.queryWidth},
        {"qLo", s.queries.lo, splitQueries * kHalf * fast * l.queryWidth},
        {"k", s.rows[RowBuffer::Keys], kFloat * rows * l.kvWidth},
        {"v", s.rows[RowBuffer::Values], kFloat * rows * l.kvWidth},
        {"lowRankQueries", s.rows[RowBuffer::LowRankQueries], kFloat * rows * l.queryRank},
        {"headQueries", s.rows[RowBuffer::HeadQueries], kFloat * rows * l.headQueryWidth},
        {"headValues", s.rows[RowBuffer::HeadValues], kFloat * rows * l.headValueWidth},
        {"attended", input(s, RowInput::Attended).exact.floats, kFloat * heads * l.latentRank},
        {"attendedQuant", input(s, RowInput::Attended).exact.quantized, quantized(heads, l.latentRank)},
        {"attendedHi", input(s, RowInput::Attended).fast.hi, kHalf * fastHeads * l.latentRank},
        {"attendedLo", input(s, RowInput::Attended).fast.lo, split * kHalf * fastHeads * l.latentRank},
        {"lowRank", input(s, RowInput::LowRank).exact.floats, kFloat * exact * l.queryRank},
        {"lowRankQuant", input(s, RowInput::LowRank).exact.quantized, quantized(exact, l.queryRank)},
        {"lowRankHi", input(s, RowInput::LowRank).fast.hi, kHalf * fast * l.queryRank},
        {"lowRankLo", input(s, RowInput::LowRank).fast.lo, split * kHalf * fast * l.queryRank},
        {"values", input(s, RowInput::HeadValues).exact.floats, kFloat * exact * l.headValueWidth},
        {"valuesQuant", input(s, RowInput::HeadValues).exact.quantized, quantized(exact, l.headValueWidth)},
        {"valuesHi", input(s, RowInput::HeadValues).fast.hi, kHalf * fast * l.headValueWidth},
        {"valuesLo", input(s, RowInput::HeadValues).fast.lo, split * kHalf * fast * l.headValueWidth},
    };
}

// In attention over blocks.
std::vector<Part> ofBlocks(const GpuScratch& s, const StepLimits& l) {
    const int64_t rows = l.maxRows, exact = s.exactRows, fast = s.fastRows, groups = exact * l.outputGroups;
    const int64_t split = l.floatWeights ? 1 : 0, splitQueries = l.kvType != KvType::BF16 ? 1 : 0;
    // 100 blocks are a segment, and a window of 128 may begin in the one before its last.
    const auto oneRow = int64_t{3} * l.heads * (l.headDim + 2) * kFloat;
    return {
        {"q", s.rows[RowBuffer::Queries], kFloat * rows * l.queryWidth},
        {"qHi", s.queries.hi, kHalf * fast * l.queryWidth},
        {"qLo", s.queries.lo, splitQueries * kHalf * fast * l.queryWidth},
        {"k", s.rows[RowBuffer::Keys], kFloat * rows * l.kvWidth},
        {"v", s.rows[RowBuffer::Values], kFloat * rows * l.kvWidth},
        {"lowRankQueries", s.rows[RowBuffer::LowRankQueries], kFloat * rows * l.queryRank},
        {"headValues", s.rows[RowBuffer::HeadValues], kFloat * rows * l.headValueWidth},
        {"compressorKeys", s.rows[RowBuffer::CompressorKeys], kFloat * rows * l.compressorWidth},
        {"compressorGates", s.rows[RowBuffer::CompressorGates], kFloat * rows * l.compressorWidth},
        {"indexQueries", s.rows[RowBuffer::IndexQueries], kFloat * rows * l.indexWidth},
        {"indexWeights", s.rows[RowBuffer::IndexWeights], kFloat * rows * l.indexHeads},
        {"chosenBlocks", s.rows[RowBuffer::ChosenBlocks], kInt * rows * l.topK},
        {"attended", input(s, RowInput::Attended).exact.floats, kFloat * groups * l.groupWidth},
        {"attendedQuant", input(s, RowInput::Attended).exact.quantized, quantized(groups, l.groupWidth)},
        {"attendedHi", input(s, RowInput::Attended).fast.hi, kHalf * fast * l.queryWidth},
        {"attendedLo", input(s, RowInput::Attended).fast.lo, split * kHalf * fast * l.queryWidth},
        {"lowRank", input(s, RowInput::LowRank).exact.floats, kFloat * exact * l.queryRank},
        {"lowRankQuant", input(s, RowInput::LowRank).exact.quantized, quantized(exact, l.queryRank)},
        {"lowRankHi", input(s, RowInput::LowRank).fast.hi, kHalf * fast * l.queryRank},
        {"lowRankLo", input(s, RowInput::LowRank).fast.lo, split * kHalf * fast * l.queryRank},
        {"values", input(s, RowInput::HeadValues).exact.floats, kFloat * exact * l.headValueWidth},
        {"valuesQuant", input(s, RowInput::HeadValues).exact.quantized, quantized(exact, l.headValueWidth)},
        {"valuesHi", input(s, RowInput::HeadValues).fast.hi, kHalf * fast * l.headValueWidth},
        {"valuesLo", input(s, RowInput::HeadValues).fast.lo, split * kHalf * fast * l.headValueWidth},
        {"segments", s.blockAttention, std::max(oneRow, std::min(oneRow * exact, int64_t{48} << 20))},
        {"indexScores", s.indexScores, kFloat * std::min<int64_t>(rows, 64) * l.blocks},
    };
}

std::vector<Part> ofStreams(const GpuScratch& s, const StepLimits& l) {
    const int64_t width = l.streams * l.embedding;
    if (!width) return {};
    return {
        {"streamsIn", input(s, RowInput::Streams).exact.floats, kFloat * s.exactRows * width},
        {"streamsQuant", input(s, RowInput::Streams).exact.quantized, quantized(s.exactRows, width)},
        {"streamsHi", input(s, RowInput::Streams).fast.hi, kHalf * s.fastRows * width},
        {"streamsLo", input(s, RowInput::Streams).fast.lo, l.floatWeights ? kHalf * s.fastRows * width : 0},
    };
}

std::vector<Part> ofFeed(const GpuScratch& s, const StepLimits& l) {
    const int64_t used = l.expertsUsed, split = l.floatWeights ? 1 : 0;
    const auto widest = [&](int64_t rows) {
        return std::max({rows * l.denseHidden, rows * used * l.expertHidden, rows * l.sharedHidden});
    };
    const int64_t forms =
        std::max({quantized(s.exactRows, l.denseHidden), quantized(s.exactRows * used, l.expertHidden),
                  quantized(s.exactRows, l.sharedHidden)});
    return {
        {"routerLogits", s.rows[RowBuffer::RouterLogits], kFloat * l.maxRows * l.experts},
        {"gate", s.rows[RowBuffer::Gate], kFloat * widest(l.maxRows)},
        {"up", s.rows[RowBuffer::Up], kFloat * widest(l.maxRows)},
        {"hidden", input(s, RowInput::Hidden).exact.floats, kFloat * widest(s.exactRows)},
        {"hiddenQuant", input(s, RowInput::Hidden).exact.quantized, forms},
        {"hiddenHi", input(s, RowInput::Hidden).fast.hi, kHalf * widest(s.fastRows)},
        {"hiddenLo", input(s, RowInput::Hidden).fast.lo, split * kHalf * widest(s.fastRows)},
        {"expertOut", s.rows[RowBuffer::ExpertOut],
         kFloat * l.maxRows * used * (l.expertLatents ? l.expertLatents : l.embedding)},
        {"latents", s.rows[RowBuffer::ExpertLatents], kFloat * l.maxRows * l.expertLatents},
        {"latentsIn", input(s, RowInput::ExpertLatents).exact.floats, kFloat * s.exactRows * l.expertLatents},
        {"latentsQuant", input(s, RowInput::ExpertLatents).exact.quantized,
         l.expertLatents ? quantized(s.exactRows, l.expertLatents) : 0},
        {"latentsHi", input(s, RowInput::ExpertLatents).fast.hi, kHalf * s.fastRows * l.expertLatents},
        {"latentsLo", input(s, RowInput::ExpertLatents).fast.lo, split * kHalf * s.fastRows * l.expertLatents},
        {"sharedOut", s.rows[RowBuffer::SharedOut], l.sharedHidden ? kFloat * l.maxRows * l.embedding : 0},
    };
}

std::vector<Part> ofJoin(const GpuScratch& s, const StepLimits& l) {
    if (!l.drafts) return {};
    return {
        {"apart", s.apart, kFloat * 2 * l.maxRows * l.embedding},
        {"joined", input(s, RowInput::Joined).exact.floats, kFloat * 2 * s.exactRows * l.embedding},
        {"joinedQuant", input(s, RowInput::Joined).exact.quantized, quantized(s.exactRows, 2 * l.embedding)},
        {"joinedHi", input(s, RowInput::Joined).fast.hi, kHalf * 2 * s.fastRows * l.embedding},
        {"joinedLo", input(s, RowInput::Joined).fast.lo, l.floatWeights ? kHalf * 2 * s.fastRows * l.embedding : 0},
    };
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
    l.experts = 24, l.expertsUsed = 4, l.expertLayers.assign(5, {0, 24}), l.expertHidden = 96, l.sharedHidden = 224;
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
    l.expertLatents = 96;
    return l;
}

StepLimits latent(int64_t rows) {
    StepLimits l = withExperts(rows);
    l.heads = l.latentHeads = 20, l.kvHeads = 1, l.headDim = 576, l.latentRank = 512, l.plainDim = 192;
    l.queryWidth = 20 * 576, l.kvWidth = 576, l.queryRank = 96;
    l.headQueryWidth = 20 * 256, l.headValueWidth = 20 * 256;
    l.floatWeights = true;
    return l;
}

StepLimits blocks(int64_t rows) {
    StepLimits l = withExperts(rows);
    l.heads = 16, l.kvHeads = 1, l.headDim = 512, l.queryWidth = 16 * 512, l.kvWidth = 512;
    l.queryRank = 96, l.outputGroups = 4, l.groupWidth = 4 * 512, l.headValueWidth = 4 * 64;
    l.compressorDim = 512, l.compressorWidth = 1024, l.indexHeads = 8, l.indexWidth = 8 * 128;
    l.topK = 100, l.blocks = 256, l.seenBlocks = 100, l.blockWindow = 128;
    l.streams = 4;
    l.floatWeights = true;
    return l;
}

StepLimits mamba(int64_t rows) {
    StepLimits l = withExperts(rows);
    l.mambaHeads = 12, l.mambaGroups = 3, l.mambaStateDim = 128, l.mambaWidth = 768, l.mambaChannels = 768 + 2 * 384;
    return l;
}

TEST(GpuScratch, WhatIsUsedTogetherLiesApart) {
    for (const auto make : {dense, withExperts, hybrid, latent, blocks, mamba}) {
        for (const PromptMode prompt : {PromptMode::Fast, PromptMode::Exact}) {
            for (const int64_t rows : {1, 5, 8, 9, 64, 300, 2048}) {
                StepLimits l = make(rows);
                l.prompt = prompt;
                SCOPED_TRACE(std::to_string(rows) + " rows, experts " + std::to_string(l.experts) +
                             ", heads of delta " + std::to_string(l.deltaHeads) + ", of latents " +
                             std::to_string(l.latentHeads) + ", of Mamba " + std::to_string(l.mambaHeads) +
                             (prompt == PromptMode::Exact ? ", exact" : ", fast"));
                const GpuScratch s(l);
                EXPECT_EQ(s.exactRows, prompt == PromptMode::Exact ? rows : std::min<int64_t>(rows, 64));
                EXPECT_EQ(s.fastRows, prompt == PromptMode::Exact ? 0 : rows);
                size_t end = 0;
                const auto mixer = l.latentHeads ? ofLatent : l.outputGroups ? ofBlocks : ofMixer;
                for (const auto phase : {mixer, ofFeed, ofStreams, ofJoin}) {
                    std::vector<Part> parts = always(s, l);
                    for (const Part& part : phase(s, l)) parts.push_back(part);
                    end = std::max(end, expectApart(parts, s.bytes()));
                }
                EXPECT_LT(s.bytes(), end + 256) << "no more is taken than the largest phase needs";
            }
        }
    }
}

// Logits are large: there are as many rows of them as an engine's sequences can want at once, and no more.
TEST(GpuScratch, HoldsTheLogitsThatAreWanted) {
    StepLimits l = dense(512);
    l.vocab = 151936;
    const auto bytesFor = [&](int64_t rows) {
        l.headRows = rows;
        const GpuScratch s(l);
        EXPECT_EQ(s.headRows, std::min<int64_t>(rows, 64));
        return static_cast<int64_t>(s.bytes());
    };
    const int64_t eight = bytesFor(8), all = bytesFor(64);
    EXPECT_GE(all - eight, kFloat * (64 - 8) * l.vocab);
    EXPECT_LT(all - eight, kFloat * (64 - 8) * l.vocab + 16384) << "beside them only the tokens and their scores";
    EXPECT_EQ(bytesFor(1000), all) << "no step has more rows";
    l.maxRows = 5;
    l.headRows = 64;
    EXPECT_EQ(GpuScratch(l).headRows, 5);
}

// Rows that are chosen from together have the best candidates of each tile of the vocabulary: 8 bytes each.
TEST(GpuScratch, SamplingHasRoomForTheCandidatesOfAllRows) {
    for (const int64_t vocab : {1, 2048, 2049, 151936, 262144, 40000000}) {
        const int64_t tiles = (vocab + 2047) / 2048, most = std::max(tiles, std::min<int64_t>(128 * tiles, 16384));
        EXPECT_GE(static_cast<int64_t>(cuda::samplingScratchBytes(vocab)), 8 * 64 * most) << vocab;
    }
}

// The parts inside of a workspace that a kernel divides by itself.
TEST(GpuScratch, WorkspacesHoldWhatTheyAreDividedInto) {
    for (const int64_t rows : {1, 7, 300}) {
        for (const int64_t cols : {32, 192, 4096}) {
            std::vector<uint8_t> memory(static_cast<size_t>(quantized(rows, cols)));
            const cuda::QuantizedRows over = cuda::quantizedRowsOver(memory.data(), rows, cols);
            const auto at = [&](const void* p) {
                return static_cast<size_t>(static_cast<const uint8_t*>(p) - memory.data());
            };
            expectApart({{"values", at(over.q), rows * cols},
                         {"scales", at(over.scale), kFloat * rows * cols / 32},
                         {"sums", at(over.sums), kInt * rows * cols / 32}},
                        memory.size());
        }
        for (const int32_t used : {1, 8}) {
            const int32_t experts = 60;
            std::vector<uint8_t> memory(cuda::expertGroupingBytes(rows, used, experts));
            const cuda::ExpertGrouping over = cuda::expertGroupingOver(memory.data(), rows, used, experts);
            const auto at = [&](const void* p) {
                return static_cast<size_t>(static_cast<const uint8_t*>(p) - memory.data());
            };
            const int64_t pairs = rows * used, tiles = cuda::maxExpertTiles(pairs, experts);
            EXPECT_GE(tiles, pairs / 128 + std::min<int64_t>(pairs, experts) - 1)
                << "each expert may begin a tile of its own";
            expectApart({{"begin", at(over.begin), kInt * (experts + 1)},
                         {"pairToken", at(over.pairToken), kInt * pairs},
                         {"pairOf", at(over.pairOf), kInt * pairs},
                         {"pairAt", at(over.pairAt), kInt * pairs},
                         {"tileExpert", at(over.tileExpert), kInt * tiles},
                         {"tileBegin", at(over.tileBegin), kInt * tiles},
                         {"counts", at(over.counts), kInt * cuda::kMaxPairSegments * experts}},
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
}

// Of each tile and group four operands in halves and one in floats, of each tile and head 17 floats a row; of each row
// two numbers.
TEST(GpuScratch, ChunksOfMambaHaveRoom) {
    for (const int64_t rows : {1, 64, 1000}) {
        for (const auto& [stateDim, padded] : {std::pair{7, 64}, {64, 64}, {100, 128}, {128, 128}, {256, 256}}) {
            const int64_t tiles = rows / 64 + 1, needed = 2 * kInt * rows + tiles * 6 * 64 * 17 * kFloat +
                                                          tiles * 3 * 64 * (4 * kHalf * padded + 64 * kFloat);
            const auto taken =
                static_cast<int64_t>(cuda::mambaChunkBytes(rows, tiles, cuda::MambaShape{6, 3, 16, stateDim, 4}));
            EXPECT_GE(taken, needed);
            EXPECT_LT(taken, needed + 256);
        }
    }
}

// Groups may be of any size; heads may not.
TEST(GpuScratch, RefusesHeadsWithoutKernels) {
    EXPECT_NO_THROW(cuda::requireHeads({1000, 1, 512}));
    for (const cuda::HeadShape shape : {cuda::HeadShape{4, 2, 520}, {4, 2, 12}, {4, 2, 0}, {4, 3, 64}, {0, 1, 64}})
        EXPECT_THROW(cuda::requireHeads(shape), Error);
}

TEST(GpuScratch, RefusesLatentsWithoutKernels) {
    EXPECT_NO_THROW(cuda::requireLatent({128, 512, 64, 128}));
    EXPECT_NO_THROW(cuda::requireLatent({3, 20, 12, 7}));
    for (const cuda::LatentShape shape : {cuda::LatentShape{4, 520, 64, 128},
                                          {4, 512, 136, 128},
                                          {4, 132, 4, 128},
                                          {4, 32, 12, 64},
                                          {0, 512, 64, 128},
                                          {4097, 512, 64, 128}})
        EXPECT_THROW(cuda::requireLatent(shape), Error);
}

// The scratch of latent attention stays small however many heads and rows there are.
TEST(GpuScratch, HasDecodesRingForLatents) {
    for (const int32_t heads : {1, 5, 16, 20, 64, 128, 131, 2048}) {
        const cuda::LatentShape shape = {heads, 512, 64, 128};
        const int64_t most = cuda::latentLaunchRows(heads);
        EXPECT_LE(most * heads, 2048);
        EXPECT_LT(cuda::latentAttentionBytes(100000, shape), size_t{80} << 20);
        for (int64_t rows = 1; rows <= most; rows++) {
            const cuda::DecodeRing ring = cuda::latentRing(rows * heads);
            EXPECT_EQ(ring.slots / ring.batch, 2);  // one is joined while another is filled
            const int64_t counters = 1 + rows * (1 + ring.slots / ring.batch);
            EXPECT_LE(counters * kInt, static_cast<int64_t>(cuda::kDecodeCounterBytes));
            // Maxima, sums and outputs of the slots, and a maximum and a sum for each 32 elements of a result.
            const int64_t slots = rows * heads * (ring.slots + 1), states = rows * heads * (shape.rank / 32);
            const auto needed =
                static_cast<size_t>(cuda::kDecodeCounterBytes + kFloat * (slots * (2 + shape.rank) + states * 2));
            for (const int64_t up : {rows, int64_t{64}, int64_t{1000}})
                EXPECT_GE(cuda::latentAttentionBytes(up, shape), needed) << heads << " heads, " << rows << " of " << up;
        }
    }
}

// Decode's counters, and a maximum, a sum and headDim outputs for each slot, for all shapes and rows up to the largest.
TEST(GpuScratch, HasDecodesRingForEveryShape) {
    const cuda::HeadShape largest = {96, 32, 512};
    for (const cuda::HeadShape shape : {cuda::HeadShape{96, 2, 128}, {1, 1, 8}, {64, 32, 64}, {71, 1, 512}, {8, 8, 8}})
        for (int64_t rows = 1; rows <= cuda::decodeLaunchRows(shape.kvHeads); rows++) {
            const int64_t heads = rows * shape.heads, chains = rows * shape.kvHeads;
            const cuda::DecodeRing ring = cuda::decodeRing(heads);
            EXPECT_EQ(ring.slots % ring.batch, 0);
            EXPECT_GE(ring.slots / ring.batch, 2);  // one is joined while another is filled
            const int64_t counters = 1 + chains * (1 + ring.slots / ring.batch);
            EXPECT_LE(counters * kInt, static_cast<int64_t>(cuda::kDecodeCounterBytes));
            const auto needed = static_cast<size_t>(cuda::kDecodeCounterBytes +
                                                    kFloat * heads * (ring.slots + 1) * (2 + shape.headDim));
            for (const int64_t most : {rows, int64_t{64}, int64_t{1000}}) {
                EXPECT_GE(cuda::decodeAttentionBytes(most, shape), needed) << rows << " of " << most;
                EXPECT_GE(cuda::decodeAttentionBytes(most, largest), needed) << rows << " of " << most;
            }
        }
}

}  // namespace
