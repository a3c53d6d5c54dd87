// A weight stream over a device that is as strict as a GPU may be: a piece's bytes are there from await() to release()
// and no longer, and every call out of order fails the test. Random matrices and stacks pass through it, and what is
// used is compared with the file.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "fake_device.h"
#include "memory/stream/weight_stream.h"

namespace streamed {

using namespace sharpi;

constexpr uint8_t kPoison = 0xcd;

inline size_t fileRow(const Matrix& m) { return rowBytes(m.type, m.cols); }
// On the device, rows lie `gap` bytes for each 256 numbers farther apart than in the file. So few file bytes make many
// large pieces, and code that confuses the two layouts fails.
struct GappedRows {
    size_t gap = 0;
    int stages = 3;
    size_t stride(const Matrix& m) const { return fileRow(m) + gap * static_cast<size_t>(m.cols) / 256; }
    DeviceLayout layout() const {
        DeviceLayout made;
        made.bytes = [*this](const Matrix& m) { return stride(m) * static_cast<size_t>(m.rows); };
        made.stages = stages;
        return made;
    }
};

inline bool liesIn(const std::vector<HostRange>& ranges, const uint8_t* at, size_t bytes) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const HostRange& r) { return at >= r.begin && at + bytes <= r.begin + r.bytes; });
}

inline bool overlaps(const std::vector<HostRange>& ranges, const uint8_t* at, size_t bytes) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const HostRange& r) { return at < r.begin + r.bytes && r.begin < at + bytes; });
}

class StrictTransfers : public Transfers {
public:
    explicit StrictTransfers(GappedRows rows) : _rows(rows) {}

    HostRanges ranges;
    std::vector<Matrix> residents;       // their places on the device
    std::vector<Matrix> files, experts;  // the matrices in the files, and those of them that are in a stack
    int prepared = 0, finished = 0, passes = 0;
    size_t fetches = 0;  // in this pass
    std::set<int> buffersSeen;
    int64_t residentRows = 0;  // fetched so far
    size_t stageBytes = 0;
    bool mayGiveUp = false;  // the last pass may have been given up
    int ahead = 0;           // pieces of which it hears before they are fetched
    size_t heard = 0;        // of those fetched in this pass, how many it had heard of

    void prepare(const HostRanges& all, void* staging, size_t bytes) override {
        ranges = all;
        stageBytes = bytes;
        EXPECT_EQ(staging != nullptr, _rows.stages > 0);
        if (staging)
            std::memset(staging, kPoison, std::min(bytes * static_cast<size_t>(_rows.stages), size_t{1} << 20));
        ++prepared;
    }
    void finishOnce() override {
        ++finished;
        EXPECT_FALSE(_open);
    }

