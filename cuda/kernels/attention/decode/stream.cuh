// How pages come to a warp of the deep decode kernel. See attention_decode.cu.
#pragma once

#include "kernels/attention/decode/work.cuh"

namespace sharpi::cuda::decode {

// copyChunk(), of a line of 128 bytes whose other half will be copied soon.
__device__ __forceinline__ void copyOfLine(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
                 : "memory");
#else
    copyChunk(to, from, true);
#endif
}

// A page of one kv head, of which the first `keys` keys are read. start: in elements of the cache.
struct Page {
    int64_t start = 0;
    int keys = 0;
};

// Pages on their way to a warp, in chunks of 4 KiB: 64 bytes of each key at a time, then the values of some keys at a
// time, then the next page. A chunk that has been used makes room for the one that comes a ring later, so that memory
// works while the warp computes. The whole warp calls every function. Lines of keys are 64 bytes apart. The 16-byte
// units of line i are exchanged by i / 2 % 4, so that eight threads that read the same unit of eight keys use all
// banks.
template <class K> class PageStream {
public:
    static constexpr int kRing = 3, kChunk = 4096, kLine = 64;
    static constexpr int kRowBytes = 32 * K::kWidth * kKvBytes<K::kType>;
    static constexpr int kKeyChunks = kRowBytes / kLine, kValueKeys = kChunk / kRowBytes,
                         kValueChunks = kPageTokens / kValueKeys, kChunks = kKeyChunks + kValueChunks;
    static_assert(kRing <= kChunks, "the chunks of a ring are of two pages");

    __device__ PageStream(const KvPages& pages, uint8_t* ring, int lane) : _pages(pages), _ring(ring), _lane(lane) {}

    // Begins with a page. Nothing that is on its way will be used.
    __device__ __forceinline__ void begin(const Page& page) {
        _page = page, _taken = 0;
#pragma unroll
        for (int chunk = 0; chunk < kRing; chunk++) copy(_page, chunk, chunk);
    }
    // Says which page comes after this one, before chunk kChunks - kRing is released.
    __device__ __forceinline__ void setNext(const Page& page) { _next = page; }
    // Goes on to it, after the last chunk.
    __device__ __forceinline__ void advance() { _page = _next; }
    // Returns the next chunk once it has arrived.
    __device__ __forceinline__ const uint8_t* take() const {
        waitForCopies<kRing - 1>();
        __syncwarp();
        return _ring + _taken * kChunk;
    }
    // Chunk `number` of the page has been used.
    __device__ __forceinline__ void release(int number) {
        __syncwarp();
        const int ahead = number + kRing;
        if (ahead < kChunks) copy(_page, ahead, _taken);
        else copy(_next, ahead - kChunks, _taken);
        _taken = _taken + 1 == kRing ? 0 : _taken + 1;
    }

private:
    __device__ __forceinline__ void copy(const Page& page, int chunk, int place) const {
        const uint32_t to = sharedAddress(_ring) + place * kChunk;
        if (chunk < kKeyChunks) copyKeys(to, page, chunk);
        else copyValues(to, page, chunk - kKeyChunks);
        closeCopies();
    }
    __device__ __forceinline__ void copyKeys(uint32_t to, const Page& page, int chunk) const {
        const int unit = _lane & 3, line = _lane >> 2;
        const uint8_t* from = _pages.k + page.start * kKvBytes<K::kType> + line * kRowBytes + chunk * kLine + unit * 16;
        to += line * kLine + ((unit ^ (line >> 1 & 3)) << 4);
        if (page.keys == kPageTokens) {
#pragma unroll
            for (int i = 0; i < kPageTokens; i += 8) copyOfLine(to + i * kLine, from + i * kRowBytes);
            return;
        }
#pragma unroll
        for (int i = 0; i < kPageTokens; i += 8)
            if (line + i < page.keys) copyOfLine(to + i * kLine, from + i * kRowBytes);
    }
    __device__ __forceinline__ void copyValues(uint32_t to, const Page& page, int chunk) const {
        const int first = chunk * kChunk + _lane * 16, bytes = page.keys * kRowBytes - first;
        const uint8_t* from = _pages.v + page.start * kKvBytes<K::kType> + first;
        to += _lane * 16;
        if (page.keys == kPageTokens) {
#pragma unroll
            for (int i = 0; i < kChunk; i += 512) copyOfLine(to + i, from + i);
            return;
        }
#pragma unroll
        for (int i = 0; i < kChunk; i += 512)
            if (i < bytes) copyOfLine(to + i, from + i);
    }

    const KvPages& _pages;
    uint8_t* const _ring;
    const int _lane;
    Page _page, _next;
    int _taken = 0;  // the place of the chunk that is taken next
};

}  // namespace sharpi::cuda::decode
