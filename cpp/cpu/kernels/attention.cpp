// Causal attention over the paged cache, written once for decode and prefill.
//
// The result for one query row and head is defined page by page, whatever else is in the call, so that pages can be
// computed separately (on a GPU, in parallel) and still give these bits. A row at position t sees the keys from
// reach.first(t) to t. For each page of which it sees a key, over the keys j that it sees, numbered within the page:
//   s[j]  = (q . k[j]) * scale, the dot product by fma over the dimensions in ascending order from +0
//   s[j]  = softcap * tanh(s[j] / softcap) if there is a softcap                          (portableSoftcap)
//   mp    = max s, p[j] = exp(s[j] - mp)                                                  (exp.h)
//   lp    = vec.h's 32-accumulator sum of p, in which the keys of the page that the row does not see add nothing
//   op[d] = fma(p[j], v[j][d], op[d]) for j ascending from +0
// Then the pages of a segment (kSegmentPages, the first from position 0) are joined in ascending order, from m = -inf,
// l = 0, o = 0:
//   m'    = max(m, mp); a = exp(m - m'); c = exp(mp - m')
//   l     = fma(lp, c, l * a); o[d] = fma(op[d], c, o[d] * a)
// The segments are joined in the same way. A row that also sees rows of blocks (CompressorSpec) has these before all
// keys: those that it sees, in ascending order, are cut into pages of pageTokens and segments of kSegmentPages from the
// first on, whatever their numbers are.
// A sink comes last, once:
//   m'    = max(m, sink); a = exp(m - m'); c = exp(sink - m')
//   l     = l * a + c; o[d] = o[d] * a
// The result is o[d] / l (zeros for a row that sees no key). Segments keep short the chain of joins, which no processor
// can run in parallel. They lie at multiples of kSegmentPages even if a row sees only the end of its first one, so a
// key's place in the sums depends on its position alone.
//
// A page's keys are transposed once for a block of query rows, so that a vector holds one dimension of 16 keys (of
// 16-bit keys: two). Scores and outputs are then the same small matrix product, blocked in registers. For many rows the
// page is converted to float first. For few rows the products convert it as they read it, because then most of the time
// goes into moving the page through the caches.
#include "cpu/kernels/exp.h"
#include "cpu/kernels/internal.h"
#include "cpu/kernels/matmul/float_product.h"
#include "cpu/kernels/matmul/transpose.h"

namespace sharpi::cpu::SHARPI_ISA {

// Query rows x heads of the group that share one conversion of a page.
constexpr int64_t kBlock = 128;
constexpr int64_t kMaxPageTokens = 64;

// With at most this many query rows x heads, the products convert the page themselves. 12 and 16 were 8 to 10 % faster
// so with AVX-512 and within 6 % with AVX2; 32 were slower with AVX2.
constexpr int64_t kFewRows = 16;

static int64_t roundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The offsets of the parts of the scratch, in floats; every part starts on a 64-byte boundary.
struct Layout {
    int64_t keyStride, dimStride;  // padded pageTokens and elements of a value
    int64_t turnedKeys, values, scores, partial, outputs, maxima, sums, kept, added;
    int64_t allOutputs, allMaxima, allSums;  // of the earlier segments; the other parts are of the present one
    int64_t total;