    void begin() override {
        EXPECT_TRUE(!_open || mayGiveUp) << "a pass within another";
        mayGiveUp = false;
        for (RingBuffer& buffer : _ring) {
            if (buffer.state != State::Free) poison(buffer, false);
            buffer = RingBuffer();
        }
        _open = true;
        fetches = heard = 0;
        _expected.clear();
        ++passes;
    }
    bool open() const { return _open; }
    void end() override {
        EXPECT_TRUE(_open) << "a pass ends that was not begun";
        _open = false;
        for (const RingBuffer& buffer : _ring)
            EXPECT_EQ(buffer.state, State::Free) << "the pass ends with weights on their way or in use";
        EXPECT_TRUE(_expected.empty()) << "a piece was announced that never came";
        EXPECT_TRUE(heard == 0 || heard == fetches);
    }
    int looksAhead() const override { return ahead; }
    void expect(const std::vector<StreamPart>& parts) override {
        EXPECT_TRUE(_open) << "a piece is announced outside of a pass";
        _expected.push_back(parts);
        EXPECT_LE(_expected.size(), static_cast<size_t>(ahead) + 1);
    }
    void fetch(const std::vector<StreamPart>& parts, int number) override {
        EXPECT_TRUE(_open) << "a fetch outside of a pass";
        buffersSeen.insert(number);
        RingBuffer& buffer = _ring.at(static_cast<size_t>(number));
        EXPECT_EQ(buffer.state, State::Free) << "a fetch into buffer " << number << ", which is not free";
        EXPECT_FALSE(parts.empty());
        hearOf(parts);
        size_t staged = 0;
        for (const StreamPart& part : parts) {
            staged += Allocator::aligned(part.bytes());
            ASSERT_GT(part.rows, 0);
            ASSERT_GE(part.rowBegin, 0);
            ASSERT_LE(part.rowBegin + part.rows, part.to.rows);
            EXPECT_TRUE(liesIn(rangesOf(part), part.file, part.bytes())) << "a range that was not prepared";
            EXPECT_TRUE(isOfFile(part)) << "not the rows from " << part.fileRow << " on of any matrix";
            EXPECT_FALSE(isResident(part) && finished) << "a resident weight after finishOnce()";
            if (isResident(part)) residentRows += part.rows;
            EXPECT_EQ(reinterpret_cast<uintptr_t>(part.to.data) % Allocator::kAlignment, 0u);
            expectApart(part);
            buffer.parts.push_back(part);
        }
        EXPECT_TRUE(staged <= stageBytes || _rows.stages == 0) << "a stage too small for a piece";
        buffer.state = State::Fetched;
        poison(buffer, true);
        ++fetches;
    }
    void await(int number) override {
        RingBuffer& buffer = _ring.at(static_cast<size_t>(number));
        EXPECT_TRUE(_open);
        EXPECT_EQ(buffer.state, State::Fetched) << "waits for buffer " << number << ", into which nothing is fetched";
        for (const StreamPart& part : buffer.parts) {
            for (int64_t r = 0; r < part.rows; ++r) {
                std::memcpy(rowAt(part, r), part.file + fileRow(part.to) * static_cast<size_t>(r), fileRow(part.to));
            }
        }
        buffer.state = State::Ready;
    }
    void release(int number) override {
        RingBuffer& buffer = _ring.at(static_cast<size_t>(number));
        EXPECT_TRUE(_open);
        EXPECT_EQ(buffer.state, State::Ready) << "buffer " << number << " is released but was not in use";
        poison(buffer, false);
        buffer = RingBuffer();
    }

private:
    enum class State { Free, Fetched, Ready };
    struct RingBuffer {
        State state = State::Free;
        std::vector<StreamPart> parts;
    };
    void hearOf(const std::vector<StreamPart>& parts) {
        if (_expected.empty()) return;
        ASSERT_EQ(parts.size(), _expected.front().size());
        for (size_t i = 0; i < parts.size(); ++i)
            EXPECT_EQ(parts[i].file, _expected.front()[i].file) << "another piece";
        _expected.pop_front();
        ++heard;
    }
    bool isResident(const StreamPart& part) const {
        return std::any_of(residents.begin(), residents.end(), [&](const Matrix& m) { return m.data == part.to.data; });
    }
    const std::vector<HostRange>& rangesOf(const StreamPart& part) const {
        return isResident(part) ? ranges.once : isOf(experts, part) ? ranges.optional : ranges.always;
    }
    bool isOfFile(const StreamPart& part) const { return isOf(files, part); }
    static bool isOf(const std::vector<Matrix>& matrices, const StreamPart& part) {
        return std::any_of(matrices.begin(), matrices.end(), [&](const Matrix& m) {
            return m.type == part.to.type && m.cols == part.to.cols && part.fileRow >= 0 &&
                   part.fileRow + part.rows <= m.rows &&
                   part.file == m.data + fileRow(m) * static_cast<size_t>(part.fileRow);
        });
    }
    uint8_t* rowAt(const StreamPart& part, int64_t r) const {
        return const_cast<uint8_t*>(part.to.data) + _rows.stride(part.to) * static_cast<size_t>(part.rowBegin + r);
    }
    void poison(const RingBuffer& buffer, bool residentToo) {
        for (const StreamPart& part : buffer.parts) {
            if (isResident(part) && !residentToo) continue;
            for (int64_t r = 0; r < part.rows; ++r) std::memset(rowAt(part, r), kPoison, fileRow(part.to));
        }
    }
    void expectApart(const StreamPart& part) const {
        const uint8_t *begin = rowAt(part, 0), *end = rowAt(part, part.rows);
        for (const RingBuffer& buffer : _ring) {
            for (const StreamPart& other : buffer.parts) {
                EXPECT_TRUE(end <= rowAt(other, 0) || rowAt(other, other.rows) <= begin) << "two pieces at one place";
            }
        }
        for (const Matrix& m : residents) {
            if (isResident(part)) break;
            EXPECT_TRUE(end <= m.data || m.data + _rows.stride(m) * static_cast<size_t>(m.rows) <= begin)
                << "a piece over a resident weight";
        }
    }

