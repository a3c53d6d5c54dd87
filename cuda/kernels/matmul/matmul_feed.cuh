// Fills the tiles of the matrix product in shared memory (see matmul_kernel.cuh). RowFeed copies activations, and the
// weight feeds expand packed weights to the operands' type. A weight passes through registers: fetch() starts its
// loads. When they have arrived, hidden behind the tensor cores' work, store() expands the weight into the tile that
// the next step multiplies.
//
// The whole kernel's speed depends on the expansion, since each weight is expanded once for every 64 or 128 rows of x.
// A code below 128 becomes a float by one byte permutation: 0x43cc0000 is 128 + cc. One fma turns that into the value;
// its addend takes off 128 * scale (the error, 2^-17 of the scale, is far below the rounding to bf16 that follows). One
// conversion packs two values. Signed codes take one more subtraction.
#pragma once

#include <algorithm>

#include "device/launch.cuh"
#include "kernels/formats/formats.cuh"
#include "kernels/matmul/matmul.h"
#include "kernels/matmul/mma.cuh"

namespace sharpi::cuda {

// The passes of one product. Bit p says whether pass p multiplies the low halves of x or of w. Only the split form has
// more than one pass. Those with low halves come first, while the sums are small.
struct Passes {
    int count = 1;
    uint32_t lowX = 0, lowW = 0;
};

// A matrix with the same number of rows for each head: see matmulByHead().
struct HeadRowsOfCall {
    int32_t heads = 0;             // 0: no heads
    int32_t begin = 0;             // the part's first row in the whole
    int32_t rowsOfHead = 0;        // of the whole
    int32_t first = 0, count = 1;  // the heads of the part
    int64_t stride = 0;            // from a head's outputs to the next one's
    // Rows that a head, or a matrix without heads, has; tiles of tileN of them; and the grid's last dimension.
    int64_t rowsOf(const PackedShape& shape) const {
        return heads ? std::min<int64_t>(rowsOfHead, shape.rows) : shape.rows;
    }
    int64_t tiles(const PackedShape& shape, int64_t tileN) const { return (rowsOf(shape) + tileN - 1) / tileN; }
    unsigned grids() const { return static_cast<unsigned>(count); }
};

// The tile of a thread block: rows [begin, end) of y, at most kTileT, and the rows of w from firstRow to endRow.
// Element n of a row of y at y + n.
struct TilePlace {
    int64_t begin = 0, end = 0, firstRow = 0, endRow = 0;
    const uint8_t* w = nullptr;
    float* y = nullptr;
    int head = 0;
};

// The arguments of a launch.
struct MatmulCall {
    DType type = DType::F32;
    const uint8_t* w = nullptr;
    PackedShape shape;
    size_t expertStride = 0;
    HalfRows x;
    ExpertGroups groups;  // begin is null if one matrix multiplies all rows
    bool gather = false;
    bool aligned = false;  // rows of x, and of float weights, start at multiples of 16 bytes
    bool add = false;
    int stages = 2;  // activation tiles in shared memory
    Passes passes;
    int64_t rows = 0;
    const float* bias = nullptr;
    float* y = nullptr;
    int64_t stride = 0;  // from a row of y to the next
    HeadRowsOfCall by;
    ExpertIndex which;                 // of w's matrices
    Together order = Together::Alone;  // among the products of several matrices, with Hopper's instructions
    int32_t ahead = 0;                 // blocks of each row of quantized weights that are prefetched into the L2 cache
};

// A step of the pipeline: its step along k, and the halves that it multiplies.
struct Step {
    int k = 0;
    bool lowX = false, lowW = false;
};
template <bool kSplit> __device__ __forceinline__ Step stepAt(const MatmulCall& call, int step, int stepsPerPass) {
    if (!kSplit) return {step, false, false};
    const int pass = step / stepsPerPass;
    return {step - pass * stepsPerPass, (call.passes.lowX >> pass & 1) != 0, (call.passes.lowW >> pass & 1) != 0};
}

// Loads eight 16-bit elements at `from`. Only the first `valid` exist; the others become zero.
__device__ __forceinline__ uint4 loadElements(const uint16_t* from, int valid) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < valid) words[i / 2] |= static_cast<uint32_t>(from[i]) << (i % 2 * 16);
    return {words[0], words[1], words[2], words[3]};
}

// --- activations -------------------------------------------------------------------------------------------------

// The row of x that row `pair` of y reads.
__device__ __forceinline__ int64_t rowOfX(const MatmulCall& call, const TilePlace& place, int64_t pair) {
    return call.gather ? call.groups.pairToken[pair] : call.by.heads ? pair * call.by.heads + place.head : pair;
}

