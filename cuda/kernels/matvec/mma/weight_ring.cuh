// The weights of a warp's next steps in shared memory, plane by plane as they lie in the packed matrix. A warp copies
// them a few steps ahead: registers have room for one step, which takes less time than memory does. It reads them there
// as an mma.sync wants them, each lane four codes of a half of a block, so nothing is unpacked before.
#pragma once

#include "kernels/matvec/mma/mma_instructions.cuh"

namespace sharpi::cuda {

constexpr int kMmaRows = 16;    // weight rows of a tile
constexpr int kMmaColumns = 8;  // rows of activations of a tile

// The steps of a ring: the one that is multiplied, and one that is on its way. A third makes steps no faster, but
// blocks so large that kernels before and after have no room beside them.
constexpr int kRingSteps = 2;
// Rows of a matrix that has a ring are a multiple of this.
constexpr int kRingElements = 256;

// 16 rows of a matrix from `row` on. Those past `last` repeat it: they are computed, and nobody asks for their sums.
template <DType D> struct MmaRows {
    typename Steps<D>::Base base;
    int row, last;
};

// The planes of a block in shared memory.
struct SharedPlanes {
    SharedBytes plane[PackedShape::kPlanes];
};

// What of a block of a common type one lane of a fragment has: words `word` and 4 + word of Format<D>::codes(), for
// word < 4.
template <DType D> struct CodeWords {
    uint32_t low, high;

    static __device__ __forceinline__ CodeWords load(const SharedPlanes& at, int word) {
        if constexpr (D == DType::Q8_0) {
            return {loadWord(at.plane[0] + 4 * word), loadWord(at.plane[1] + 4 * word)};
        } else if constexpr (D == DType::IQ4_NL || D == DType::IQ4_XS || D == DType::MXFP4) {
            constexpr TableWords kTable = tableWords(D == DType::MXFP4 ? kMXFP4Values : kIQ4Values);
            const uint32_t codes = loadWord(at.plane[0] + 4 * word), low = codes & 0x77777777u,
                           bank = ((codes >> 1) & 0x44444444u) | 0x32103210u;
            return {lookUp(kTable, low, bank), lookUp(kTable, low >> 16, bank >> 16)};
        } else if constexpr (D == DType::Q2_K || D == DType::Q3_K) {
            const uint2 codes = loadWords2(at.plane[0]);
            CodeWords c = {turned(codes.x, -2 * word) & 0x03030303u, turned(codes.y, -2 * word) & 0x03030303u};
            if constexpr (D == DType::Q3_K) c.insert<2>(loadWord(at.plane[1]), word);
            return c;
        } else {
            const uint32_t codes = loadWord(at.plane[0] + 4 * word);
            CodeWords c = {codes & 0x0f0f0f0fu, codes >> 4 & 0x0f0f0f0fu};
            if constexpr (D == DType::Q5_0 || D == DType::Q5_1 || D == DType::Q5_K)
                c.insert<4>(loadWord(at.plane[1]), word);
            if constexpr (D == DType::Q6_K) {
                const uint2 high = loadWords2(at.plane[1]);
                c.low |= turned(high.x, 4 - 2 * word) & 0x30303030u;
                c.high |= turned(high.y, 4 - 2 * word) & 0x30303030u;
            }
            return c;
        }
    }

private:
    // Rotated to the left. The bits that come in from the other end are masked by all who call it.
    static __device__ __forceinline__ uint32_t turned(uint32_t bits, int by) {
        return __funnelshift_l(bits, bits, static_cast<uint32_t>(by) & 31);
    }
    // insertBits() for these two words.
    template <int kBit> __device__ __forceinline__ void insert(uint32_t bits, int word) {
        low |= turned(bits, kBit - word) & (0x01010101u << kBit);
        high |= turned(bits, kBit - 4 - word) & (0x01010101u << kBit);
    }
};

// Format<D>::Raw without its codes, for floatScales().
template <DType D> __device__ __forceinline__ typename Format<D>::Raw loadScales(const SharedPlanes& at, int j) {
    typename Format<D>::Raw raw = {};
    const auto& plane = at.plane;
    if constexpr (D == DType::Q4_0 || D == DType::IQ4_NL) raw.scale = loadHalf(plane[1]);
    else if constexpr (D == DType::Q4_1) raw.scale = loadWord(plane[1]);
    else if constexpr (D == DType::MXFP4) raw.scale = loadByte(plane[1]);
    else if constexpr (D == DType::Q5_0 || D == DType::Q8_0) raw.scale = loadHalf(plane[2]);
    else if constexpr (D == DType::Q5_1) raw.scale = loadWord(plane[2]);
    else if constexpr (D == DType::Q2_K) raw.scale = loadHalf(plane[1]), raw.ends = loadWord(plane[2]);
    else if constexpr (D == DType::Q3_K)
        raw.scaleLow = loadWord(plane[2] + (j & 4)), raw.scaleHigh = loadWord(plane[2] + 8), raw.d = loadHalf(plane[3]);
    else if constexpr (D == DType::Q4_K) raw.scale = loadWords4(plane[1]);
    else if constexpr (D == DType::Q5_K) raw.scale = loadWords4(plane[2]);
    else if constexpr (D == DType::Q6_K) raw.scale = loadHalf(plane[2]), raw.d = loadHalf(plane[3]);
    else raw.scale = loadWords2(plane[1]);  // IQ4_XS
    return raw;
}

// kBlocks: neighbouring blocks of a row in a step, 4 or 8. kOwn: the warp's groups of 16 rows. Rows have a multiple of
// kRingElements, so that each row of a step begins at a multiple of what is copied at once.
template <DType D, int kBlocks, int kOwn> class WeightRing {
public:
    using Rows = MmaRows<D>[kOwn];

private:
    using P = PlanesOf<D>;  // of the matrix
    static constexpr int kRows = kMmaRows * kOwn;

    // How a plane lies in a step.
    template <int p> struct Plane {
        static constexpr int kIndex = p, kBytes = P::template kBytes<p>, kOf = P::template kBlocks<p>;
        static constexpr int kUsed = (kBlocks >= kOf ? kBlocks / kOf : 1) * kBytes;  // of a row
        // A copy has at least four bytes. Of a number of two, the word that has it is copied.
        static constexpr bool kIsPart = kUsed == 2;
        static constexpr int kRow = kIsPart ? 4 : kUsed, kPiece = kRow % 16 == 0 ? 16 : kRow % 8 == 0 ? 8 : 4;
        static_assert(kRow % kPiece == 0);
        static constexpr int kPieces = kRow / kPiece, kAll = kBytes == 0 ? 0 : kRows * kPieces;
        static constexpr int begin() {
            if constexpr (p == 0) return 0;
            else return (Plane<p - 1>::begin() + Plane<p - 1>::kAll * Plane<p - 1>::kPiece + 15) / 16 * 16;
        }
        static constexpr int kBegin = begin();
        // Eight lanes that read the same bytes of eight rows find them in different banks, because the numbers of
        // 16-byte pieces are XORed with the row's.
        static constexpr bool kIsSwizzled = kPiece == 16 && kPieces > 1;
        static __device__ __forceinline__ int swizzle(int row) {
            return kIsSwizzled ? row / (8 / kPieces) & (kPieces - 1) : 0;
        }
    };
    // Calls f(Plane<p>{}) for all planes that there are.
    template <int p = 0, typename Visit> static __device__ __forceinline__ void forPlanes(const Visit& f) {
        if constexpr (Plane<p>::kBytes != 0) f(Plane<p>{});
        if constexpr (p + 1 < PackedShape::kPlanes) forPlanes<p + 1>(f);
    }

public:
    static constexpr int kBytes = (Plane<3>::begin() + Plane<3>::kAll * Plane<3>::kPiece + 15) / 16 * 16;  // of a step

    // Begins the copies of blocks [block, block + kBlocks) of each row to shared memory at `to`.
    static __device__ __forceinline__ void copy(uint32_t to, const MmaRows<D> (&rows)[kOwn], int units, int block) {
        const int lane = threadIdx.x % 32;
        forPlanes([&](auto plane) {
            using Q = decltype(plane);
#pragma unroll
            for (int n = 0; n < Q::kAll; n += 32) {
                if (Q::kAll % 32 != 0 && n + lane >= Q::kAll) break;
                const int row = (n + lane) / Q::kPieces, piece = (n + lane) % Q::kPieces;
                // Which group it is of depends on the lane if a row has one piece. Then each number is chosen, since an
                // array that a lane's number indexes would lie in memory.
                const bool isSecond = kOwn == 2 && row >= kMmaRows;
                const auto& low = rows[0];
                const auto& high = rows[kOwn - 1];
                const int begin = isSecond ? high.row - kMmaRows : low.row, last = isSecond ? high.last : low.last;
                const uint32_t first =
                    static_cast<uint32_t>(min(begin + row, last)) * static_cast<uint32_t>(units) + block;
                const uint8_t* from = isSecond ? high.base.plane[Q::kIndex] : low.base.plane[Q::kIndex];
                from += P::template offset<Q::kIndex>(first);
                if (Q::kIsPart) from -= reinterpret_cast<uintptr_t>(from) & 2;
                copyWeights<Q::kPiece>(to + Q::kBegin + (row * Q::kPieces + (piece ^ Q::swizzle(row))) * Q::kPiece,
                                       from + piece * Q::kPiece);
            }
        });
    }
    // The planes of block j of a row, in a step that was copied to `from`. first: the number of the row's first block
    // there in its matrix.
    static __device__ __forceinline__ SharedPlanes at(uint32_t from, int row, int j, uint32_t first) {
        SharedPlanes planes;
        forPlanes([&](auto plane) {
            using Q = decltype(plane);
            const int byte = kBlocks >= Q::kOf ? j / Q::kOf * Q::kBytes : 0;
            uint32_t at = from + Q::kBegin + row * Q::kRow;
            if (Q::kIsSwizzled) at += (byte / 16 ^ Q::swizzle(row)) * 16 + byte % 16;
            else at += byte;
            if (Q::kIsPart) at += P::template offset<Q::kIndex>(first) & 2;
            planes.plane[Q::kIndex].at = at;
        });
        return planes;
    }

private:
    // Nobody else reads these: they leave the L1 cache to activations.
    template <int kCount> static __device__ __forceinline__ void copyWeights(uint32_t to, const uint8_t* from) {
        if constexpr (kCount < 16) copyAsync<kCount>(to, from);
#if __CUDA_ARCH__ >= 800
        else
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                         : "memory");
#endif
    }
};

