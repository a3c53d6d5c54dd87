// Streaming weights: pieces of a mapped file pass through a ring of buffers, launched and replayed. Products read them,
// and show a piece that came too late or was overwritten too early. The pages are pinned, or the system refuses to pin
// them, or there is no memory to pin them.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpu_test.h"
#include "kernels/formats/packed.h"
#include "kernels/matvec/matvec.h"
#include "mapped_test_file.h"
#include "reference_matmul.h"
#include "transfers/cuda_transfers.h"

namespace sharpi::cuda {
namespace {

constexpr int64_t kCols = 512;
constexpr int kRows = 3;

// Matrices with the same rows, as they lie in the file.
struct Group {
    std::vector<Matrix> file;
    int64_t pieceRows = 0;
};

struct Piece {
    std::vector<Matrix> file;  // only the piece's rows
    std::vector<size_t> y;     // where the products of each matrix go
    size_t slotBytes = 0, stageBytes = 0, bytesAt = 0;
    int repeats = 1;      // times that each product is computed, which makes the piece's use longer
    bool copied = false;  // its bytes are copied out too; not always, since no kernel starts early after a copy
};

class CudaTransfersTest : public GpuTest {
protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (!IsSkipped()) makeModel();
    }

    // Streamed and resident matrices alternate in the file, so that neighbours of different classes share pages.
    void makeModel() {
        const std::vector<std::vector<DType>> streamed = {{DType::F32},
                                                          {DType::Q4_K, DType::Q4_K},
                                                          {DType::Q6_K},
                                                          {DType::Q4_K, DType::Q6_K},
                                                          {DType::BF16, DType::Q8_0},
                                                          {DType::Q5_0},
                                                          {DType::Q4_K},
                                                          {DType::Q6_K, DType::F16}};
        const std::vector<DType> residentTypes = {DType::Q6_K, DType::F32, DType::Q4_K, DType::Q8_0};
        std::vector<uint8_t> bytes(100, 0);
        std::vector<std::pair<Matrix*, size_t>> places;
        _streamed.resize(streamed.size());
        _resident.reserve(streamed.size());
        const auto add = [&](Matrix& matrix, DType type, int64_t rows) {
            matrix = {type, rows, kCols, nullptr};
            bytes.resize((bytes.size() + 31) / 32 * 32);
            places.emplace_back(&matrix, bytes.size());
            const std::vector<uint8_t> weights = someWeights(type, rows);
            bytes.insert(bytes.end(), weights.begin(), weights.end());
        };
        for (size_t g = 0; g < streamed.size(); ++g) {
            const int64_t rows = 32 * (6 + static_cast<int64_t>(random()() % 20)) + 7;
            _streamed[g].pieceRows = 32 * (1 + static_cast<int64_t>(random()() % 7));
            _streamed[g].file.resize(streamed[g].size());
            for (size_t m = 0; m < streamed[g].size(); ++m) add(_streamed[g].file[m], streamed[g][m], rows);
            _resident.emplace_back();
            // Every fourth is so large that the streamed matrices around it cannot be pinned as one range.
            add(_resident.back(), residentTypes[g % residentTypes.size()],
                (g % 4 ? 96 : 3200) + static_cast<int64_t>(random()() % 100));
        }
        _file.emplace(bytes);
        for (const auto& [matrix, at] : places) matrix->data = _file->data() + at;
        makePieces();
        makeInput();
    }

    std::vector<uint8_t> someWeights(DType type, int64_t rows) {
        if (!info(type).isFloat) return reference::randomWeights(type, rows, kCols, reference::Fill::Random, random());
        const std::vector<float> values = randomFloats(static_cast<size_t>(rows * kCols));
        std::vector<uint8_t> bytes(rowBytes(type, kCols) * static_cast<size_t>(rows));
        if (type == DType::F32) std::memcpy(bytes.data(), values.data(), bytes.size());
        for (size_t i = 0; type != DType::F32 && i < values.size(); ++i) {
            const uint16_t half = type == DType::F16 ? f16FromFloat(values[i]) : bf16FromFloat(values[i]);
            std::memcpy(&bytes[2 * i], &half, 2);
        }
        return bytes;
    }

