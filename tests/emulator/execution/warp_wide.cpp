// Instructions in which lanes see each other's operands, and those that take registers apart.
#include <immintrin.h>

#include <unordered_map>

#include "execution/block.h"
#include "execution/lanes.h"
#include "execution/operations.h"

namespace sharpi::emulator {

namespace {

// The lanes that an instruction names must all be here: those that took another way would be waited for, and never
// come, since ways meet as early as they can.
void checkMembers(Warp& warp, const Instruction& in, const uint32_t* members) {
    forLanes(warp.exec, [&](int l) {
        const uint32_t missing = members[l] & ~warp.exec & warp.lanes & ~warp.exited;
        if (!(members[l] >> l & 1))
            fault(warp, in, 1u << l, "an instruction of a warp by a lane that it does not name");
        if (missing) fault(warp, in, missing, "an instruction of a warp that names lanes that are elsewhere");
    });
}

enum class Shuffle { Up, Down, Butterfly, Index };

// o: result, value, lane, clamp, members, whether the lane was in range (or none).
template <Shuffle kMode> void shuffle(Warp& warp, const Instruction& in) {
    uint32_t values[kLanes], results[kLanes], valid[kLanes];
    std::memcpy(values, warp.at<const uint32_t>(in.o[1]), sizeof(values));
    const auto* by = warp.at<const uint32_t>(in.o[2]);
    const auto* clamp = warp.at<const uint32_t>(in.o[3]);
    checkMembers(warp, in, warp.at<const uint32_t>(in.o[4]));
    forLanes(warp.exec, [&](int l) {
        const int b = by[l] & 31, c = clamp[l] & 31, segment = clamp[l] >> 8 & 31;
        const int last = (l & segment) | (c & ~segment), first = l & segment;
        int from = l;
        bool inside = true;
        switch (kMode) {
        case Shuffle::Up:
            from = l - b;
            inside = from >= last;
            break;
        case Shuffle::Down:
            from = l + b;
            inside = from <= last;
            break;
        case Shuffle::Butterfly:
            from = l ^ b;
            inside = from <= last;
            break;
        case Shuffle::Index:
            from = first | (b & ~segment);
            inside = from <= last;
            break;
        }
        if (!inside) from = l;
        if (!(warp.exec >> from & 1))
            fault(warp, in, 1u << l, "a shuffle from lane " + std::to_string(from) + ", which is not there");
        results[l] = values[from];
        valid[l] = inside ? ~0u : 0;
    });
    forLanes(warp.exec, [&](int l) {
        warp.at<uint32_t>(in.o[0])[l] = results[l];
        if (in.o[5] != kNone) warp.at<uint32_t>(in.o[5])[l] = valid[l];
    });
}

template <typename Body> void fillResult(Warp& warp, const Instruction& in, Body value) {
    auto* out = warp.at<uint32_t>(in.o[0]);
    uint32_t results[kLanes];
    forLanes(warp.exec, [&](int l) { results[l] = value(l); });
    forLanes(warp.exec, [&](int l) { out[l] = results[l]; });
}

enum class Vote { Ballot, Any, All, Uniform };
// o: result, predicate, members.
template <Vote kVote> void vote(Warp& warp, const Instruction& in) {
    const auto* members = warp.at<const uint32_t>(in.o[2]);
    checkMembers(warp, in, members);
    const uint32_t chosen = lanesOf(warp.at<const uint32_t>(in.o[1])) & warp.exec;
    fillResult(warp, in, [&](int l) -> uint32_t {
        const uint32_t asked = members[l] & warp.exec, yes = chosen & asked;
        if (kVote == Vote::Ballot) return yes;
        const bool result = kVote == Vote::Any   ? yes != 0
                            : kVote == Vote::All ? yes == asked
                                                 : yes == 0 || yes == asked;
        return result ? ~0u : 0;
    });
}

template <typename T> void matchAny(Warp& warp, const Instruction& in) {
    uint64_t values[kLanes];
    for (int l = 0; l < kLanes; ++l) values[l] = warp.at<const LaneWord<T>>(in.o[1])[l];
    const auto* members = warp.at<const uint32_t>(in.o[2]);
    checkMembers(warp, in, members);
    fillResult(warp, in, [&](int l) {
        uint32_t same = 0;
        forLanes(members[l] & warp.exec, [&](int other) { same |= values[other] == values[l] ? 1u << other : 0; });
        return same;
    });
}

struct Sum {
    static uint32_t of(uint32_t a, uint32_t b) { return a + b; }
};
struct LeastSigned {
    static uint32_t of(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b; }
};
struct MostSigned {
    static uint32_t of(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }
};
struct Least {
    static uint32_t of(uint32_t a, uint32_t b) { return a < b ? a : b; }
};
struct Most {
    static uint32_t of(uint32_t a, uint32_t b) { return a > b ? a : b; }
};
struct AllBits {
    static uint32_t of(uint32_t a, uint32_t b) { return a & b; }
};
struct AnyBits {
    static uint32_t of(uint32_t a, uint32_t b) { return a | b; }
};
struct OddBits {
    static uint32_t of(uint32_t a, uint32_t b) { return a ^ b; }
};
// o: result, value, members.
template <typename F> void reduce(Warp& warp, const Instruction& in) {
    const auto* members = warp.at<const uint32_t>(in.o[2]);
    checkMembers(warp, in, members);
    uint32_t values[kLanes];
    std::memcpy(values, warp.at<const uint32_t>(in.o[1]), sizeof(values));
    fillResult(warp, in, [&](int l) {
        uint32_t total = values[l];
        forLanes(members[l] & warp.exec & ~(1u << l), [&](int other) { total = F::of(total, values[other]); });
        return total;
    });
}

void activeLanes(Warp& warp, const Instruction& in) {
    fillResult(warp, in, [&](int) { return warp.exec; });
}

// o: nothing, members.
void meetLanes(Warp& warp, const Instruction& in) { checkMembers(warp, in, warp.at<const uint32_t>(in.o[1])); }

// --- products of matrices -------------------------------------------------------------------------------------------

void checkAllLanes(Warp& warp, const Instruction& in) {
    if (warp.exec != kAllLanes) fault(warp, in, warp.exec, "a product of matrices without all lanes");
}

// 16 rows times 8 columns, with each sum's addend.
template <typename T> void readSums(const Warp& warp, const Operand* c, T (&sums)[16][8]) {
    for (int i = 0; i < 4; ++i) {
        const auto* words = warp.at<const uint32_t>(c[i]);
        for (int l = 0; l < kLanes; ++l) sums[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2] = fromWord<T>(words[l]);
    }
}
template <typename T> void writeSums(const Warp& warp, const Operand* d, const T (&sums)[16][8]) {
    for (int i = 0; i < 4; ++i) {
        auto* words = warp.at<uint32_t>(d[i]);
        for (int l = 0; l < kLanes; ++l) words[l] = toWord<T>(sums[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2]);
    }
}

struct Brain {
    static float of(uint32_t bits) { return fromWord<float>(bits << 16); }
};
struct Half {
    static float of(uint32_t bits) { return _cvtsh_ss(static_cast<uint16_t>(bits)); }
};

// m16n8k16 (kDepth 16) and m16n8k8. Tensor cores round sums in ways of their own, so no test may expect bits of them.
template <typename Format, int kDepth> void productOfHalves(Warp& warp, const Instruction& in) {
    checkAllLanes(warp, in);
    const Operand* d = in.list;
    const Operand* a = d + 4;
    const Operand* b = a + kDepth / 4;
    const Operand* c = b + kDepth / 8;
    alignas(32) float left[16][kDepth], right[kDepth][8], sums[16][8];
    for (int i = 0; i < kDepth / 4; ++i) {
        const auto* words = warp.at<const uint32_t>(a[i]);
        for (int l = 0; l < kLanes; ++l) {
            const int row = l / 4 + 8 * (i % 2), k = 2 * (l % 4) + 8 * (i / 2);
            left[row][k] = Format::of(words[l] & 0xffff);
            left[row][k + 1] = Format::of(words[l] >> 16);
        }
    }
    for (int i = 0; i < kDepth / 8; ++i) {
        const auto* words = warp.at<const uint32_t>(b[i]);
        for (int l = 0; l < kLanes; ++l) {
            const int k = 2 * (l % 4) + 8 * i;
            right[k][l / 4] = Format::of(words[l] & 0xffff);
            right[k + 1][l / 4] = Format::of(words[l] >> 16);
        }
    }
    readSums(warp, c, sums);
    for (int row = 0; row < 16; ++row) {
        __m256 sum = _mm256_load_ps(sums[row]);
        for (int k = 0; k < kDepth; ++k)
            sum = _mm256_fmadd_ps(_mm256_set1_ps(left[row][k]), _mm256_load_ps(right[k]), sum);
        _mm256_store_ps(sums[row], sum);
    }
    writeSums(warp, d, sums);
}

// m16n8k32 and m16n8k16 of int8.
template <int kDepth> void productOfBytes(Warp& warp, const Instruction& in) {
    checkAllLanes(warp, in);
    const Operand* d = in.list;
    const Operand* a = d + 4;
    const Operand* b = a + kDepth / 8;
    const Operand* c = b + kDepth / 16;
    // Pairs of neighbouring k, as 16-bit numbers.
    alignas(32) int16_t left[16][kDepth];
    alignas(32) int16_t right[kDepth / 2][8][2];
    alignas(32) int32_t sums[16][8];
    for (int i = 0; i < kDepth / 8; ++i) {
        const auto* words = warp.at<const uint32_t>(a[i]);
        for (int l = 0; l < kLanes; ++l)
            for (int j = 0; j < 4; ++j)
                left[l / 4 + 8 * (i % 2)][4 * (l % 4) + j + 16 * (i / 2)] = static_cast<int8_t>(words[l] >> (8 * j));
    }
    for (int i = 0; i < kDepth / 16; ++i) {
        const auto* words = warp.at<const uint32_t>(b[i]);
        for (int l = 0; l < kLanes; ++l)
            for (int j = 0; j < 4; ++j)
                right[2 * (l % 4) + j / 2 + 8 * i][l / 4][j % 2] = static_cast<int8_t>(words[l] >> (8 * j));
    }
    readSums(warp, c, sums);
    for (int row = 0; row < 16; ++row) {
        __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(sums[row]));
        for (int k = 0; k < kDepth / 2; ++k) {
            int32_t pair;
            std::memcpy(&pair, &left[row][2 * k], sizeof(pair));
            sum =
                _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_set1_epi32(pair),
                                                        _mm256_load_si256(reinterpret_cast<const __m256i*>(right[k]))));
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(sums[row]), sum);
    }
    writeSums(warp, d, sums);
}