// Copies the steps of all items to a warp's ring, kSteps ahead, one group of copies for each.
template <class Ring, int kSteps> class RingCopies {
public:
    RingCopies() = default;
    // ring: kSteps * Ring::kBytes of shared memory. block: the first of the warp's blocks in a step. group: the first
    // of its groups. steps: of an item.
    __device__ __forceinline__ RingCopies(uint32_t ring, int units, int block, int group, int items, int steps)
        : _ring(ring), _units(units), _block(block), _group(group), _items(items), _steps(steps) {}

    // Begins the first copies.
    template <typename Place> __device__ __forceinline__ void start(const Place& place) {
        findRows(place);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) next(place);
    }
    // The step in the slot has been multiplied: begins the copies of the one that is kSteps behind it.
    template <typename Place> __device__ __forceinline__ void next(const Place& place) {
        if (_item < _items) {
            const int first = _step * kContractAccumulators + _block;
            if (first < _units) Ring::copy(slot(), _rows, _units, first);
            if (++_step == _steps) {
                _step = 0;
                ++_item;
                findRows(place);
            }
        }
        closeCopies();
        _slot = _slot == (kSteps - 1) * Ring::kBytes ? 0 : _slot + Ring::kBytes;
    }
    // Where the step lies that is multiplied next.
    __device__ __forceinline__ uint32_t slot() const { return _ring + _slot; }

private:
    template <typename Place> __device__ __forceinline__ void findRows(const Place& place) {
        if (_item >= _items) return;
#pragma unroll
        for (int own = 0; own < static_cast<int>(sizeof _rows / sizeof _rows[0]); ++own)
            _rows[own] = place(_item, _group + own);
    }

    uint32_t _ring = 0, _slot = 0;  // _slot: bytes
    int _units = 0, _block = 0, _group = 0, _items = 0, _steps = 0;
    int _item = 0, _step = 0;  // to copy next
    typename Ring::Rows _rows;
};

}  // namespace sharpi::cuda
