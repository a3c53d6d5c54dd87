// The page accounting of the KV cache against a plain model: whatever happens to several sequences, every page belongs
// to one of them or is free, and a refused request changes nothing.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "fake_device.h"
#include "memory/allocator.h"
#include "memory/host_memory.h"
#include "memory/kv_cache.h"
#include "seed.h"

namespace {

using sharpi::Allocator;
using sharpi::Error;
using sharpi::ErrorKind;
using sharpi::FakeDevice;
using sharpi::HostMemory;
using sharpi::KvCache;
using sharpi::KvLayerShape;
using sharpi::KvType;

constexpr int64_t kPage = KvCache::kPageTokens;

int64_t pagesOf(int64_t tokens) { return tokens / kPage + (tokens % kPage != 0 ? 1 : 0); }

// What the cache must report: the sequences' lengths, and pages that never move.
class Model {
public:
    explicit Model(int64_t pages) : _pages(pages) {}
    std::map<int32_t, int64_t> lengths;

    int64_t free() const {
        int64_t used = 0;
        for (const auto& [sequence, length] : lengths) used += pagesOf(length);
        return _pages - used;
    }

    // Every page is in range and has one owner; pages that a sequence keeps do not move.
    void check(const KvCache& cache) {
        ASSERT_EQ(cache.freePages(), free());
        std::set<int32_t> seen;
        for (const auto& [sequence, length] : lengths) {
            ASSERT_EQ(cache.length(sequence), length);
            std::vector<int32_t>& before = _tables[sequence];
            const int64_t count = pagesOf(length);
            const int32_t* table = cache.pageTable(sequence);
            for (int64_t p = 0; p < count; ++p) {
                ASSERT_GE(table[p], 0);
                ASSERT_LT(table[p], _pages);
                ASSERT_TRUE(seen.insert(table[p]).second) << "page " << table[p] << " has two owners";
                if (p < static_cast<int64_t>(before.size())) {
                    ASSERT_EQ(table[p], before[p]) << "page " << p << " moved";
                }
            }
            before.assign(table, table + count);
        }
    }
    void release(int32_t sequence) {
        lengths.erase(sequence);
        _tables.erase(sequence);
    }

private:
    int64_t _pages;
    std::map<int32_t, std::vector<int32_t>> _tables;
};

template <typename Call> void expectError(ErrorKind kind, const Call& call) {
    try {
        call();
        FAIL() << "no error";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), kind) << e.what();
    }
}

TEST(KvCache, AccountsForPagesUnderRandomUse) {
    for (unsigned seed = 0; seed < 20; ++seed) {
        std::mt19937 random(sharpi::testSeed(seed));
        HostMemory memory;
        Allocator allocator(memory);
        const int64_t pages = 1 + random() % 30;
        KvCache cache(allocator, {{2, 8}, {1, 16}}, KvType::F16, pages * kPage);
        Model model(pages);
        int refused = 0;
        for (int round = 0; round < 1000; ++round) {
            const int action = random() % 10;
            if (model.lengths.empty() || (action == 0 && model.lengths.size() < 6)) {
                const int32_t sequence = cache.createSequence();
                ASSERT_EQ(model.lengths.count(sequence), 0u) << "a handle in use was given again";
                model.lengths[sequence] = 0;
            } else {
                auto it = std::next(model.lengths.begin(), random() % model.lengths.size());
                const auto [sequence, length] = *it;
                if (action <= 5) {
                    const int64_t more = random() % (3 * kPage);
                    if (pagesOf(length + more) - pagesOf(length) > model.free()) {
                        ++refused;
                        expectError(ErrorKind::OutOfMemory, [&, s = sequence] { cache.extend(s, more); });
                    } else {
                        cache.extend(sequence, more);
                        it->second += more;
                    }
                } else if (action <= 8) {
                    const int64_t kept = random() % (length + 1);
                    cache.truncate(sequence, kept);
                    it->second = kept;
                } else {
                    const int32_t gone = sequence;
                    cache.releaseSequence(gone);
                    model.release(gone);
                    expectError(ErrorKind::Internal, [&] { cache.length(gone); });
                }
            }
            model.check(cache);
            if (HasFatalFailure()) return;
        }
        EXPECT_GT(refused, 0) << "the cache was never full";
        for (const auto& [sequence, length] : model.lengths) cache.releaseSequence(sequence);
        EXPECT_EQ(cache.freePages(), pages);
    }
}

