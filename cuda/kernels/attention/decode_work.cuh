// What a warp of the decode kernel works on: pieces of a row's cache, their layout in shared memory, and how they get
// there. See attention_decode.cu.
#pragma once

#include "kernels/attention/attention.cuh"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda::decode {

constexpr int kPageTokens = kAttentionPage;

// The results of the pieces: maxima and sums [rows][heads][slots], and headDim floats of output for each. Before them
// lies a count of finished pieces for each row and head, which is zero between launches. workspace.cpp has their size,
// decodeAttentionBytes, for a slot for each page of the table.
struct Partials {
    uint32_t* finished;
    float *maxima, *sums, *outputs;
};

inline size_t roundUp(size_t bytes) { return (bytes + 255) / 256 * 256; }

inline Partials partialsOver(void* scratch, int64_t rows, int32_t heads, int64_t slots) {
    const size_t each = roundUp(sizeof(float) * static_cast<size_t>(rows * heads * slots));
    auto* bytes = static_cast<uint8_t*>(scratch) + kDecodeCounterBytes;
    return {static_cast<uint32_t*>(scratch), reinterpret_cast<float*>(bytes), reinterpret_cast<float*>(bytes + each),
            reinterpret_cast<float*>(bytes + 2 * each)};
}

// The number of pages up to this position; 0 for a negative one.
__device__ __forceinline__ int pagesOf(int position) { return (position + kPageTokens) / kPageTokens; }

// --- what a block works on ---------------------------------------------------------------------------------------

// The layout of shared memory, in bytes. There are key and value rows only if pages are copied (stages > 0).
struct Layout {
    int rowBytes, keyStride, values, queries, outputs, weights, tops, sums, total;

    __host__ __device__ Layout(int elementBytes, int headDim, int group, int stages) {
        rowBytes = headDim * elementBytes;
        keyStride = stages ? (rowBytes / 16 | 1) * 16 : rowBytes;
        values = stages * kPageTokens * keyStride;
        queries = values + stages * kPageTokens * rowBytes;
        outputs = queries + group * headDim * 4;
        weights = outputs + (stages ? group * headDim * 4 : 0);
        tops = weights + group * kPageTokens * 4;
        sums = tops + 2 * group * 4;
        total = sums + 2 * group * 4;
    }
};

struct Args {
    const float* q;
    HeadShape shape;
    AttentionRule rule;
    BatchRows batch;
    KvPages pages;
    Partials partials;
    RowOutputs out;
    int group;       // heads of a kv head
    int slots;       // places for the results of a head's pieces
    int shortPages;  // rows that see up to this number of pages are cut at pages
};

// How the pages of a row are cut. kPlain: the row sees all positions up to its own.
template <bool kPlain> struct Cut {
    int firstKey, endPage;  // the first position that the row sees, and the page after the last
    int perPiece, pieces;

    // A row that sees no key has one empty piece.
    __device__ Cut(const Args& args, int position) {
        firstKey = kPlain || position < 0 ? 0 : args.rule.reach.first(position);
        endPage = pagesOf(position);
        const int pages = endPage - firstPage();
        const bool isShort = pages <= args.shortPages;
        perPiece = isShort ? 1 : kSegmentPages;
        const int before = firstPage() % kSegmentPages;  // pages of the first segment that the row does not see
        pieces = max(1, isShort ? pages : (before + pages + kSegmentPages - 1) / kSegmentPages);
    }
    __device__ __forceinline__ int firstPage() const { return kPlain ? 0 : firstKey / kPageTokens; }
    // The first page of a piece.
    __device__ __forceinline__ int begin(int piece) const {
        if (kPlain) return piece * perPiece;
        if (perPiece == 1) return firstPage() + piece;
        return max(firstPage(), (firstPage() / kSegmentPages + piece) * kSegmentPages);
    }
    // The number of pages of the piece that begins at this page.
    __device__ __forceinline__ int pagesFrom(int begin) const {
        return min(endPage - begin, kPlain ? perPiece : perPiece - (begin & (perPiece - 1)));
    }
    // The slot of the first piece. The slots of pages of one segment begin at a multiple of kSegmentPages.
    __device__ __forceinline__ int firstSlot() const {
        return kPlain || perPiece > 1 ? 0 : firstPage() % kSegmentPages;
    }
};

// One piece of one kv head of one row.
struct Piece {
    int row, kvHead, index, pages;
    int keys;    // from the piece's first page up to the last that the row sees
    int hidden;  // those at the start of the piece's first page that the row does not see
    int pageId;  // of the lane-th page

    __device__ int keysOf(int page) const { return min(keys - page * kPageTokens, kPageTokens); }
};

// --- copies ------------------------------------------------------------------------------------------------------

// Copies `rows` rows of up to kUnits 16-byte units, contiguous at `from`, to rows that are `stride` bytes apart. A part
// of a warp copies each row.
template <int kUnits>
__device__ __forceinline__ void copyRows(uint32_t to, int stride, const uint8_t* from, int rows, int rowBytes) {
    constexpr int kAbreast = kUnits < 32 ? kUnits : 32;
    const int first = threadIdx.x / kAbreast, column = threadIdx.x % kAbreast * 16, step = blockDim.x / kAbreast;
    to += first * stride + column, from += first * rowBytes + column;
#pragma unroll 2
    for (int row = first; row < rows; row += step) {
#pragma unroll
        for (int at = 0; at < kUnits * 16; at += kAbreast * 16)
            if (column + at < rowBytes) copyChunk(to + at, from + at, true);
        to += step * stride, from += step * rowBytes;
    }
}

__device__ __forceinline__ void copyBytes(uint32_t to, const void* from, int bytes) {
    const auto* at = static_cast<const uint8_t*>(from);
#pragma unroll 2
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) copyChunk(to + i, at + i, true);
}

// Copies a piece's pages into their buffers, in the order in which they are used. Every call closes a group of copies,
// even if it copies nothing, so that the number of pending groups tells what has arrived. The whole block calls it.
template <int kUnits, int kStages> struct Feeder {
    const Args& args;
    const Piece& piece;
    const Layout& layout;
    uint32_t shared;

    __device__ __forceinline__ const uint8_t* place(const uint8_t* base, int page) const {
        const int64_t id = __shfl_sync(kWholeWarp, piece.pageId, page);
        return base + (id * args.shape.kvHeads + piece.kvHead) * kPageTokens * layout.rowBytes;
    }
    __device__ __forceinline__ void keys(int page) const {
        const int at = kStages == 2 ? page & 1 : 0;
        if (page < piece.pages)
            copyRows<kUnits>(shared + at * kPageTokens * layout.keyStride, layout.keyStride, place(args.pages.k, page),
                             piece.keysOf(page), layout.rowBytes);
        closeCopies();
    }
    __device__ __forceinline__ void values(int page) const {
        const int at = kStages == 2 ? page & 1 : 0;
        if (page < piece.pages)
            copyBytes(shared + layout.values + at * kPageTokens * layout.rowBytes, place(args.pages.v, page),
                      piece.keysOf(page) * layout.rowBytes);
        closeCopies();
    }
};

}  // namespace sharpi::cuda::decode