    GappedRows _rows;
    bool _open = false;
    std::deque<std::vector<StreamPart>> _expected;
    std::array<RingBuffer, Transfers::kMostBuffers> _ring;
};

struct GroupShape {
    std::vector<DType> types;
    std::vector<int64_t> cols;
    int64_t rows = 0, cpuRows = 0;
    bool resident = false;
    int32_t experts = 0;  // > 0: a stack of this many experts, of one type
    int64_t apart = 0;    // other rows between two experts in the file
};

// A stream over random matrices, and what each of its uses must give.
class World {
public:
    World(GappedRows rows, unsigned seed, size_t capacity = size_t{16} << 30)
        : device(capacity), transfers(rows), stream(allocator, rows.layout(), &transfers), _rows(rows), _random(seed) {}

    struct Group {
        std::vector<Matrix> file, to;  // of a stack: each expert's
        bool isStack = false;
        std::vector<int32_t> wanted;             // of a stack
        std::vector<std::vector<uint8_t>> kept;  // resident: the file's bytes when the group was fetched
        int64_t cpuRows = 0;
        int32_t number = -1;
        bool resident() const { return !to.empty(); }
    };
    struct GivenUp {};

    Matrix random(DType type, int64_t rows, int64_t cols) {
        _files.emplace_back(rowBytes(type, cols) * static_cast<size_t>(rows) + 8);
        for (size_t at = 0; at + 8 <= _files.back().size(); at += 8) {
            const uint64_t value = _random();
            std::memcpy(&_files.back()[at], &value, 8);
        }
        return {type, rows, cols, _files.back().data()};
    }
    void changeFiles() {
        for (auto& file : _files) {
            for (size_t at = 0; at < file.size(); at += 1 + _random() % 16) file[at] = static_cast<uint8_t>(_random());
        }
    }
    void add(const GroupShape& shape) {
        Group group;
        for (size_t i = 0; i < shape.types.size() && !shape.experts; ++i) {
            group.file.push_back(random(shape.types[i], shape.rows, shape.cols[i]));
            transfers.files.push_back(group.file.back());
            if (!shape.resident) continue;
            Matrix to = group.file.back();
            _buffers.emplace_back(allocator, _rows.layout().bytes(to), "a resident weight");
            to.data = _buffers.back().as<uint8_t>();
            group.to.push_back(to);
            transfers.residents.push_back(to);
            residentRows += to.rows;
        }
        group.cpuRows = shape.cpuRows;
        group.isStack = shape.experts > 0;
        group.number = group.isStack    ? addExperts(shape, group)
                       : shape.resident ? stream.addResident(group.to, group.file)
                                        : stream.addStreamed(group.file, shape.cpuRows);
        EXPECT_EQ(group.number, static_cast<int32_t>(groups.size()));
        groups.push_back(std::move(group));
    }
    int32_t addExperts(const GroupShape& shape, Group& group) {
        const int64_t every = shape.rows + shape.apart;
        Matrix first = random(shape.types[0], every * shape.experts, shape.cols[0]);
        first.rows = shape.rows;
        const MatrixStack stack{first, fileRow(first) * static_cast<size_t>(every), shape.experts};
        for (int32_t i = 0; i < stack.count; ++i) {
            group.file.push_back(stack.at(i));
            group.wanted.push_back(i);
            transfers.files.push_back(stack.at(i));
            transfers.experts.push_back(stack.at(i));
        }
        return stream.addStreamedStack(stack);
    }
    void want(Group& group, std::vector<int32_t> experts) {
        group.wanted = experts;
        stream.setWanted(group.number, std::move(experts));
    }
    void wantAll(Group& group) {
        std::vector<int32_t> experts(group.file.size());
        std::iota(experts.begin(), experts.end(), 0);
        want(group, std::move(experts));
    }
    // Wants some experts, all or none.
    void wantSome(Group& group) {
        const uint64_t kind = _random() % 6, share = 1 + _random() % 8;
        std::vector<int32_t> experts;
        for (size_t i = 0; i < group.file.size(); ++i) {
            if (kind == 0 || (kind > 1 && _random() % 8 < share)) experts.push_back(static_cast<int32_t>(i));
        }
        want(group, std::move(experts));
    }
    void startPrediction() {
        stream.startPrediction();
        predictionBegin = groups.size();
    }
    void startHead() {
        stream.startHead();
        headBegin = groups.size();
    }
    bool ofHead(size_t group) const { return group >= headBegin; }
    bool ofPrediction(size_t group) const { return group >= predictionBegin && !ofHead(group); }
    bool isIn(size_t group, WeightStream::Part part, bool withHead) const {
        return ofHead(group) ? withHead : ofPrediction(group) == (part == WeightStream::Part::Prediction);
    }