Operation wide(Handler run, int count, int results = 1) {
    Operation made;
    made.run = run;
    made.count = count;
    made.results = results;
    made.bytes.fill(4);
    return made;
}

}  // namespace

void addWarpWide(std::unordered_map<std::string, Operation>& table) {
    table["shfl.sync.up.b32"] = wide(shuffle<Shuffle::Up>, 5);
    table["shfl.sync.down.b32"] = wide(shuffle<Shuffle::Down>, 5);
    table["shfl.sync.bfly.b32"] = wide(shuffle<Shuffle::Butterfly>, 5);
    table["shfl.sync.idx.b32"] = wide(shuffle<Shuffle::Index>, 5);
    for (const std::string order : {"vote.sync.", "vote."}) {
        const std::string end = order == "vote." ? ".sync" : "";
        table[order + "ballot" + end + ".b32"] = wide(vote<Vote::Ballot>, 3);
        table[order + "any" + end + ".pred"] = wide(vote<Vote::Any>, 3);
        table[order + "all" + end + ".pred"] = wide(vote<Vote::All>, 3);
        table[order + "uni" + end + ".pred"] = wide(vote<Vote::Uniform>, 3);
    }
    table["match.any.sync.b32"] = wide(matchAny<uint32_t>, 3);
    table["match.any.sync.b64"] = wide(matchAny<uint64_t>, 3);
    table["match.any.sync.b64"].bytes[1] = 8;
    table["redux.sync.add.s32"] = table["redux.sync.add.u32"] = wide(reduce<Sum>, 3);
    table["redux.sync.min.s32"] = wide(reduce<LeastSigned>, 3);
    table["redux.sync.max.s32"] = wide(reduce<MostSigned>, 3);
    table["redux.sync.min.u32"] = wide(reduce<Least>, 3);
    table["redux.sync.max.u32"] = wide(reduce<Most>, 3);
    table["redux.sync.and.b32"] = wide(reduce<AllBits>, 3);
    table["redux.sync.or.b32"] = wide(reduce<AnyBits>, 3);
    table["redux.sync.xor.b32"] = wide(reduce<OddBits>, 3);
    table["activemask.b32"] = wide(activeLanes, 1);
    table["bar.warp.sync"] = wide(meetLanes, 2, 0);
}