TEST(KvCache, ARefusedExtensionChangesNothing) {
    HostMemory memory;
    Allocator allocator(memory);
    KvCache cache(allocator, {{1, 4}}, KvType::F32, 3 * kPage);
    const int32_t a = cache.createSequence(), b = cache.createSequence();
    cache.extend(a, kPage + 1);
    const std::vector<int32_t> table(cache.pageTable(a), cache.pageTable(a) + 2);
    expectError(ErrorKind::OutOfMemory, [&] { cache.extend(b, kPage + 1); });
    expectError(ErrorKind::OutOfMemory, [&] { cache.extend(a, 2 * kPage); });
    EXPECT_EQ(cache.length(a), kPage + 1);
    EXPECT_EQ(cache.length(b), 0);
    EXPECT_EQ(std::vector<int32_t>(cache.pageTable(a), cache.pageTable(a) + 2), table);
    EXPECT_EQ(cache.freePages(), 1);
    cache.extend(a, kPage - 1);  // fills the page it has
    EXPECT_EQ(cache.freePages(), 1);
    cache.extend(b, kPage);
    EXPECT_EQ(cache.freePages(), 0);
}

TEST(KvCache, ReservedPagesAreTheNextOnesAndGoBack) {
    HostMemory memory;
    Allocator allocator(memory);
    KvCache cache(allocator, {{1, 4}}, KvType::F32, 4 * kPage);
    const int32_t a = cache.createSequence(), b = cache.createSequence();
    cache.extend(a, kPage - 2);
    EXPECT_TRUE(cache.reserve(a, 2));  // the page it has
    EXPECT_EQ(cache.freePages(), 3);
    EXPECT_TRUE(cache.reserve(a, kPage + 3));
    EXPECT_EQ(cache.freePages(), 1);
    EXPECT_EQ(cache.length(a), kPage - 2);
    const std::vector<int32_t> table(cache.pageTable(a), cache.pageTable(a) + 3);
    EXPECT_EQ(std::set<int32_t>(table.begin(), table.end()).size(), 3u);
    EXPECT_FALSE(cache.reserve(a, 3 * kPage + 3));
    EXPECT_FALSE(cache.reserve(b, kPage + 1));
    EXPECT_EQ(cache.freePages(), 1);
    EXPECT_TRUE(cache.reserve(a, 1));  // fewer than there are: nothing
    EXPECT_EQ(cache.freePages(), 1);
    cache.extend(a, kPage);
    EXPECT_EQ(std::vector<int32_t>(cache.pageTable(a), cache.pageTable(a) + 3), table);
    EXPECT_EQ(cache.truncate(a, cache.length(a)), 2 * kPage - 2);
    EXPECT_EQ(cache.freePages(), 2);
    EXPECT_TRUE(cache.reserve(a, kPage));
    expectError(ErrorKind::OutOfMemory, [&] { cache.extend(b, 2 * kPage); });
    cache.releaseSequence(a);
    EXPECT_EQ(cache.freePages(), 4);
}

TEST(KvCache, TruncatesOnlyToWhatIsThere) {
    HostMemory memory;
    Allocator allocator(memory);
    KvCache cache(allocator, {{1, 4}}, KvType::F32, 2 * kPage);
    const int32_t a = cache.createSequence();
    cache.extend(a, 10);
    expectError(ErrorKind::InvalidArgument, [&] { cache.truncate(a, 11); });
    expectError(ErrorKind::InvalidArgument, [&] { cache.truncate(a, -1); });
    EXPECT_EQ(cache.length(a), 10);
    cache.truncate(a, 10);
    EXPECT_EQ(cache.length(a), 10);
}

