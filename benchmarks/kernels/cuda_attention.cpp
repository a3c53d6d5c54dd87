// Measures decode's attention on the GPU, without the rest of a layer. Each line is one launch, replayed over copies of
// the cache that exceed the second-level cache together. "share": relative to the speed at which a kernel that only
// reads gets through memory on an H200. Then rows of one text, as an exact prompt has them, by decode's kernel and by
// that for many rows, with the multiply-adds of the latter a second. With an argument, models whose name contains it.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/stream.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/latent_shape.h"
#include "timing.h"

using namespace sharpi;
using namespace sharpi::cuda;

namespace {

constexpr int32_t kPage = 64;

// Device memory, filled with one byte or with what the host has.
template <typename T> struct Buffer {
    Buffer(size_t count, int byte) {
        require(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(T)));
        require(cudaMemset(data, byte, count * sizeof(T)));
    }
    explicit Buffer(const std::vector<T>& host) : Buffer(host.size(), 0) {
        require(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer&) = delete;
    T* data = nullptr;
};

struct Model {
    const char* name;
    HeadShape shape;
    int32_t rank = 0;  // of latents, whose row is the key; 0: values are apart
};

// `rows` rows for each of `sequences` sequences, which end with them at `tokens` tokens.
struct Case {
    int64_t tokens, sequences, rows;
};

// Copies of the cache, and the rows of one step.
class Step {
public:
    Step(const Model& model, const Case& c)
        : _shape(model.shape),
          _rank(model.rank),
          _pages((c.tokens + kPage - 1) / kPage),
          _texts(c.sequences),
          _bytes(static_cast<size_t>(c.sequences * _pages * kPage * _shape.kvHeads * _shape.headDim) * 2),
          _copies(std::max<size_t>(1, std::min<size_t>(64, kBeyondCache / (2 * _bytes)))),
          _k(_bytes * _copies, 0x3c),
          _v(_rank ? 1 : _bytes * _copies, 0x3c),
          _rows(c.sequences * c.rows),
          _q(static_cast<size_t>(_rows * _shape.heads * _shape.headDim), 0),
          _out(static_cast<size_t>(_rows * _shape.heads * _shape.headDim), 0),
          _scratch(_rank ? latentAttentionBytes(_rows, {_shape.heads, _rank, _shape.headDim - _rank, 1})
                         : decodeAttentionBytes(_rows, _shape),
                   0) {
        std::vector<int32_t> table(static_cast<size_t>(c.sequences * _pages)), positions, sequences;
        std::iota(table.begin(), table.end(), 0);
        std::shuffle(table.begin(), table.end(), std::mt19937(1));
        for (int64_t i = 0; i < _rows; i++) {
            positions.push_back(static_cast<int32_t>(c.tokens - c.rows + i % c.rows));
            sequences.push_back(static_cast<int32_t>(i / c.rows));
        }
        std::vector<int32_t> begin, end;
        for (int64_t row = 0; row < _rows; row = end.back()) {
            begin.push_back(static_cast<int32_t>(row));
            end.push_back(static_cast<int32_t>(std::min(row / c.rows * c.rows + c.rows, row + kManyRowsTile)));
        }
        _tileBegin = std::make_unique<Buffer<int32_t>>(begin);
        _tileEnd = std::make_unique<Buffer<int32_t>>(end);
        _tiles = {_tileBegin->data, _tileEnd->data, static_cast<int64_t>(begin.size())};
        _table = std::make_unique<Buffer<int32_t>>(table);
        _positions = std::make_unique<Buffer<int32_t>>(positions);
        _sequences = std::make_unique<Buffer<int32_t>>(sequences);
    }
    // The bytes of the cache that a launch reads.
    size_t bytes() const { return _rank ? _bytes : 2 * _bytes; }
    int launches() const { return static_cast<int>(std::max<size_t>(8, _copies)); }
    // manyRows: by the kernel for many rows of a text.
    void launch(Stream& stream, int number, bool manyRows = false) const {
        const size_t at = static_cast<size_t>(number) % _copies * _bytes;
        KvPages pages = {KvType::BF16, _shape.kvHeads, _shape.headDim, kPage, _k.data + at, _v.data + at};
        pages.valuePrefix = _rank;
        if (_rank) pages.v = nullptr;
        const BatchRows batch = {_rows,
                                 _positions->data,
                                 _sequences->data,
                                 _table->data,
                                 _pages,
                                 _pages,
                                 {_pages, _pages * _texts, _rows / _texts}};
        const RowOutputs out = {_out.data, {}, {}};
        if (manyRows) attentionManyRows(stream, _q.data, _shape, {0.1f, {}}, batch, _tiles, pages, _out.data, out);
        else attentionDecode(stream, _q.data, _shape, {0.1f, {}}, batch, pages, _scratch.data, out);
    }

private:
    HeadShape _shape;
    int32_t _rank;
    int64_t _pages, _texts;
    size_t _bytes, _copies;
    Buffer<uint8_t> _k, _v;
    int64_t _rows;
    Buffer<float> _q, _out;
    Buffer<uint8_t> _scratch;
    std::unique_ptr<Buffer<int32_t>> _table, _positions, _sequences, _tileBegin, _tileEnd;
    QueryTiles _tiles;
};

// The median time, in seconds, of one launch.
double measureLaunch(Stream& stream, const Step& step, bool manyRows = false, int most = 1 << 30) {
    const int launches = std::min(most, step.launches());
    return measure(stream,
                   [&] {
                       for (int i = 0; i < launches; i++) step.launch(stream, i, manyRows);
                   }) /
           launches;
}

void measurePrompts(Stream& stream, const Model& model) {
    for (const Case& c : std::vector<Case>{
             {64, 1, 64}, {512, 1, 512}, {2048, 1, 128}, {2048, 1, 512}, {8192, 1, 512}, {32000, 1, 512}}) {
        const Step step(model, c);
        const double decode = measureLaunch(stream, step, false, 2), many = measureLaunch(stream, step, true, 2);
        const double pairs = static_cast<double>(c.rows) * (c.tokens - c.rows * 0.5);
        std::printf("%-24s %8d %9s %5d %9.0f %8.0f %7.1f T/s\n", model.name, static_cast<int>(c.tokens), "prompt",
                    static_cast<int>(c.rows), decode * 1e6, many * 1e6,
                    2 * pairs * model.shape.heads * model.shape.headDim / many / 1e12);
        std::fflush(stdout);
    }
}

void measureAll(Stream& stream, const std::string& wanted) {
    const std::vector<Model> models = {
        {"32 heads over 8 of 128", {32, 8, 128}},       {"16 heads over 8 of 128", {16, 8, 128}},
        {"16 heads over 16 of 128", {16, 16, 128}},     {"32 heads over 4 of 128", {32, 4, 128}},
        {"32 heads over 2 of 128", {32, 2, 128}},       {"64 heads over 8 of 64", {64, 8, 64}},
        {"16 heads over 2 of 256", {16, 2, 256}},       {"20 heads over a latent", {20, 1, 576}, 512},
        {"128 heads over a latent", {128, 1, 576}, 512}};
    const std::vector<Case> cases = {{256, 1, 1},   {320, 1, 1},   {1024, 1, 1},  {2048, 1, 1},   {4096, 1, 1},
                                     {8192, 1, 1},  {16384, 1, 1}, {32000, 1, 1}, {131072, 1, 1}, {8192, 1, 3},
                                     {32000, 1, 5}, {256, 64, 1},  {2048, 8, 1},  {2048, 64, 1}};
    std::printf("%-24s %8s %9s %5s %9s %8s %9s\n", "bf16 cache", "tokens", "sequences", "rows", "us", "GB/s", "share");
    for (const Model& model : models) {
        if (std::string(model.name).find(wanted) == std::string::npos) continue;
        for (const Case& c : cases) {
            const Step step(model, c);
            const double seconds = measureLaunch(stream, step);
            const double rate = static_cast<double>(step.bytes()) / seconds;
            std::printf("%-24s %8d %9d %5d %9.2f %8.0f %7.1f %%\n", model.name, static_cast<int>(c.tokens),
                        static_cast<int>(c.sequences), static_cast<int>(c.rows), seconds * 1e6, rate / 1e9,
                        100 * rate / kReadBytesPerSecond);
            std::fflush(stdout);
        }
        if (model.rank == 0) measurePrompts(stream, model);
    }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        Stream stream(findDevice(0));
        measureAll(stream, argc > 1 ? argv[1] : "");
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
