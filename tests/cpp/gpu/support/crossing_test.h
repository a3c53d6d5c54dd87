// What the tests of kernels that exchange data with the CPU share: pinned memory, the counters, a thread that plays the
// CPU, and rows of activations in the forms of both sides.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/rows/crossing.h"

namespace sharpi::cuda {

// Host memory that the device reads and writes. It is poisoned like DeviceArray.
template <typename T> class PinnedArray {
public:
    explicit PinnedArray(size_t count) : _count(count) {
        void* data = nullptr;
        require(cudaHostAlloc(&data, std::max<size_t>(count, 1) * sizeof(T), cudaHostAllocDefault));
        _data = static_cast<T*>(data);
        std::memset(data, 0xff, count * sizeof(T));
    }
    ~PinnedArray() { cudaFreeHost(_data); }
    PinnedArray(const PinnedArray&) = delete;
    PinnedArray& operator=(const PinnedArray&) = delete;

    T* get() const { return _data; }
    T& operator[](size_t i) const { return _data[i]; }
    std::vector<T> read() const { return {_data, _data + _count}; }

private:
    T* _data = nullptr;
    size_t _count;
};

// The counters as each side sees them: one of the device's, and the CPU's for answers and for orders
// (kernels/experts/expert_cache.h).
class Flags {
public:
    Flags() { reset(); }
    void reset() { sentNow().store(0), returnedNow().store(0), instructedNow().store(0); }
    uint32_t* sent() const { return _words.get(); }
    uint32_t* returned() const { return _words.get() + 32; }
    uint32_t* instructed() const { return _words.get() + 64; }
    std::atomic<uint32_t>& sentNow() const { return *reinterpret_cast<std::atomic<uint32_t>*>(sent()); }
    std::atomic<uint32_t>& returnedNow() const { return *reinterpret_cast<std::atomic<uint32_t>*>(returned()); }
    std::atomic<uint32_t>& instructedNow() const { return *reinterpret_cast<std::atomic<uint32_t>*>(instructed()); }
    void abort() const { returnedNow().store(kCrossingAborted), instructedNow().store(kCrossingAborted); }
    // Returns false if the ticket does not come. The device then goes on too.
    bool awaitSent(uint32_t ticket) const {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (sentNow().load(std::memory_order_acquire) < ticket) {
            if (std::chrono::steady_clock::now() < end) continue;
            abort();
            return false;
        }
        return true;
    }

private:
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
    PinnedArray<uint32_t> _words{96};
};

// A thread that is always joined, even if the test fails.
class Host {
public:
    explicit Host(std::function<void()> work) : _thread(std::move(work)) {}
    ~Host() { _thread.join(); }

private:
    std::thread _thread;
};

// Random rows in all forms of both sides. The CPU quantizes them once.
struct Forms {
    int64_t rows, cols;
    std::vector<float> floats;
    std::vector<int8_t> q, deviceQ;  // with a row's elements in order, and with the halves of blocks apart
    std::vector<float> scale;
    std::vector<int16_t> sums;
    std::vector<int32_t> deviceSums;
};

inline Forms formsOf(std::vector<float> floats, int64_t rows, int64_t cols, bool quantized) {
    Forms f{rows, cols, std::move(floats), {}, {}, {}, {}, {}};
    if (!quantized) return f;
    const int64_t blocks = cols / 32;
    f.q.resize(static_cast<size_t>(rows * cols)), f.deviceQ.resize(f.q.size());
    f.scale.resize(static_cast<size_t>(rows * blocks)), f.sums.resize(f.scale.size() * 2);
    // The kernel may write whole groups of 8 blocks.
    const int64_t padded = (cols + 255) / 256 * 256;
    std::vector<int8_t> q(static_cast<size_t>(padded));
    std::vector<float> scale(static_cast<size_t>(padded / 32));
    std::vector<int16_t> sums(static_cast<size_t>(padded / 16));
    for (int64_t t = 0; t < rows; ++t) {
        cpu::kernels().quantizeRow(&f.floats[static_cast<size_t>(t * cols)], cols, q.data(), scale.data(), sums.data());
        std::copy_n(q.begin(), cols, f.q.begin() + t * cols);
        std::copy_n(scale.begin(), blocks, f.scale.begin() + t * blocks);
        std::copy_n(sums.begin(), 2 * blocks, f.sums.begin() + t * 2 * blocks);
        for (int64_t i = 0; i < cols; ++i)
            f.deviceQ[static_cast<size_t>(((t * 2 + i % 32 / 16) * blocks + i / 32) * 16 + i % 16)] =
                q[static_cast<size_t>(i)];
    }
    for (size_t b = 0; b < f.scale.size(); ++b) {
        const uint32_t low = static_cast<uint16_t>(f.sums[2 * b]), high = static_cast<uint16_t>(f.sums[2 * b + 1]);
        f.deviceSums.push_back(static_cast<int32_t>(low | high << 16));
    }
    return f;
}

// The device's arrays, with the contents of `forms` or poisoned.
struct DeviceRows {
    DeviceRows(int64_t rows, int64_t cols)
        : floats(static_cast<size_t>(rows * cols)),
          q(floats.size()),
          scale(static_cast<size_t>(rows * (cols / 32))),
          sums(scale.size()) {}
    explicit DeviceRows(const Forms& f) : floats(f.floats), q(f.deviceQ), scale(f.scale), sums(f.deviceSums) {}
    RowOutputs outputs(bool withFloats, bool withQuantized) const {
        RowOutputs out;
        if (withFloats) out.floats = floats.get();
        if (withQuantized) out.quantized = {q.get(), scale.get(), sums.get()};
        return out;
    }
    DeviceArray<float> floats;
    DeviceArray<int8_t> q;
    DeviceArray<float> scale;
    DeviceArray<int32_t> sums;
};

// The host's arrays, laid out like the CPU's own rows, with a stride larger than the number of columns.
struct PinnedRows {
    PinnedRows(int64_t count, int64_t columns)
        : rows(count),
          cols(columns),
          stride((columns + 255) / 256 * 256 + 256),
          floats(static_cast<size_t>(count * columns)),
          q(static_cast<size_t>(count * stride)),
          scale(static_cast<size_t>(count * stride / 32)),
          sums(static_cast<size_t>(count * stride / 16)) {}
    HostRows host(bool withFloats, bool withQuantized) const {
        HostRows h;
        if (withFloats) h.floats = floats.get();
        if (withQuantized) h.q = q.get(), h.scale = scale.get(), h.sums = sums.get(), h.qStride = stride;
        h.cols = cols;
        return h;
    }
    void fill(const Forms& f, int64_t begin, int64_t end) const {
        for (int64_t t = 0; t < rows; ++t) {
            std::copy_n(&f.floats[static_cast<size_t>(t * cols + begin)], end - begin, floats.get() + t * cols + begin);
            if (f.q.empty()) continue;
            std::copy_n(&f.q[static_cast<size_t>(t * cols + begin)], end - begin, q.get() + t * stride + begin);
            std::copy_n(&f.scale[static_cast<size_t>((t * cols + begin) / 32)], (end - begin) / 32,
                        scale.get() + (t * stride + begin) / 32);
            std::copy_n(&f.sums[static_cast<size_t>((t * cols + begin) / 16)], (end - begin) / 16,
                        sums.get() + (t * stride + begin) / 16);
        }
    }
    const int64_t rows, cols, stride;
    PinnedArray<float> floats;
    PinnedArray<int8_t> q;
    PinnedArray<float> scale;
    PinnedArray<int16_t> sums;
};

struct Range {
    int64_t cols, begin, end;
};
// Copies columns [begin, end) of every row of `from` to `to`.
template <typename T>
void putColumns(std::vector<T>& to, int64_t toRow, const std::vector<T>& from, int64_t fromRow, int64_t begin,
                int64_t end, int64_t rows) {
    for (int64_t t = 0; t < rows; ++t)
        std::copy(from.begin() + t * fromRow + begin, from.begin() + t * fromRow + end, to.begin() + t * toRow + begin);
}

// What `to` must hold after columns of f were sent there.
inline void expectSent(const Forms& f, const Range& range, const PinnedRows& to, bool floats, bool quantized) {
    const PinnedRows poison(f.rows, f.cols);
    std::vector<float> wantFloats = poison.floats.read(), wantScale = poison.scale.read();
    std::vector<int8_t> wantQ = poison.q.read();
    std::vector<int16_t> wantSums = poison.sums.read();
    if (floats) putColumns(wantFloats, f.cols, f.floats, f.cols, range.begin, range.end, f.rows);
    if (quantized) {
        putColumns(wantQ, to.stride, f.q, f.cols, range.begin, range.end, f.rows);
        putColumns(wantScale, to.stride / 32, f.scale, f.cols / 32, range.begin / 32, range.end / 32, f.rows);
        putColumns(wantSums, to.stride / 16, f.sums, f.cols / 16, range.begin / 16, range.end / 16, f.rows);
    }
    EXPECT_TRUE(sameBits(wantFloats, to.floats.read()));
    EXPECT_TRUE(sameBits(wantScale, to.scale.read()));
    EXPECT_TRUE(wantQ == to.q.read());
    EXPECT_TRUE(wantSums == to.sums.read());
}

}  // namespace sharpi::cuda