    void makePieces() {
        for (const Group& group : _streamed) {
            for (int64_t begin = 0; begin < group.file[0].rows; begin += group.pieceRows) {
                Piece piece;
                piece.bytesAt = _packedBytes;
                piece.copied = random()() % 3 == 0;
                piece.repeats = random()() % 4 ? 1 : 1 + static_cast<int>(random()() % 40);
                for (const Matrix& m : group.file) {
                    const int64_t rows = std::min(group.pieceRows, m.rows - begin);
                    piece.file.push_back(
                        {m.type, rows, kCols, m.data + rowBytes(m.type, kCols) * static_cast<size_t>(begin)});
                    piece.y.push_back(_products);
                    _products += static_cast<size_t>(rows * kRows);
                    piece.slotBytes += Allocator::aligned(packedBytes(m.type, rows, kCols));
                    piece.stageBytes += Allocator::aligned(rowBytes(m.type, kCols) * static_cast<size_t>(rows));
                }
                _packedBytes += piece.slotBytes;
                _slotBytes = std::max(_slotBytes, piece.slotBytes);
                _stageBytes = std::max(_stageBytes, piece.stageBytes);
                _pieces.push_back(piece);
            }
        }
        ASSERT_GT(_pieces.size(), 3u * Transfers::kMostBuffers);
    }

    void makeInput() {
        _x = std::make_unique<DeviceArray<float>>(randomFloats(kRows * kCols));
        _quantized = std::make_unique<DeviceArray<uint8_t>>(quantizedRowsBytes(kRows, kCols));
        RowOutputs forms;
        forms.quantized = quantizedRowsOver(_quantized->get(), kRows, kCols);
        convertRows(stream(), _x->get(), kRows, kCols, forms);
        _input.floats = _x->get();
        _input.quantized = forms.quantized;
    }

    static std::vector<HostRange> rangesOf(const std::vector<Matrix>& matrices) {
        std::vector<HostRange> ranges;
        for (const Matrix& m : matrices)
            ranges.push_back({m.data, rowBytes(m.type, kCols) * static_cast<size_t>(m.rows)});
        return ranges;
    }
    std::vector<HostRange> streamedRanges() const {
        std::vector<Matrix> all;
        for (const Group& group : _streamed) all.insert(all.end(), group.file.begin(), group.file.end());
        return rangesOf(all);
    }

    // A piece's matrices from `at` on, packed.
    static std::vector<Matrix> placed(const Piece& piece, const uint8_t* at) {
        std::vector<Matrix> to;
        for (const Matrix& m : piece.file) {
            to.push_back({m.type, m.rows, m.cols, at});
            at += Allocator::aligned(packedBytes(m.type, m.rows, m.cols));
        }
        return to;
    }
    void multiply(const Piece& piece, const std::vector<Matrix>& weights, float* products) {
        for (int i = 0; i < piece.repeats; ++i)
            for (size_t m = 0; m < weights.size(); ++m)
                matvec(stream(), _input, kRows, {{weights[m], nullptr, products + piece.y[m]}});
    }

    // The results of one pass: the packed bytes of every piece, one after another, and their products.
    struct Results {
        Results(size_t packed, size_t count) : bytes(packed), products(count) {}
        void poison(Stream& stream) {
            require(cudaMemsetAsync(bytes.get(), 0x5a, bytes.size(), stream.handle()));
            require(cudaMemsetAsync(products.get(), 0xff, products.size() * sizeof(float), stream.handle()));
        }
        DeviceArray<uint8_t> bytes;
        DeviceArray<float> products;
    };

    // Computes the expected results, without a ring and without transfers.
    void computeExpected() {
        Results expected(_packedBytes, _products);
        expected.poison(stream());
        const DeviceArray<uint8_t> file(std::vector<uint8_t>(_file->data(), _file->data() + _file->bytes()));
        for (const Piece& piece : _pieces) {
            const std::vector<Matrix> to = placed(piece, expected.bytes.get() + piece.bytesAt);
            for (size_t m = 0; m < to.size(); ++m)
                packRows(stream(), to[m], 0, to[m].rows, file.get() + (piece.file[m].data - _file->data()));
            multiply(piece, to, expected.products.get());
        }
        stream().synchronize();
        _expectedBytes = expected.bytes.read();
        _expectedProducts = expected.products.read();
    }

