// What the tests of attention share: sequences in pages, on the host and on the device, and the rows of a batch.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/half.h"
#include "cpu/kernels.h"
#include "gpu_test.h"
#include "kernels/attention/attention.h"

namespace sharpi::cuda {

inline constexpr int32_t kPageTokens = 64;

struct Shape {
    KvType type;
    int32_t heads, kvHeads, headDim;
    int32_t valuePrefix = 0;  // see KvPages
    int32_t valueDim() const { return kvValueDim(headDim, valuePrefix); }
};

struct Row {
    int32_t sequence, position;
};

inline std::string nameOf(const Shape& s) {
    return "type " + std::to_string(static_cast<int>(s.type)) + ", heads " + std::to_string(s.heads) + "/" +
           std::to_string(s.kvHeads) + ", dim " + std::to_string(s.headDim) +
           (s.valuePrefix > 0 ? ", values of " + std::to_string(s.valuePrefix) : "");
}

// Sequences of given lengths in shuffled pages, on the host and on the device.
class Cache {
public:
    Cache(const Shape& shape, const std::vector<int32_t>& lengths, int64_t pagesPerTable, unsigned seed)
        : _shape(shape), _pagesPerTable(pagesPerTable) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        const size_t pages = lengths.size() * static_cast<size_t>(pagesPerTable) + 3;
        _tables.resize(pages);
        std::iota(_tables.begin(), _tables.end(), 0);
        std::shuffle(_tables.begin(), _tables.end(), random);
        _spare = _tables.back();
        _tables.resize(pages - 3);
        _k.assign(pages * shape.kvHeads * kPageTokens * shape.headDim * kvElementBytes(shape.type), 0xff);
        _v = _k;
        std::vector<float> head(shape.headDim);
        for (size_t s = 0; s < lengths.size(); s++)
            for (int32_t t = 0; t < lengths[s]; t++)
                for (int32_t h = 0; h < shape.kvHeads; h++)
                    for (std::vector<uint8_t>* to : {&_k, &_v}) {
                        for (float& x : head) x = normal(random);
                        cpu::kernels().storeKv(head.data(), shape.headDim, shape.type,
                                               to->data() + offset(static_cast<int32_t>(s), t, h));
                    }
        upload();
        deviceTables = std::make_unique<DeviceArray<int32_t>>(_tables);
    }

    KvPages pages(uint8_t* k, uint8_t* v) const {
        KvPages pages = {_shape.type, _shape.kvHeads, _shape.headDim, kPageTokens, k, v};
        pages.valuePrefix = _shape.valuePrefix;
        if (pages.valuePrefix > 0) pages.v = nullptr;
        return pages;
    }
    KvPages onDevice() const { return pages(deviceK->get(), deviceV->get()); }
    const int32_t* table(int32_t sequence) const { return _tables.data() + sequence * _pagesPerTable; }
    int64_t pagesPerTable() const { return _pagesPerTable; }

    // Makes a sequence's keys and values in [begin, end) absent: NaN.
    void forget(int32_t sequence, int32_t begin, int32_t end) {
        const size_t bytes = _shape.headDim * kvElementBytes(_shape.type);
        for (int32_t t = begin; t < end; t++)
            for (int32_t h = 0; h < _shape.kvHeads; h++)
                for (std::vector<uint8_t>* of : {&_k, &_v})
                    std::memset(of->data() + offset(sequence, t, h), 0xff, bytes);
        upload();
    }

    // What lies before `position` is given back: keys and values are absent, and the page table's entries lead to a
    // page that belongs to nobody.
    void giveBack(int32_t sequence, int32_t position) {
        forget(sequence, 0, position);
        for (int32_t page = 0; page < position / kPageTokens; page++)
            _tables[sequence * _pagesPerTable + page] = _spare;
        deviceTables = std::make_unique<DeviceArray<int32_t>>(_tables);
    }

    // The CPU kernel's result, for each row on its own.
    std::vector<float> attendOnCpu(const std::vector<float>& q, const std::vector<Row>& rows, float scale) {
        return attendOnCpu(q, rows, AttentionRule{scale, {}});
    }
    // The rule's sinks are on the host.
    std::vector<float> attendOnCpu(const std::vector<float>& q, const std::vector<Row>& rows,
                                   const AttentionRule& rule) {
        const int64_t width = int64_t{_shape.heads} * _shape.headDim,
                      outWidth = int64_t{_shape.heads} * _shape.valueDim();
        std::vector<float> out(rows.size() * outWidth);
        const size_t bytes = cpu::attentionScratchBytes(_shape.heads, _shape.kvHeads, _shape.headDim, kPageTokens);
        std::vector<float> scratch(bytes / 4 + 32);
        void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        for (size_t i = 0; i < rows.size(); i++) {
            cpu::AttentionArgs args;
            args.q = q.data() + i * width;
            args.out = out.data() + i * outWidth;
            args.rowStride = width;
            args.outStride = outWidth;
            args.positions = &rows[i].position;
            args.heads = _shape.heads;
            args.scale = rule.scale;
            args.reach = rule.reach;
            args.softcap = rule.softcap;
            args.sinks = rule.sinks;
            args.pages = pages(_k.data(), _v.data());
            args.pageTable = table(rows[i].sequence);
            for (int32_t h = 0; h < _shape.kvHeads; h++) cpu::kernels().attention(args, h, 0, 1, aligned);
        }
        return out;
    }