    // Notes the file's bytes of a resident group that is fetched now.
    void keep(Group& group) {
        for (size_t i = group.kept.size(); i < group.to.size(); ++i) {
            group.kept.emplace_back(group.file[i].data, group.file[i].data + fileBytes(group.file[i]));
        }
    }
    // Does what the engine does with a group in a pass. stopIn: abandons the pass while this piece is in use.
    void use(Group& group, bool few, int64_t stopIn = -1) {
        if (group.resident()) {
            stream.arrive(group.number);
            keep(group);
            for (size_t i = 0; i < group.to.size(); ++i) expectRows(group.to[i], group.kept[i].data(), "resident");
            return;
        }
        _stopIn = stopIn;
        if (group.isStack) return useExperts(group, few);
        // A group of one matrix, such as the head, may be used in the same way in both kinds of passes.
        if (few || (group.file.size() == 1 && _random() % 2)) return useTogether(group, few ? group.cpuRows : 0);
        for (size_t i = 0; i < group.file.size(); ++i) useMember(group, static_cast<int32_t>(i));
    }
    void useTogether(const Group& group, int64_t cpuRows = 0) {
        Walk walk{group.file, group.file[0].rows - cpuRows};
        stream.forPieces(group.number,
                         [&](const std::vector<Matrix>& parts, int64_t rowBegin) { usePiece(walk, parts, rowBegin); });
        EXPECT_EQ(walk.next, walk.rows) << "not all rows came";
    }
    void useExperts(const Group& group, bool few) {
        const Matrix& expert = group.file[0];
        const size_t stride = Allocator::aligned(_rows.layout().bytes(expert)),
                     most = std::max<size_t>(1, WeightGroup::kPieceBytes / stride);
        const auto upTo = [](size_t n, size_t limit) { return (n + limit - 1) / limit; };
        // A piece has at most as many experts as one of the whole stack, since buffers hold no more; pieces are equal.
        const size_t limit = upTo(group.file.size(), upTo(group.file.size(), most)),
                     all = few ? 0 : group.wanted.size(), expected = upTo(all, limit);
        size_t next = 0, pieces = 0;
        stream.forExperts(group.number, [&](const MatrixStack& part, int32_t first) {
            const auto count = static_cast<size_t>(part.count);
            ASSERT_EQ(static_cast<size_t>(first), next);
            ASSERT_LE(next + count, all);
            ASSERT_TRUE(count >= 1 && (count == upTo(all, expected) || next + count == all))
                << count << " experts in a piece";
            ASSERT_TRUE(part.first.type == expert.type && part.first.rows == expert.rows &&
                        part.first.cols == expert.cols);
            for (size_t i = 0; i < count; ++i) {
                expectRows(part.at(static_cast<int32_t>(i)),
                           group.file[static_cast<size_t>(group.wanted[next + i])].data, "an expert");
            }
            next += count;
            ++pieces;
            fetchesAtUse.push_back(transfers.fetches);
            if (_stopIn-- == 0) throw GivenUp();
        });
        EXPECT_EQ(next, all) << "a full pass did not bring all wanted experts, or a step brought some";
        EXPECT_EQ(pieces, expected);
    }
    void useMember(const Group& group, int32_t member) {
        const Matrix& file = group.file[static_cast<size_t>(member)];
        Walk walk{{file}, file.rows};
        stream.forPieces(group.number, member,
                         [&](const Matrix& part, int64_t rowBegin) { usePiece(walk, {part}, rowBegin); });
        EXPECT_EQ(walk.next, walk.rows) << "not all rows came of matrix " << member;
    }