    // A pass over all pieces: each goes to the next free buffer, is multiplied there, and has its bytes copied out.
    void pass(Transfers& transfers, const DeviceArray<uint8_t>& slots, int count, Results& results) {
        const auto slotOf = [&](size_t piece) { return static_cast<int>(piece % static_cast<size_t>(count)); };
        const auto weightsOf = [&](size_t piece) {
            return placed(_pieces[piece], slots.get() + static_cast<size_t>(slotOf(piece)) * _slotBytes);
        };
        const auto fetch = [&](size_t piece) {
            if (piece >= _pieces.size()) return;
            std::vector<StreamPart> parts;
            const std::vector<Matrix> to = weightsOf(piece);
            for (size_t m = 0; m < to.size(); ++m) parts.push_back({to[m], 0, to[m].rows, _pieces[piece].file[m].data});
            transfers.fetch(parts, slotOf(piece));
        };
        transfers.begin();
        for (int i = 0; i < count; ++i) fetch(static_cast<size_t>(i));
        for (size_t piece = 0; piece < _pieces.size(); ++piece) {
            transfers.await(slotOf(piece));
            const std::vector<Matrix> weights = weightsOf(piece);
            multiply(_pieces[piece], weights, results.products.get());
            for (const Matrix& m : weights) {
                if (!_pieces[piece].copied) break;
                const size_t at = static_cast<size_t>(m.data - weights[0].data);
                require(cudaMemcpyAsync(results.bytes.get() + _pieces[piece].bytesAt + at, m.data,
                                        packedBytes(m.type, m.rows, m.cols), cudaMemcpyDeviceToDevice,
                                        stream().handle()));
            }
            transfers.release(slotOf(piece));
            fetch(piece + static_cast<size_t>(count));
        }
        transfers.end();
    }

    // The bytes between planes and between matrices must not be written.
    void expectResults(const Results& results) {
        ASSERT_TRUE(sameBits(_expectedProducts, results.products.read()));
        const std::vector<uint8_t> bytes = results.bytes.read();
        for (size_t i = 0; i < _pieces.size(); ++i) {
            size_t at = _pieces[i].bytesAt;
            for (const Matrix& m : _pieces[i].file) {
                for (const auto& [begin, count] : _pieces[i].copied ? planesOf(m) : Planes()) {
                    ASSERT_EQ(std::memcmp(&_expectedBytes[at + begin], &bytes[at + begin], count), 0)
                        << "piece " << i << ", " << info(m.type).name;
                }
                at += Allocator::aligned(packedBytes(m.type, m.rows, m.cols));
            }
        }
    }
    // The offset and the size of each plane of a packed matrix.
    using Planes = std::vector<std::pair<size_t, size_t>>;
    static Planes planesOf(const Matrix& m) {
        const PackedShape shape = packedShape(m.type, m.rows, m.cols);
        const PlaneSizes sizes = planeSizes(m.type);
        if (info(m.type).isFloat) return {{0, rowBytes(m.type, m.cols) * static_cast<size_t>(m.rows)}};
        Planes planes;
        for (int p = 0; p < PackedShape::kPlanes; ++p)
            planes.emplace_back(shape.plane[p], m.rows * (m.cols / 32) / sizes.plane[p].blocks * sizes.plane[p].bytes);
        return planes;
    }

    // Several passes of `count` slots, launched, or recorded and replayed.
    void runPasses(CudaTransfers& transfers, int count, int passes, bool replayed) {
        SCOPED_TRACE(std::to_string(count) + (replayed ? " slots, replayed" : " slots, launched"));
        const DeviceArray<uint8_t> slots(static_cast<size_t>(count) * _slotBytes);
        Results results(_packedBytes, _products);
        std::unique_ptr<Graph> graph;
        for (int i = 0; i < passes; ++i) {
            results.poison(stream());
            require(cudaMemsetAsync(slots.get(), 0x33, slots.size(), stream().handle()));
            if (replayed && i > 0) {  // the first pass loads the kernels
                if (!graph) graph = stream().capture([&] { pass(transfers, slots, count, results); });
                stream().replay(*graph);
            } else {
                pass(transfers, slots, count, results);
            }
            stream().synchronize();
            expectResults(results);
            if (HasFatalFailure()) {
                ADD_FAILURE() << "in pass " << i;
                return;
            }
        }
    }