    // One head of one row in double precision. sinks: on the host, [heads] or nothing.
    std::vector<double> attendExactly(const double* q, const Row& row, int32_t head, const AttentionRule& rule,
                                      const std::vector<float>& sinks) const {
        const int32_t kvHead = head / (_shape.heads / _shape.kvHeads), first = rule.reach.first(row.position);
        const std::vector<uint8_t>& values = _shape.valuePrefix > 0 ? _k : _v;
        std::vector<double> weights, out(_shape.valueDim(), 0.0);
        const double cap = rule.softcap, sink = sinks.empty() ? -1e300 : sinks[head];
        double top = sink, sum = 0;
        for (int32_t t = first; t <= row.position; t++) {
            const uint8_t* key = _k.data() + offset(row.sequence, t, kvHead);
            double dot = 0;
            for (int32_t d = 0; d < _shape.headDim; d++) dot += q[d] * element(key, d);
            const double score = dot * rule.scale;
            weights.push_back(cap > 0 ? cap * std::tanh(score / cap) : score);
            top = std::max(top, weights.back());
        }
        for (double& w : weights) sum += w = std::exp(w - top);
        if (!sinks.empty()) sum += std::exp(sink - top);
        for (int32_t t = first; t <= row.position; t++) {
            const uint8_t* value = values.data() + offset(row.sequence, t, kvHead);
            for (int32_t d = 0; d < _shape.valueDim(); d++) out[d] += weights[t - first] / sum * element(value, d);
        }
        return out;
    }

    // Where a token's key is, in bytes.
    size_t offset(int32_t sequence, int32_t token, int32_t head) const {
        const size_t page = static_cast<size_t>(table(sequence)[token / kPageTokens]);
        return ((page * _shape.kvHeads + head) * kPageTokens + token % kPageTokens) * _shape.headDim *
               kvElementBytes(_shape.type);
    }

    std::unique_ptr<DeviceArray<uint8_t>> deviceK, deviceV;
    std::unique_ptr<DeviceArray<int32_t>> deviceTables;

private:
    void upload() {
        deviceK = std::make_unique<DeviceArray<uint8_t>>(_k);
        deviceV = std::make_unique<DeviceArray<uint8_t>>(_v);
    }
    float element(const uint8_t* from, int32_t d) const {
        if (_shape.type == KvType::F32) return reinterpret_cast<const float*>(from)[d];
        const uint16_t half = reinterpret_cast<const uint16_t*>(from)[d];
        return _shape.type == KvType::BF16 ? floatFromBf16(half) : floatFromF16(half);
    }

    Shape _shape;
    int64_t _pagesPerTable;
    int32_t _spare = 0;
    std::vector<int32_t> _tables;
    std::vector<uint8_t> _k, _v;
};

// The rows of a batch on the device.
struct DeviceRows {
    DeviceArray<int32_t> positions, sequences;
    BatchRows batch;

    static std::vector<int32_t> positionsOf(const std::vector<Row>& rows) {
        std::vector<int32_t> out;
        for (const Row& row : rows) out.push_back(row.position);
        return out;
    }
    static std::vector<int32_t> sequencesOf(const std::vector<Row>& rows) {
        std::vector<int32_t> out;
        for (const Row& row : rows) out.push_back(row.sequence);
        return out;
    }
    DeviceRows(const std::vector<Row>& rows, const Cache& cache)
        : positions(positionsOf(rows)), sequences(sequencesOf(rows)) {
        batch = {static_cast<int64_t>(rows.size()), positions.get(),       sequences.get(),
                 cache.deviceTables->get(),         cache.pagesPerTable(), cache.pagesPerTable()};
    }
};

// Poisoned, except for the counters, which are zero before and after every call.
class DecodeScratch {
public:
    DecodeScratch(int64_t rows, const HeadShape& shape) : _bytes(decodeAttentionBytes(rows, shape)) {
        require(cudaMemset(_bytes.get(), 0, kDecodeCounterBytes));
        require(cudaDeviceSynchronize());
    }
    void* get() const { return _bytes.get(); }
    bool isReady() const {
        const std::vector<uint8_t> bytes = _bytes.read();
        return std::all_of(bytes.begin(), bytes.begin() + kDecodeCounterBytes, [](uint8_t byte) { return byte == 0; });
    }

private:
    DeviceArray<uint8_t> _bytes;
};

inline float scaleOf(const Shape& shape) { return 1.0f / std::sqrt(static_cast<float>(shape.headDim)); }

}  // namespace sharpi::cuda