// Copies steps of kTileT rows of x. In place of rows past the tile's end, any rows will do, since their products are
// never stored; they are different ones, because the L2 cache serves all multiprocessors slowly if they all read the
// same few lines. kSkips: such rows are not copied. kAnyCols: rows may begin anywhere. Without it, call.aligned must
// hold.
template <int kThreads, int kTileT, bool kAnyCols, bool kSkips = false> class RowFeed {
    static constexpr int kCopies = kTileT * kRowChunks / kThreads, kRowsApart = kThreads / kRowChunks;
    static_assert(kRowsApart % 8 == 0, "all chunks of a thread are swizzled alike");

public:
    __device__ __forceinline__ RowFeed(const MatmulCall& call, const TilePlace& place)
        : _x(call.x), _cols(static_cast<int>(call.shape.cols)), _aligned(!kAnyCols || call.aligned) {
        const int row = static_cast<int>(threadIdx.x) / kRowChunks;
        _chunk = static_cast<int>(threadIdx.x) % kRowChunks;
        _to = tileOffset(row, _chunk);
        _copies = static_cast<int>(place.end - place.begin + kRowsApart - 1) / kRowsApart;
        const uint32_t chunks = _aligned ? static_cast<uint32_t>(_cols) / 8 : 1;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            const int64_t t = place.begin + row + i * kRowsApart,
                          pair = t < place.end ? t : static_cast<uint32_t>(t) % static_cast<uint32_t>(call.rows);
            _row[i] = static_cast<uint32_t>(rowOfX(call, place, pair)) * chunks;
        }
    }

    __device__ __forceinline__ void copy(uint32_t tile, const Step& step) const {
        const uint16_t* x = step.lowX ? _x.lo : _x.hi;
        const int k = step.k * kTileDepth + _chunk * 8;
        if (_aligned) {
            const bool valid = k < _cols;
            x += valid ? k : 0;
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                if (kSkips && i >= _copies) break;
                copyChunk(tile + _to + i * kRowsApart * kTileRowBytes, x + static_cast<uint64_t>(_row[i]) * 8, valid);
            }
        } else if constexpr (kAnyCols) {
            const int valid = min(_cols - k, 8);
            for (int i = 0; i < kCopies; ++i) {
                if (kSkips && i >= _copies) break;
                storeShared(tile + _to + i * kRowsApart * kTileRowBytes,
                            loadElements(x + static_cast<int64_t>(_row[i]) * _cols + k, valid));
            }
        }
    }

private:
    HalfRows _x;
    int _cols;
    bool _aligned;
    uint32_t _to;
    int _chunk;
    int _copies;             // that have a row of the tile
    uint32_t _row[kCopies];  // in 16-byte chunks from x; the row's number if rows are not aligned
};

// --- weights -----------------------------------------------------------------------------------------------------

// A step of kTileN rows is fetched and stored in kWeightParts parts. Rows past the matrix's last one repeat it.
// `thread` is the number of the caller among the kThreads threads that share the step's work.
template <int kThreads, int kTileN> constexpr int kWeightParts = kTileN * 2 / kThreads;

// Expands one word of codes into two packed pairs: scale * code + addend (see the top of the file).
template <DType T> __device__ __forceinline__ uint2 expandCodes(uint32_t codes, float scale, float addend) {
    float value[4];
    if (Format<T>::kSigned) codes ^= 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (Format<T>::kSigned) {
            const float code =
                __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7440 + i)) - (8388608.0f + 128 + Format<T>::kOffset);
            value[i] = Format<T>::kHasMin ? fmaf(scale, code, addend) : scale * code;
        } else {
            value[i] = fmaf(scale, __uint_as_float(__byte_perm(codes, 0x43000000u, 0x7044 + (i << 8))), addend);
        }
    }
    return {packPair(value[0], value[1]), packPair(value[2], value[3])};
}

// Where a thread's block of 32 goes: half a row of a tile.
struct BlockPlace {
    uint32_t row = 0;  // address
    int swizzle = 0, half = 0;
    __device__ __forceinline__ uint32_t chunk(int i) const {
        return row + (static_cast<uint32_t>((half * 4 + i) ^ swizzle) << 4);
    }
};

// Expands a block. valid: it exists. j: its number modulo 8.
template <DType T>
__device__ __forceinline__ void storeBlock(const typename Format<T>::Raw& raw, int j, bool valid,
                                           const BlockPlace& place) {
    using F = Format<T>;
    const Scales scales = F::scales(raw, j);
    uint32_t codes[8];
    F::codes(raw, codes);
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
        const bool second = F::kTwoScales && chunk >= 2;
        const float sub = static_cast<float>(second ? scales.sub1 : scales.sub0);
        const float scale = valid ? scales.d * sub : 0.0f;
        float addend = -(scale * (F::kSigned ? 0.0f : 128.0f + F::kOffset));
        if (F::kHasMin)
            addend = valid ? fmaf(scales.m, static_cast<float>(second ? scales.min1 : scales.min0), addend) : 0.0f;
        const uint2 first = expandCodes<T>(codes[chunk * 2], scale, addend);
        const uint2 next = expandCodes<T>(codes[chunk * 2 + 1], scale, addend);
        storeShared(place.chunk(chunk), {first.x, first.y, next.x, next.y});
    }
}