    Layout(int64_t headDim, int64_t valueDim, int64_t pageTokens) {
        keyStride = roundUp(pageTokens, 2 * kLanes);
        dimStride = roundUp(valueDim, kLanes);
        int64_t next = 0;
        const auto take = [&next](int64_t floats) {
            const int64_t at = next;
            next += roundUp(floats, kLanes);
            return at;
        };
        turnedKeys = take(roundUp(headDim, kLanes) * keyStride);
        values = take(pageTokens * dimStride);
        scores = take(kBlock * keyStride);
        partial = take(kMaxProductRows * dimStride);
        outputs = take(kBlock * dimStride);
        maxima = take(kBlock);
        sums = take(kBlock);
        kept = take(kBlock);
        added = take(kBlock);
        allOutputs = take(kBlock * dimStride);
        allMaxima = take(kBlock);
        allSums = take(kBlock);
        total = next;
    }
};

size_t attentionScratch(int32_t, int32_t, int32_t headDim, int32_t pageTokens) {
    return static_cast<size_t>(Layout(headDim, headDim, pageTokens).total) * sizeof(float);
}

// Where the lines of a page are: one after another, or wherever `at` says. ahead: as in Right, 0 for nothing.
template <class Read> struct Lines {
    using Element = typename Read::Element;
    const Element* first = nullptr;
    int64_t stride = 0;
    int64_t ahead = 0;
    const Element* const* at = nullptr;
    const Element* of(int64_t j) const { return at ? at[j] : first + j * stride; }
};

// Line j of a page from element d on; prefetches what lies ahead of it once for each 64 bytes.
template <class Read>
SHARPI_INLINE const typename Read::Element* partOf(const Lines<Read>& lines, int64_t j, int64_t d) {
    constexpr int64_t kParts = 64 / (kLanes * static_cast<int64_t>(sizeof(typename Read::Element)));
    const auto* const part = lines.of(j) + d;
    if (lines.ahead && d / kLanes % kParts == 0) prefetch(reinterpret_cast<const uint8_t*>(part) + lines.ahead);
    return part;
}

// The keys [begin, n) of a page, transposed: out[d * keyStride + j]; zeros in the padding of the last 16 keys. begin is
// a multiple of 16.
template <class Read>
static void turnKeys(const Lines<Read>& keys, int64_t begin, int64_t n, int64_t headDim, int64_t keyStride,
                     float* out) {
    for (int64_t j = begin; j < n; j += kLanes) {
        for (int64_t next = 0; next < headDim; next += kLanes) {
            // The last lanes may be some that were done before, once more.
            const int64_t d = next + kLanes <= headDim || headDim < kLanes ? next : headDim - kLanes;
            Vec rows[kLanes];
            if (j + kLanes <= n && d + kLanes <= headDim) {
#pragma GCC unroll 16
                for (int i = 0; i < kLanes; i++) rows[i] = Read::load(partOf(keys, j + i, d));
            } else {
                for (int i = 0; i < kLanes; i++)
                    rows[i] = j + i < n ? loadFirst<Read>(partOf(keys, j + i, d), headDim - d) : vzero();
            }
            storeTransposed(rows, out + d * keyStride + j, keyStride);
        }
    }
}

// The values [begin, n) of a page, of which valueDim elements count.
template <class Read>
static void widenValues(const Lines<Read>& values, int64_t begin, int64_t n, int64_t valueDim, int64_t dimStride,
                        float* out) {
    for (int64_t j = begin; j < n; j++) {
        for (int64_t d = 0; d < valueDim; d += kLanes)
            vstore(out + j * dimStride + d, loadFirst<Read>(partOf(values, j, d), valueDim - d));
    }
}

// The keys [begin, end) of a page; none if begin >= end.
struct Span {
    int64_t begin, end;

    bool empty() const { return begin >= end; }
    // Makes this the smallest span that holds both.
    void cover(const Span& other) {
        if (other.empty()) return;
        if (empty()) *this = other;
        begin = other.begin < begin ? other.begin : begin;
        end = other.end > end ? other.end : end;
    }
};

// One block of query rows x heads against one page after another.
struct Block {
    const AttentionArgs& args;
    const int64_t valueDim;
    const Layout layout;
    float* scratch;
    int64_t count = 0;
    const float* query[kBlock];
    float* out[kBlock];
    int32_t head[kBlock];
    int64_t first[kBlock], keys[kBlock];  // each row sees the positions [first, keys)
    bool begun = false;                   // rows of blocks have been joined before the keys

    Block(const AttentionArgs& arguments, float* memory)
        : args(arguments),
          valueDim(kvValueDim(arguments.pages.headDim, arguments.pages.valuePrefix)),
          layout(arguments.pages.headDim, valueDim, arguments.pages.pageTokens),
          scratch(memory) {}