Handler matrixProductHandler(std::string_view name) {
    if (name == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") return productOfHalves<Brain, 16>;
    if (name == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") return productOfHalves<Half, 16>;
    if (name == "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32") return productOfHalves<Half, 8>;
    if (name == "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32") return productOfBytes<32>;
    if (name == "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32") return productOfBytes<16>;
    return nullptr;
}

template <typename Part> void pack(Warp& warp, const Instruction& in) {
    using Whole = std::conditional_t<sizeof(Part) == 2, uint32_t, uint64_t>;
    auto* out = warp.at<Whole>(in.o[0]);
    const auto *low = warp.at<const uint32_t>(in.list[0]), *high = warp.at<const uint32_t>(in.list[1]);
    forLanes(warp.exec, [&](int l) {
        out[l] = static_cast<Whole>(static_cast<Part>(low[l])) | static_cast<Whole>(static_cast<Part>(high[l]))
                                                                     << (8 * sizeof(Part));
    });
}
template <typename Part> void unpack(Warp& warp, const Instruction& in) {
    using Whole = std::conditional_t<sizeof(Part) == 2, uint32_t, uint64_t>;
    const auto* from = warp.at<const Whole>(in.o[0]);
    forLanes(warp.exec, [&](int l) {
        const Whole value = from[l];
        if (in.list[0] != kNone) warp.at<uint32_t>(in.list[0])[l] = static_cast<Part>(value);
        if (in.list[1] != kNone) warp.at<uint32_t>(in.list[1])[l] = static_cast<Part>(value >> (8 * sizeof(Part)));
    });
}
void packHandler16(Warp& warp, const Instruction& in) { pack<uint16_t>(warp, in); }
void packHandler32(Warp& warp, const Instruction& in) { pack<uint32_t>(warp, in); }
void unpackHandler16(Warp& warp, const Instruction& in) { unpack<uint16_t>(warp, in); }
void unpackHandler32(Warp& warp, const Instruction& in) { unpack<uint32_t>(warp, in); }

}  // namespace sharpi::emulator