// A block as loaded: of type T, or of the call's type if T is kAnyRare.
template <DType T> class LoadedBlock {
public:
    __device__ __forceinline__ void load(DType, const uint8_t* w, const PackedShape& shape, int64_t n) {
        _raw = Format<T>::load(w, shape, n);
    }
    __device__ __forceinline__ void store(DType, int j, bool valid, const BlockPlace& place) const {
        storeBlock<T>(_raw, j, valid, place);
    }

private:
    typename Format<T>::Raw _raw;
};

// The cases of all rare types only load and unpack. What follows is common to them, as no type has a minimum.
template <> class LoadedBlock<kAnyRare> {
public:
    __device__ __forceinline__ void load(DType type, const uint8_t* w, const PackedShape& shape, int64_t n) {
        withRareType(type, [&](auto tag) {
            const auto loaded = Format<decltype(tag)::kType>::load(w, shape, n);
            static_assert(sizeof loaded <= sizeof _raw);
            memcpy(&_raw, &loaded, sizeof loaded);
        });
    }
    __device__ __forceinline__ void store(DType type, int j, bool valid, const BlockPlace& place) const {
        uint32_t codes[8] = {};
        HalfScale scale[2] = {};
        withRareType(type, [&](auto tag) {
            constexpr DType kType = decltype(tag)::kType;
            using F = Format<kType>;
            static_assert(!F::kHasMin);
            typename F::Raw raw;
            memcpy(&raw, &_raw, sizeof raw);
            const Scales scales = F::scales(raw, j);
            scale[0] = halfScale<kType>(scales, 0);
            scale[1] = halfScale<kType>(scales, 1);
            F::codes(raw, codes);
            if constexpr (F::kOffset != 0) subtractFromBytes(codes, F::kOffset);
        });
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
            const float common = valid ? scale[chunk / 2].scale : 0.0f;
            const uint2 first = expandCodes<kAnyRare>(codes[chunk * 2], common, 0.0f);
            const uint2 next = expandCodes<kAnyRare>(codes[chunk * 2 + 1], common, 0.0f);
            storeShared(place.chunk(chunk), {first.x, first.y, next.x, next.y});
        }
    }