TEST(KvCache, UnknownSequencesAreErrors) {
    HostMemory memory;
    Allocator allocator(memory);
    KvCache cache(allocator, {{1, 4}}, KvType::F32, kPage);
    for (const int32_t sequence : {-1, 0, 7}) {
        expectError(ErrorKind::Internal, [&] { cache.length(sequence); });
        expectError(ErrorKind::Internal, [&] { cache.extend(sequence, 1); });
        expectError(ErrorKind::Internal, [&] { cache.truncate(sequence, 0); });
        expectError(ErrorKind::Internal, [&] { cache.releaseSequence(sequence); });
        expectError(ErrorKind::Internal, [&] { cache.pageTable(sequence); });
    }
}

TEST(KvCache, TakesTheBytesItPredicts) {
    const std::vector<KvLayerShape> layers = {{2, 8}, {1, 64}, {4, 6}};
    for (const KvType type : {KvType::F32, KvType::BF16, KvType::F16}) {
        const size_t element = type == KvType::F32 ? 4 : 2;
        for (const int64_t tokens : {int64_t{1}, kPage - 1, kPage, kPage + 1, 5 * kPage}) {
            HostMemory memory;
            Allocator allocator(memory);
            {
                KvCache cache(allocator, layers, type, tokens);
                const size_t expected = 2 * (2 * 8 + 1 * 64 + 4 * 6) * element * pagesOf(tokens) * kPage;
                EXPECT_EQ(cache.bytes(), expected);
                EXPECT_EQ(KvCache::bytesFor(layers, type, tokens), expected);
                EXPECT_EQ(allocator.held(), expected);
            }
            EXPECT_EQ(allocator.held(), 0u);
        }
    }
}

TEST(KvCache, LayersDoNotOverlap) {
    HostMemory memory;
    Allocator allocator(memory);
    const std::vector<KvLayerShape> shapes = {{2, 8}, {1, 64}, {4, 6}};
    const int64_t pages = 3;
    KvCache cache(allocator, shapes, KvType::BF16, pages * kPage);
    std::map<const uint8_t*, const uint8_t*> ranges;
    size_t total = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
        const sharpi::KvPages& layer = cache.layer(i);
        EXPECT_EQ(layer.kvHeads, shapes[i].kvHeads);
        EXPECT_EQ(layer.headDim, shapes[i].headDim);
        EXPECT_EQ(layer.pageTokens, kPage);
        EXPECT_EQ(layer.type, KvType::BF16);
        const size_t bytes = size_t(shapes[i].kvHeads) * shapes[i].headDim * kPage * pages * 2;
        ranges[layer.k] = layer.k + bytes;
        ranges[layer.v] = layer.v + bytes;
        total += 2 * bytes;
    }
    ASSERT_EQ(ranges.size(), 2 * shapes.size());
    const uint8_t* end = ranges.begin()->first;
    for (const auto& [first, last] : ranges) {
        EXPECT_EQ(first, end);  // neither overlap nor gap
        end = last;
    }
    EXPECT_EQ(total, cache.bytes());
}

TEST(KvCache, DoesNotFitSmallMemory) {
    FakeDevice memory(1 << 20, 1 << 16);
    Allocator allocator(memory);
    expectError(ErrorKind::OutOfMemory, [&] { KvCache(allocator, {{1, 4}}, KvType::F32, 1 << 16); });
    EXPECT_EQ(allocator.held(), 0u);
    EXPECT_EQ(memory.freeBytes(), size_t{1} << 20);
    KvCache(allocator, {{1, 4}}, KvType::F32, 1 << 15);  // exactly what there is
}

}  // namespace