    // Uploads the resident matrices, a few rows at a time, and compares them with the packed matrices of the file.
    void uploadResident(CudaTransfers& transfers) {
        const DeviceArray<uint8_t> file(std::vector<uint8_t>(_file->data(), _file->data() + _file->bytes()));
        std::vector<std::unique_ptr<DeviceArray<uint8_t>>> arrived, expected;
        transfers.begin();
        int number = 0;
        for (const Matrix& m : _resident) {
            const size_t bytes = packedBytes(m.type, m.rows, kCols);
            arrived.push_back(std::make_unique<DeviceArray<uint8_t>>(bytes));
            expected.push_back(std::make_unique<DeviceArray<uint8_t>>(bytes));
            packRows(stream(), {m.type, m.rows, kCols, expected.back()->get()}, 0, m.rows,
                     file.get() + (m.data - _file->data()));
            const Matrix to{m.type, m.rows, kCols, arrived.back()->get()};
            for (int64_t begin = 0; begin < m.rows; begin += 40) {
                const int slot = number++ % Transfers::kMostBuffers;
                transfers.fetch({{to, begin, std::min<int64_t>(40, m.rows - begin),
                                  m.data + rowBytes(m.type, kCols) * static_cast<size_t>(begin)}},
                                slot);
                transfers.await(slot);
                transfers.release(slot);
            }
        }
        transfers.end();
        stream().synchronize();
        for (size_t i = 0; i < _resident.size(); ++i)
            EXPECT_EQ(expected[i]->read(), arrived[i]->read()) << "matrix " << i;
    }

    static bool canPin(const Matrix& m) { return cuda::canPin(m.data); }

    DeviceArray<uint8_t> staging() const { return DeviceArray<uint8_t>(kTransferStages * _stageBytes); }
    void prepare(CudaTransfers& transfers, const DeviceArray<uint8_t>& staging) {
        transfers.prepare({streamedRanges(), rangesOf(_resident), {}}, staging.get(), _stageBytes);
    }