    void pass(bool few, bool withHead, bool headAlone = false) {
        pass(WeightStream::Part::Model, few, withHead, headAlone);
    }
    void pass(WeightStream::Part part, bool few, bool withHead, bool headAlone = false) {
        transfers.fetches = transfers.heard = 0;
        fetchesAtUse.clear();
        const int before = transfers.passes;
        if (headAlone) stream.beginHead();
        else stream.begin(part, few, withHead);
        EXPECT_EQ(transfers.passes == before + 1, transfers.fetches > 0) << "a pass with nothing to fetch was begun";
        for (size_t i = 0; i < groups.size(); ++i) {
            if (headAlone ? ofHead(i) : isIn(i, part, withHead)) use(groups[i], few);
        }
        stream.end();
        EXPECT_FALSE(transfers.passes > before && transfers.open()) << "the pass did not end";
    }

    // Rows of the same matrices, piece after piece.
    struct Walk {
        std::vector<Matrix> file;
        int64_t rows = 0, next = 0, usual = 0;
    };
    void usePiece(Walk& walk, const std::vector<Matrix>& parts, int64_t rowBegin) {
        ASSERT_EQ(parts.size(), walk.file.size());
        ASSERT_EQ(rowBegin, walk.next);
        size_t bytes = 0;
        for (size_t i = 0; i < parts.size(); ++i) {
            ASSERT_EQ(parts[i].type, walk.file[i].type);
            ASSERT_EQ(parts[i].cols, walk.file[i].cols);
            ASSERT_EQ(parts[i].rows, parts[0].rows);
            ASSERT_LE(rowBegin + parts[i].rows, walk.rows);
            expectRows(parts[i], walk.file[i].data + fileRow(parts[i]) * static_cast<size_t>(rowBegin), "streamed");
            bytes += Allocator::aligned(_rows.layout().bytes(parts[i]));
        }
        EXPECT_TRUE(bytes <= WeightGroup::kPieceBytes || parts[0].rows <= WeightGroup::kRowStep) << bytes;
        if (walk.next == 0) walk.usual = parts[0].rows;
        walk.next += parts[0].rows;
        EXPECT_TRUE(walk.next == walk.rows ||
                    (parts[0].rows == walk.usual && parts[0].rows % WeightGroup::kRowStep == 0))
            << parts[0].rows;
        fetchesAtUse.push_back(transfers.fetches);
        if (_stopIn-- == 0) throw GivenUp();
    }
    void expectRows(const Matrix& device, const uint8_t* file, const char* what) {
        const size_t bytes = fileRow(device), stride = _rows.stride(device);
        for (int64_t r = 0; r < device.rows; ++r) {
            const auto row = static_cast<size_t>(r);
            ASSERT_EQ(std::memcmp(device.data + stride * row, file + bytes * row, bytes), 0)
                << what << ", row " << r << " of " << device.rows;
        }
    }
    size_t held(const std::string& name) const {
        for (const Holding& h : allocator.holdings())
            if (h.name == name) return h.bytes;
        return 0;
    }

    FakeDevice device;
    Allocator allocator{device};
    StrictTransfers transfers;
    WeightStream stream;
    std::vector<Group> groups;
    size_t predictionBegin = SIZE_MAX, headBegin = SIZE_MAX;
    int64_t residentRows = 0;
    std::vector<size_t> fetchesAtUse;  // fetches begun in this pass when each streamed piece was used

private:
    GappedRows _rows;
    std::mt19937_64 _random;
    int64_t _stopIn = -1;
    std::deque<std::vector<uint8_t>> _files;
    std::vector<Buffer> _buffers;
};

template <typename Call> void expectError(ErrorKind kind, const std::string& part, const Call& call) {
    try {
        call();
        ADD_FAILURE() << "no error";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), kind) << e.what();
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

template <typename Call> void expectInternal(const Call& call) { expectError(ErrorKind::Internal, "", call); }

}  // namespace streamed