    float* scores(int64_t i) { return scratch + layout.scores + i * layout.keyStride; }
    float* outputs(int64_t i) { return scratch + layout.outputs + i * layout.dimStride; }
    float* allOutputs(int64_t i) { return scratch + layout.allOutputs + i * layout.dimStride; }
    // What row i sees of the page that begins at firstKey.
    Span visible(int64_t i, int64_t firstKey) const {
        const int64_t begin = first[i] - firstKey, end = keys[i] - firstKey, all = args.pages.pageTokens;
        return {begin < 0 ? 0 : begin, end < all ? end : all};
    }
};

// The factors of the outputs when two parts are joined: of those so far, and of those that are added.
struct Factors {
    float kept, added;
};

static Factors join(float& largest, float& sum, float partLargest, float partSum) {
    const float joined = largest > partLargest ? largest : partLargest;
    const Factors factors = {vlane0(vexp(vset(largest - joined))), vlane0(vexp(vset(partLargest - joined)))};
    sum = fmaExact(partSum, factors.added, sum * factors.kept);
    largest = joined;
    return factors;
}

// Turns the scores of the keys that one row sees into the page's weights, and joins the page's maximum and sum to the
// row's.
static void weighScores(Block& block, int64_t i, Span span) {
    float* s = block.scores(i);
    const int64_t n = span.end, from = span.begin / (2 * kLanes) * (2 * kLanes);  // accumulator 0 takes s[from]
    const Vec scale = vset(block.args.scale), cap = vset(block.args.softcap);
    for (int64_t j = from; j < n; j += kLanes) vstore(s + j, vmul(vload(s + j), scale));
    for (int64_t j = from; block.args.softcap > 0 && j < n; j += kLanes) vstore(s + j, vsoftcap(vload(s + j), cap));
    for (int64_t j = from; j < span.begin; j++) s[j] = -__builtin_inff();
    for (int64_t j = n; j < roundUp(n, 2 * kLanes); j++) s[j] = -__builtin_inff();
    Vec maxima = vset(-__builtin_inff());
    for (int64_t j = from; j < n; j += kLanes) maxima = vmax(maxima, vload(s + j));
    const float top = vmaxLane(maxima);
    Acc32 acc = {vzero(), vzero()};
    for (int64_t j = from; j < n; j += 2 * kLanes) {
        const Vec lo = vexp(vsub(vload(s + j), vset(top)));
        const Vec hi = vexp(vsub(vload(s + j + kLanes), vset(top)));
        vstore(s + j, lo);
        vstore(s + j + kLanes, hi);
        acc = {vadd(acc.lo, lo), vadd(acc.hi, hi)};
    }
    float& largest = block.scratch[block.layout.maxima + i];
    float& sum = block.scratch[block.layout.sums + i];
    const Factors factors = join(largest, sum, top, sum32(acc));
    block.scratch[block.layout.kept + i] = factors.kept;
    block.scratch[block.layout.added + i] = factors.added;
}

// What rows [i, i + rows) of the block see of a page: all of it together, and what every row sees.
struct Spans {
    Span each[kMaxProductRows], any, all;