    std::vector<Group> _streamed;
    std::vector<Matrix> _resident;
    std::optional<TemporaryFile> _file;
    std::vector<Piece> _pieces;
    size_t _products = 0, _packedBytes = 0, _slotBytes = 0, _stageBytes = 0;
    std::unique_ptr<DeviceArray<float>> _x;
    std::unique_ptr<DeviceArray<uint8_t>> _quantized;
    MatvecInput _input;
    std::vector<uint8_t> _expectedBytes;
    std::vector<float> _expectedProducts;
};

TEST_F(CudaTransfersTest, PiecesPassThroughFewSlots) {
    computeExpected();
    const DeviceArray<uint8_t> stages = staging();
    CudaTransfers transfers(stream());
    prepare(transfers, stages);
    EXPECT_TRUE(transfers.notes().empty()) << transfers.notes()[0];
    for (const int slots : {2, Transfers::kMostBuffers}) {
        runPasses(transfers, slots, 6, false);
        runPasses(transfers, slots, 51, true);
    }
}

// Passes without a wait between them: each begins after the end of the one before.
TEST_F(CudaTransfersTest, PassesFollowEachOther) {
    computeExpected();
    const DeviceArray<uint8_t> stages = staging(), slots(2 * _slotBytes);
    CudaTransfers transfers(stream());
    prepare(transfers, stages);
    Results launched(_packedBytes, _products), replayed(_packedBytes, _products);
    pass(transfers, slots, 2, replayed);
    const std::unique_ptr<Graph> graph = stream().capture([&] { pass(transfers, slots, 2, replayed); });
    launched.poison(stream());
    replayed.poison(stream());
    for (int i = 0; i < 10; ++i) {
        if (random()() % 2) stream().replay(*graph);
        if (random()() % 2) pass(transfers, slots, 2, launched);
    }
    pass(transfers, slots, 2, launched);
    stream().replay(*graph);
    stream().synchronize();
    expectResults(launched);
    expectResults(replayed);
}

TEST_F(CudaTransfersTest, ResidentMatricesArriveAndAreLetGo) {
    const DeviceArray<uint8_t> stages = staging();
    {
        CudaTransfers transfers(stream());
        prepare(transfers, stages);
        EXPECT_FALSE(canPin(_resident[0]));
        EXPECT_FALSE(canPin(_streamed[0].file[0]));
        uploadResident(transfers);
        transfers.finishOnce();
        EXPECT_TRUE(canPin(_resident[0]));
        EXPECT_FALSE(canPin(_streamed[0].file[0]));
    }
    for (const Matrix& m : _resident) EXPECT_TRUE(canPin(m));
    for (const Group& group : _streamed) EXPECT_TRUE(canPin(group.file[0]));
    // Everything once more: no range may have stayed pinned.
    CudaTransfers transfers(stream());
    prepare(transfers, stages);
    EXPECT_TRUE(transfers.notes().empty());
}

// A kernel reads single rows of the file in place.
TEST_F(CudaTransfersTest, KernelsReadTheFile) {
    for (const bool pinned : {true, false}) {
        std::optional<NoPinning> off;
        if (!pinned) off.emplace();
        const DeviceArray<uint8_t> stages = staging();
        CudaTransfers transfers(stream());
        prepare(transfers, stages);
        const Matrix& m = _streamed[1].file[0];
        const DeviceArray<uint8_t> copy(
            std::vector<uint8_t>(m.data, m.data + rowBytes(m.type, kCols) * static_cast<size_t>(m.rows)));
        const DeviceArray<float> expected(static_cast<size_t>(m.rows * kRows)), y(static_cast<size_t>(m.rows * kRows));
        matvecReference(stream(), _input, kRows, {m.type, m.rows, kCols, copy.get()}, nullptr, expected.get());
        const uint8_t* const reachable = transfers.reachable(m.data, fileBytes(m));
        ASSERT_NE(reachable, nullptr);
        matvecReference(stream(), _input, kRows, {m.type, m.rows, kCols, reachable}, nullptr, y.get());
        EXPECT_TRUE(sameBits(expected.read(), y.read()));
        EXPECT_EQ(transfers.reachable(_file->data() + _file->bytes() + (size_t{64} << 20), 1), nullptr);
    }
}

TEST_F(CudaTransfersTest, WhatCannotBePinnedIsCopied) {
    computeExpected();
    const NoPinning off;
    const DeviceArray<uint8_t> stages = staging();
    CudaTransfers transfers(stream());
    prepare(transfers, stages);
    ASSERT_EQ(transfers.notes().size(), 1u);
    EXPECT_NE(transfers.notes()[0].find("a pinned copy"), std::string::npos) << transfers.notes()[0];
    EXPECT_NE(transfers.notes()[0].find("MiB"), std::string::npos);
    EXPECT_TRUE(canPin(_streamed[0].file[0]));
    uploadResident(transfers);
    transfers.finishOnce();
    for (const int slots : {2, Transfers::kMostBuffers}) {
        runPasses(transfers, slots, 2, false);
        runPasses(transfers, slots, 4, true);
    }
}

// Optional ranges are pinned as far as memory allows; all of them can be fetched.
TEST_F(CudaTransfersTest, PiecesComeFromPagesThatAreNotPinned) {
    computeExpected();
    const DeviceArray<uint8_t> stages = staging();
    const std::vector<HostRange> streamed = streamedRanges();
    size_t bytes = 0;
    for (const HostRange& range : streamed) bytes += range.bytes;
    for (const size_t room : {16 * _file->bytes(), bytes, size_t{0}}) {
        SCOPED_TRACE(room);
        CudaTransfers transfers(stream(), [=] { return MemoryRoom{room, room}; });
        transfers.prepare({{}, rangesOf(_resident), streamed}, stages.get(), _stageBytes);
        const auto read = std::count_if(streamed.begin(), streamed.end(),
                                        [&](const HostRange& r) { return transfers.reachable(r.begin, r.bytes); });
        const auto most = static_cast<int64_t>(streamed.size());
        EXPECT_TRUE(room == 0       ? read == 0
                    : room == bytes ? read > 0 && read < most
                                    : read == most)
            << read << " of " << most;
        EXPECT_EQ(transfers.notes().size(), read == most ? 0u : 1u);
        EXPECT_EQ(transfers.files().reachable(streamed[0].begin, 1), transfers.reachable(streamed[0].begin, 1));
        uploadResident(transfers);
        transfers.finishOnce();
        for (const int slots : {2, Transfers::kMostBuffers}) runPasses(transfers, slots, 4, false);
    }
    for (const Group& group : _streamed) EXPECT_TRUE(canPin(group.file[0]));
}

// For more memory than any machine has there is one clear error, and nothing stays pinned.
TEST_F(CudaTransfersTest, TooMuchToPinIsOneError) {
    const uint64_t size = uint64_t{8} << 40;
    std::optional<TemporaryFile> huge;
    try {
        huge.emplace(std::vector<uint8_t>(1, 0), size);
    } catch (const std::exception&) {
        GTEST_SKIP() << "no file of 8 TiB, not even an empty one, can be mapped here";
    }
    // Most likely mapped at a lower address, and so pinned before the failure.
    const TemporaryFile later({1}, size_t{64} << 20);
    const Matrix inLater{DType::F32, 1, kCols, later.data()};
    std::vector<HostRange> always = streamedRanges();
    always.push_back({huge->data(), huge->bytes()});
    always.push_back({later.data(), later.bytes()});
    for (const bool pinned : {true, false}) {
        std::optional<NoPinning> off;
        if (!pinned) off.emplace();
        CudaTransfers transfers(stream());
        try {
            transfers.prepare({always, rangesOf(_resident), {}}, nullptr, 0);
            FAIL() << "8 TiB were pinned";
        } catch (const Error& error) {
            EXPECT_EQ(error.kind(), ErrorKind::OutOfMemory);
            const std::string what = error.what();
            EXPECT_NE(what.find(std::to_string(size)), std::string::npos) << what;
            EXPECT_NE(what.find("ulimit -l"), std::string::npos) << what;
        }
        for (const Group& group : _streamed) EXPECT_TRUE(canPin(group.file[0]));
        EXPECT_TRUE(canPin(inLater));
    }
}

TEST_F(CudaTransfersTest, APassGivenUpDoesNotDisturbTheNext) {
    computeExpected();
    const DeviceArray<uint8_t> stages = staging(), slots(2 * _slotBytes);
    CudaTransfers transfers(stream());
    prepare(transfers, stages);
    // Leaves much work in the streams.
    const auto giveUp = [&] {
        transfers.begin();
        for (size_t i = 0; i < 200; ++i) {
            const Matrix& m = _pieces[i % _pieces.size()].file[0];
            transfers.fetch({{{m.type, m.rows, kCols, slots.get() + i % 2 * _slotBytes}, 0, m.rows, m.data}},
                            static_cast<int>(i % 2));
        }
        throw std::runtime_error("given up");
    };
    Results results(_packedBytes, _products);
    pass(transfers, slots, 2, results);
    const std::unique_ptr<Graph> graph = stream().capture([&] { pass(transfers, slots, 2, results); });
    for (int turn = 0; turn < 12; ++turn) {
        results.poison(stream());
        const bool captured = random()() % 3 == 0, replayed = random()() % 2;
        if (captured) EXPECT_THROW(stream().capture(giveUp), std::runtime_error);
        else EXPECT_THROW(giveUp(), std::runtime_error);
        if (replayed) {
            transfers.settle();  // as begin() does
            stream().replay(*graph);
        } else {
            pass(transfers, slots, 2, results);
        }
        stream().synchronize();
        expectResults(results);
    }
}

TEST_F(CudaTransfersTest, WrongUseIsRefused) {
    const DeviceArray<uint8_t> stages = staging(), slot(_slotBytes);
    CudaTransfers transfers(stream());
    prepare(transfers, stages);
    const Matrix& m = _streamed[1].file[0];
    const std::vector<StreamPart> parts = {{{m.type, 32, kCols, slot.get()}, 0, 32, m.data}};
    EXPECT_THROW(transfers.fetch(parts, 0), Error);
    EXPECT_THROW(transfers.await(0), Error);
    EXPECT_THROW(transfers.end(), Error);
    EXPECT_THROW(prepare(transfers, stages), Error);
    transfers.begin();
    EXPECT_THROW(transfers.await(0), Error);
    const auto many = static_cast<int64_t>(_stageBytes / rowBytes(m.type, kCols)) + 1;
    EXPECT_THROW(transfers.fetch({{{m.type, many, kCols, slot.get()}, 0, many, m.data}}, 0), Error);
    transfers.end();
}

}  // namespace
}  // namespace sharpi::cuda