private:
    static_assert(Format<kAnyRare>::kSigned && Format<kAnyRare>::kOffset == 0);
    // Makes codes below 128 signed bytes.
    static __device__ __forceinline__ void subtractFromBytes(uint32_t (&codes)[8], uint32_t offset) {
#pragma unroll
        for (int k = 0; k < 8; ++k) codes[k] = ((codes[k] | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
    }

    struct alignas(16) {
        uint32_t words[8];
    } _raw;
};

// Feeds quantized weights. Two neighbouring threads share a row, and each expands one of the step's two blocks, so that
// their loads share memory sectors.
template <DType T, int kThreads, int kTileN> class QuantizedFeed {
public:
    using Loaded = LoadedBlock<T>;

    __device__ __forceinline__ QuantizedFeed(const MatmulCall& call, const uint8_t* w, int64_t firstRow, int thread)
        : _w(w),
          _type(call.type),
          _shape(call.shape),
          _blocks(static_cast<int>(call.shape.cols / 32)),
          _block(thread % 2),
          _row(thread / 2),
          _firstRow(static_cast<int>(firstRow)),
          _lastRow(static_cast<int>(call.shape.rows) - 1) {}

    __device__ __forceinline__ void fetch(Loaded& to, const Step& step, int part, bool) const {
        const int row = min(_firstRow + rowOf(part), _lastRow), block = min(step.k * 2 + _block, _blocks - 1);
        to.load(_type, _w, _shape, static_cast<int64_t>(row) * _blocks + block);
    }

    __device__ __forceinline__ void store(const Loaded& from, uint32_t tile, const Step& step, int part) const {
        const int block = step.k * 2 + _block, row = rowOf(part);
        // The last step may have only one block.
        from.store(_type, block & 7, block < _blocks,
                   {tile + static_cast<uint32_t>(row * kTileRowBytes), row & 7, _block});
    }

private:
    __device__ __forceinline__ int rowOf(int part) const { return _row + part * (kThreads / 2); }

    const uint8_t* _w;
    DType _type;
    const PackedShape& _shape;
    int _blocks, _block, _row, _firstRow, _lastRow;
};

// Elements 2 p and 2 p + 1 of eight of type T.
template <DType T, int kWords> __device__ __forceinline__ float2 pairOf(const uint4 (&raw)[kWords], int p) {
    if constexpr (T == DType::F32) {
        const uint4 four = raw[p / 2];
        return p % 2 ? float2{__uint_as_float(four.z), __uint_as_float(four.w)}
                     : float2{__uint_as_float(four.x), __uint_as_float(four.y)};
    } else {
        const uint32_t word = p == 0 ? raw[0].x : p == 1 ? raw[0].y : p == 2 ? raw[0].z : raw[0].w;
        if constexpr (T == DType::BF16) return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
        else return {floatOfLowHalf(word), floatOfHighHalf(word)};
    }
}

// Eight elements of type T as operands: rounded, or, if `low`, what rounding took from them.
template <DType T, int kWords> __device__ __forceinline__ uint4 expandFloats(const uint4 (&raw)[kWords], bool low) {
    uint32_t pair[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const float2 value = pairOf<T>(raw, p);
        pair[p] = packPair(value.x, value.y);
        if (!low) continue;
        const float2 high = unpackPair(pair[p]);
        pair[p] = packPair(value.x - high.x, value.y - high.y);
    }
    return {pair[0], pair[1], pair[2], pair[3]};
}

// Feeds float weights, whose rows are as in the file. Eight neighbouring threads share a row's step, with 8 elements
// each.
template <DType T, bool kSplit, int kThreads, int kTileN> class FloatFeed {
    static constexpr int kElementBytes = T == DType::F32 ? 4 : 2, kWords = 8 * kElementBytes / 16, kChunks = 4;

public:
    struct Loaded {
        uint4 raw[kChunks][kWords];
    };

    __device__ __forceinline__ FloatFeed(const MatmulCall& call, const uint8_t* w, int64_t firstRow, int thread)
        : _w(w),
          _rows(call.shape.rows),
          _cols(call.shape.cols),
          _firstRow(firstRow),
          _row(thread / kRowChunks),
          _chunk(thread % kRowChunks) {}

    __device__ __forceinline__ void fetch(Loaded& to, const Step& step, int part, bool aligned) const {
        const int64_t k = static_cast<int64_t>(step.k) * kTileDepth + _chunk * 8;
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int64_t row = min(_firstRow + rowOf(part, i), _rows - 1);
            const uint8_t* from = _w + (row * _cols + k) * kElementBytes;
            if (aligned) {
#pragma unroll
                for (int word = 0; word < kWords; ++word)
                    to.raw[i][word] =
                        k < _cols ? __ldg(reinterpret_cast<const uint4*>(from) + word) : uint4{0, 0, 0, 0};
            } else {
                const int valid = k < _cols ? static_cast<int>(min(_cols - k, int64_t{8})) * (kElementBytes / 2) : 0;
#pragma unroll
                for (int word = 0; word < kWords; ++word)
                    to.raw[i][word] =
                        loadElements(reinterpret_cast<const uint16_t*>(from) + word * 8, valid - word * 8);
            }
        }
    }

    __device__ __forceinline__ void store(const Loaded& from, uint32_t tile, const Step& step, int part) const {
#pragma unroll
        for (int i = 0; i < kChunks; ++i)
            storeShared(tile + tileOffset(rowOf(part, i), _chunk), expandFloats<T>(from.raw[i], kSplit && step.lowW));
    }

private:
    __device__ __forceinline__ int rowOf(int part, int i) const {
        return _row + (part * kChunks + i) * (kThreads / kRowChunks);
    }

    const uint8_t* _w;
    int64_t _rows, _cols, _firstRow;
    int _row, _chunk;
};

// One thread prefetches `count` blocks of quantized weights into the L2 cache. first: the first of a superblock.
template <DType T>
__device__ __forceinline__ void fetchBlocksAhead(const MatmulCall& call, const uint8_t* w, uint32_t first,
                                                 int64_t count) {
    const auto fetch = [&](auto tag) {
        using P = PlanesOf<decltype(tag)::kType>;
        P::fetchAhead(P::begin(w, call.shape), first, count);
    };
    if constexpr (T == kAnyRare) withRareType(call.type, fetch);
    else if constexpr (!kIsFloat<T>) fetch(Tag<T>{});
}

template <DType T, bool kSplit, int kThreads, int kTileN, bool kFloat = kIsFloat<T>> struct WeightFeedOf {
    using Type = FloatFeed<T, kSplit, kThreads, kTileN>;
};
template <DType T, bool kSplit, int kThreads, int kTileN> struct WeightFeedOf<T, kSplit, kThreads, kTileN, false> {
    using Type = QuantizedFeed<T, kThreads, kTileN>;
};

}  // namespace sharpi::cuda