    Spans(const Block& block, int64_t i, int rows, int64_t firstKey) : any{0, 0}, all{0, 0} {
        for (int r = 0; r < rows; r++) {
            const Span span = each[r] = block.visible(i + r, firstKey);
            if (r == 0) all = span;
            all = {span.begin > all.begin ? span.begin : all.begin, span.end < all.end ? span.end : all.end};
            any.cover(span);
        }
    }
    bool equal() const { return any.begin == all.begin && any.end == all.end; }
};

// Rows [i, i + rows) of the block times a page's values, joined to the rows' outputs. Keys that all rows see are done
// together, those before and after them row by row, so that a row never meets a key that it may not see.
template <class Form>
static void weighValues(Block& block, int64_t i, int rows, const Right& values, const Spans& spans) {
    const Layout& layout = block.layout;
    const int64_t dimStride = layout.dimStride;
    const Product multiply = productOf<Form>(rows);
    const auto from = [&](int64_t key) {
        Right b = values;
        b.first = static_cast<const typename Form::Element*>(values.first) + key * values.stride;
        return b;
    };
    const float *kept = block.scratch + layout.kept + i, *added = block.scratch + layout.added + i;
    const Span all = spans.all;
    const float* weights[kMaxProductRows];
    for (int r = 0; r < rows; r++) weights[r] = block.scores(i + r) + all.begin;
    if (spans.equal()) {
        multiply(weights, all.end - all.begin, from(all.begin), {nullptr, kept, added}, block.outputs(i), dimStride,
                 dimStride);
        return;
    }
    float* partial = block.scratch + layout.partial;
    bool before = false;
    for (int r = 0; r < rows && !all.empty(); r++) before |= spans.each[r].begin < all.begin;
    for (int r = 0; r < rows && before; r++) {
        const int64_t begin = spans.each[r].begin;
        const float* early = block.scores(i + r) + begin;
        product<Form, 1>(&early, all.begin - begin, from(begin), Ends(), partial + r * dimStride, dimStride, dimStride);
    }
    if (!all.empty())
        multiply(weights, all.end - all.begin, from(all.begin), {before ? partial : nullptr, nullptr, nullptr}, partial,
                 dimStride, dimStride);
    for (int r = 0; r < rows; r++) {
        const Span span = spans.each[r];
        if (span.empty()) continue;
        const int64_t begin = all.empty() ? span.begin : all.end;
        const float* rest = block.scores(i + r) + begin;
        product<Form, 1>(&rest, span.end - begin, from(begin),
                         {all.empty() ? nullptr : partial + r * dimStride, kept + r, added + r}, block.outputs(i + r),
                         dimStride, dimStride);
    }
}

// A page's transposed keys and its values, as products read them.
struct Operands {
    Right keys, values;
};

// All rows of the block against a page.
template <class KeyForm, class ValueForm> static void attendPage(Block& block, const Operands& page, int64_t firstKey) {
    const Layout& layout = block.layout;
    Right values = page.values;
    for (int64_t i = 0; i < block.count;) {
        const int rows = productRows(block.count - i);
        const Spans spans(block, i, rows, firstKey);
        if (!spans.any.empty()) {
            const int64_t from = spans.any.begin / kLanes * kLanes;
            Right keys = page.keys;
            keys.first = static_cast<const float*>(keys.first) + from;
            productOf<KeyForm>(rows)(block.query + i, block.args.pages.headDim, keys, Ends(), block.scores(i) + from,
                                     layout.keyStride, roundUp(spans.any.end - from, kLanes));
            for (int r = 0; r < rows; r++)
                if (!spans.each[r].empty()) weighScores(block, i + r, spans.each[r]);
            weighValues<ValueForm>(block, i, rows, values, spans);
            values.ahead = 0;  // has been asked for
        }
        i += rows;
    }
}

// Calls f with the way to read elements of this type.
template <class F> static void withRead(KvType type, const F& f) {
    switch (type) {
    case KvType::F32: return f(ReadF32());
    case KvType::BF16: return f(ReadBf16());
    case KvType::F16: return f(ReadF16());
    }
}

// A page's keys and values as they are stored.
template <class Read> struct Page {
    Lines<Read> keys, values;
};

// The page of the cache at firstKey, for one kv head.
template <class Read> static Page<Read> cachedPage(const Block& block, int32_t kvHead, int64_t firstKey, bool isLast) {
    using Element = typename Read::Element;
    const KvPages& pages = block.args.pages;
    const int32_t* const entry = block.args.pageTable + firstKey / pages.pageTokens;
    const int64_t elements = pages.headDim * static_cast<int64_t>(pages.pageTokens);
    const auto place = [&](int32_t page) { return (static_cast<int64_t>(page) * pages.kvHeads + kvHead) * elements; };
    const bool apart = pages.valuePrefix == 0;
    const int64_t at = place(entry[0]);
    const int64_t ahead = isLast ? 0 : (place(entry[1]) - at) * static_cast<int64_t>(sizeof(Element));
    // Values that are in the keys are fetched with them.
    return {{reinterpret_cast<const Element*>(pages.k) + at, pages.headDim, ahead},
            {reinterpret_cast<const Element*>(apart ? pages.v : pages.k) + at, pages.headDim, apart ? ahead : 0}};
}

// Converts the page once for all rows.
template <class Read> static void attendMany(Block& block, const Page<Read>& page, int64_t firstKey, Span span) {
    const Layout& layout = block.layout;
    float *const turned = block.scratch + layout.turnedKeys, *const values = block.scratch + layout.values;
    turnKeys(page.keys, span.begin / kLanes * kLanes, span.end, block.args.pages.headDim, layout.keyStride, turned);
    widenValues(page.values, span.begin, span.end, block.valueDim, layout.dimStride, values);
    attendPage<Floats, Floats>(block, {{turned, layout.keyStride}, {values, layout.dimStride}}, firstKey);
}

// Multiplies with the values as they are stored, and with keys of 16 bits transposed in pairs.
template <class Read> static void attendFew(Block& block, const Page<Read>& page, int64_t firstKey, Span span) {
    const Layout& layout = block.layout;
    const int64_t begin = span.begin / kLanes * kLanes, headDim = block.args.pages.headDim;
    float* const turned = block.scratch + layout.turnedKeys;
    const Operands operands = {{turned, layout.keyStride}, {page.values.first, page.values.stride, page.values.ahead}};
    if constexpr (sizeof(typename Read::Element) == 2) {
        const Lines<ReadPairs> pairs = {reinterpret_cast<const uint32_t*>(page.keys.first), headDim / 2,
                                        page.keys.ahead};
        turnKeys(pairs, begin, span.end, headDim / 2, layout.keyStride, turned);
        attendPage<Pairs<Read>, Stored<Read>>(block, operands, firstKey);
    } else {
        turnKeys(page.keys, begin, span.end, headDim, layout.keyStride, turned);
        attendPage<Floats, Stored<Read>>(block, operands, firstKey);
    }
}

// All rows of the block against the page at firstKey, of which some row sees `span`.
static void attendCached(Block& block, int32_t kvHead, int64_t firstKey, Span span, bool isLast) {
    // Pairs need lines of an even number of elements, and products read stored values 16 at a time.
    const bool few = block.count <= kFewRows && block.args.pages.headDim % 2 == 0 && block.valueDim % kLanes == 0;
    withRead(block.args.pages.type, [&](auto read) {
        const auto page = cachedPage<decltype(read)>(block, kvHead, firstKey, isLast);
        if (few) attendFew(block, page, firstKey, span);
        else attendMany(block, page, firstKey, span);
    });
}

// A segment's state before its first page.
static void clearState(float& largest, float& sum, float* outputs, int64_t width) {
    largest = -__builtin_inff();
    sum = 0.0f;
    for (int64_t d = 0; d < width; d += kLanes) vstore(outputs + d, vzero());
}

// Writes the result of a row whose segments are all joined.
static void finishRow(Block& block, int64_t i) {
    const Layout& layout = block.layout;
    float* all = block.allOutputs(i);
    float sum = block.scratch[layout.allSums + i];
    if (block.args.sinks) {
        const float largest = block.scratch[layout.allMaxima + i], sink = block.args.sinks[block.head[i]];
        const float joined = largest > sink ? largest : sink;
        const Vec kept = vexp(vset(largest - joined));
        sum = sum * vlane0(kept) + vlane0(vexp(vset(sink - joined)));
        for (int64_t d = 0; d < layout.dimStride; d += kLanes) vstore(all + d, vmul(vload(all + d), kept));
    }
    for (int64_t d = 0; d < block.valueDim; d++) block.out[i][d] = all[d] / sum;
}

// Joins the segment of the keys [firstKey, nextKey) to the earlier ones, for the rows that saw any of it, and writes
// the results of the rows that see no later key, unless more segments come.
static void closeSegment(Block& block, int64_t firstKey, int64_t nextKey, bool more = false) {
    const Layout& layout = block.layout;
    for (int64_t i = 0; i < block.count; i++) {
        if (block.keys[i] <= firstKey || block.first[i] >= nextKey) continue;
        float &largest = block.scratch[layout.maxima + i], &sum = block.scratch[layout.sums + i];
        float &allLargest = block.scratch[layout.allMaxima + i], &allSum = block.scratch[layout.allSums + i];
        float *outputs = block.outputs(i), *all = block.allOutputs(i);
        if (firstKey <= block.first[i] && !block.begun) {  // joining to nothing changes only -0, to +0
            allLargest = largest;
            allSum = sum;
            for (int64_t d = 0; d < layout.dimStride; d += kLanes) vstore(all + d, vadd(vload(outputs + d), vzero()));
        } else {
            const Factors factors = join(allLargest, allSum, largest, sum);
            const Vec kept = vset(factors.kept), added = vset(factors.added);
            for (int64_t d = 0; d < layout.dimStride; d += kLanes)
                vstore(all + d, vfma(vload(outputs + d), added, vmul(vload(all + d), kept)));
        }
        if (more || block.keys[i] > nextKey) clearState(largest, sum, outputs, layout.dimStride);
        else finishRow(block, i);
    }
}

// The keys that some row of the block sees of the page that begins at firstKey.
static Span visibleToAny(const Block& block, int64_t firstKey) {
    Span any = {0, 0};
    for (int64_t i = 0; i < block.count; i++) any.cover(block.visible(i, firstKey));
    return any;
}

static void attendBlock(Block& block, int32_t kvHead) {
    const Layout& layout = block.layout;
    int64_t allKeys = 0, begin = block.first[0];
    for (int64_t i = 0; i < block.count; i++) {
        begin = block.first[i] < begin ? block.first[i] : begin;
        allKeys = block.keys[i] > allKeys ? block.keys[i] : allKeys;
        clearState(block.scratch[layout.maxima + i], block.scratch[layout.sums + i], block.outputs(i),
                   layout.dimStride);
        for (int64_t d = 0; block.keys[i] <= 0 && d < block.valueDim; d++) block.out[i][d] = 0.0f;
    }
    const int64_t pageTokens = block.args.pages.pageTokens, segmentTokens = kSegmentPages * pageTokens;
    begin -= begin % pageTokens;
    Span span = visibleToAny(block, begin);
    for (int64_t firstKey = begin; firstKey < allKeys; firstKey += pageTokens) {
        const int64_t next = firstKey + pageTokens;
        const Span following = next < allKeys ? visibleToAny(block, next) : Span{0, 0};
        if (!span.empty()) attendCached(block, kvHead, firstKey, span, following.empty());
        span = following;
        if (next >= allKeys || next % segmentTokens == 0)
            closeSegment(block, firstKey - firstKey % segmentTokens, next);
    }
}

// All rows of the block against the rows of blocks [begin, end) of those that query row `row` sees.
static void attendBlockRows(Block& block, int64_t row, int64_t begin, int64_t end) {
    const KvPages& blocks = block.args.blocks;
    const int32_t* const chosen = block.args.chosen ? block.args.chosen + row * block.args.topK : nullptr;
    withRead(blocks.type, [&](auto read) {
        using Read = decltype(read);
        using Element = typename Read::Element;
        const Element* at[kMaxPageTokens];
        for (int64_t j = begin; j < end; j++) {
            const int64_t number = chosen ? chosen[j] : j;
            at[j - begin] = reinterpret_cast<const Element*>(blocks.k) + blocks.rowAt(block.args.blockTable, number);
        }
        const Lines<Read> lines{nullptr, 0, 0, at};
        attendMany(block, Page<Read>{lines, lines}, begin, {0, end - begin});
    });
}

// Heads of one query row against the rows of blocks that it sees.
static void attendBlocks(Block& block, int64_t row) {
    const AttentionArgs& args = block.args;
    int64_t count = (static_cast<int64_t>(args.positions[row]) + 1) / args.blocks.rowTokens;
    if (args.chosen && count > args.topK) count = args.topK;
    const int64_t pageTokens = args.pages.pageTokens, segmentTokens = kSegmentPages * pageTokens;
    int64_t first[kBlock], keys[kBlock];
    for (int64_t i = 0; i < block.count; i++) {
        first[i] = block.first[i];
        keys[i] = block.keys[i];
        block.first[i] = 0;
        block.keys[i] = count;
        clearState(block.scratch[block.layout.maxima + i], block.scratch[block.layout.sums + i], block.outputs(i),
                   block.layout.dimStride);
    }
    block.begun = false;
    for (int64_t begin = 0; begin < count; begin += pageTokens) {
        const int64_t next = begin + pageTokens;
        attendBlockRows(block, row, begin, next < count ? next : count);
        if (next >= count || next % segmentTokens == 0) closeSegment(block, begin - begin % segmentTokens, next, true);
    }
    block.begun = count > 0;
    for (int64_t i = 0; i < block.count; i++) {
        block.first[i] = first[i];
        block.keys[i] = keys[i];
    }
}

// Every row of the block.
static void attendAll(Block& block, int32_t kvHead, int64_t row) {
    if (block.args.blocks.k) attendBlocks(block, row);
    attendBlock(block, kvHead);
    block.count = 0;
}

void attention(const AttentionArgs& args, int32_t kvHead, int64_t rowBegin, int64_t rowEnd, void* scratch) {
    const int64_t group = args.heads / args.pages.kvHeads, headDim = args.pages.headDim;
    Block block(args, static_cast<float*>(scratch));
    for (int64_t row = rowBegin; row < rowEnd; row++) {
        for (int64_t g = 0; g < group; g++) {
            const int64_t head = kvHead * group + g;
            block.query[block.count] = args.q + row * args.rowStride + head * headDim;
            block.out[block.count] = args.out + row * args.outStride + head * block.valueDim;
            block.head[block.count] = static_cast<int32_t>(head);
            block.keys[block.count] = static_cast<int64_t>(args.positions[row]) + 1;
            block.first[block.count] = args.positions[row] < 0 ? 0 : args.reach.first(args.positions[row]);
            if (++block.count == kBlock) attendAll(block, kvHead, row);
        }
        // Rows see blocks of their own.
        if (args.blocks.k && block.count > 0) attendAll(block, kvHead, row);
    }
    if (block.count > 0) attendAll(block, kvHead, rowEnd - 1);
}

}  // namespace sharpi::cpu::SHARPI_ISA
