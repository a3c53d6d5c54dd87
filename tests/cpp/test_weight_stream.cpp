// The weight stream over a device that is as strict as a GPU may be: bytes are there from await() to release() and not
// longer, and every call out of order fails the test. Whatever the matrices and the passes, what is used is the file's.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "memory/fake_device.h"
#include "memory/weight_stream.h"

namespace {

using namespace sharpi;

constexpr uint8_t kPoison = 0xcd;

size_t fileRow(const Matrix& m) { return rowBytes(m.type, m.cols); }
size_t fileBytes(const Matrix& m) { return fileRow(m) * static_cast<size_t>(m.rows); }

// Rows lie apart, by `gap` bytes for each 256 numbers, as they do not in the file: so few file bytes make many large pieces,
// and whoever takes the file's layout for the device's is found out.
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

bool liesIn(const std::vector<HostRange>& ranges, const uint8_t* at, size_t bytes) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const HostRange& r) { return at >= r.begin && at + bytes <= r.begin + r.bytes; });
}

class StrictTransfers : public Transfers {
public:
    explicit StrictTransfers(GappedRows rows) : _rows(rows) {}

    std::vector<HostRange> always, once;
    std::vector<Matrix> residents;  // their places on the device
    std::vector<Matrix> files;
    int prepared = 0, finished = 0, passes = 0;
    size_t fetches = 0;             // in this pass
    std::set<int> slotsSeen;
    int64_t residentRows = 0;       // fetched so far
    size_t stageBytes = 0;
    bool mayGiveUp = false;         // the last pass may have been left before its end

    void prepare(const std::vector<HostRange>& a, const std::vector<HostRange>& o, void* staging, size_t bytes) override {
        always = a;
        once = o;
        stageBytes = bytes;
        EXPECT_EQ(staging != nullptr, _rows.stages > 0);
        if (staging) std::memset(staging, kPoison, std::min(bytes * static_cast<size_t>(_rows.stages), size_t{1} << 20));
        ++prepared;
    }
    void finishOnce() override {
        ++finished;
        EXPECT_FALSE(_open);
    }
    const uint8_t* deviceAddress(const uint8_t* file) const override { return file + 4096; }

    void begin() override {
        EXPECT_TRUE(!_open || mayGiveUp) << "a pass within another";
        mayGiveUp = false;
        for (Slot& slot : _slots) {
            if (slot.state != State::Free) poison(slot, false);
            slot = Slot();
        }
        _open = true;
        fetches = 0;
        ++passes;
    }
    void end() override {
        EXPECT_TRUE(_open) << "the end of no pass";
        _open = false;
        for (const Slot& slot : _slots) EXPECT_EQ(slot.state, State::Free) << "the pass ends with weights on their way or in use";
    }
    void fetch(const std::vector<StreamPart>& parts, int number) override {
        EXPECT_TRUE(_open) << "a fetch outside of a pass";
        slotsSeen.insert(number);
        Slot& slot = _slots.at(static_cast<size_t>(number));
        EXPECT_EQ(slot.state, State::Free) << "a fetch into slot " << number << ", which is not free";
        EXPECT_FALSE(parts.empty());
        size_t staged = 0;
        for (const StreamPart& part : parts) {
            staged += Allocator::aligned(part.bytes());
            ASSERT_GT(part.rows, 0);
            ASSERT_GE(part.rowBegin, 0);
            ASSERT_LE(part.rowBegin + part.rows, part.to.rows);
            EXPECT_TRUE(liesIn(isResident(part) ? once : always, part.file, part.bytes())) << "a range that was not prepared";
            EXPECT_TRUE(isOfFile(part)) << "not the rows from " << part.fileRow << " on of any matrix";
            EXPECT_FALSE(isResident(part) && finished) << "a resident weight after finishOnce()";
            if (isResident(part)) residentRows += part.rows;
            EXPECT_EQ(reinterpret_cast<uintptr_t>(part.to.data) % Allocator::kAlignment, 0u);
            expectApart(part);
            slot.parts.push_back(part);
        }
        EXPECT_TRUE(staged <= stageBytes || _rows.stages == 0) << "a stage too small for a piece";
        slot.state = State::Fetched;
        poison(slot, true);
        ++fetches;
    }
    void await(int number) override {
        Slot& slot = _slots.at(static_cast<size_t>(number));
        EXPECT_TRUE(_open);
        EXPECT_EQ(slot.state, State::Fetched) << "waiting for slot " << number << ", into which nothing comes";
        for (const StreamPart& part : slot.parts) {
            for (int64_t r = 0; r < part.rows; ++r) {
                std::memcpy(rowAt(part, r), part.file + fileRow(part.to) * static_cast<size_t>(r), fileRow(part.to));
            }
        }
        slot.state = State::Ready;
    }
    void release(int number) override {
        Slot& slot = _slots.at(static_cast<size_t>(number));
        EXPECT_TRUE(_open);
        EXPECT_EQ(slot.state, State::Ready) << "slot " << number << " is released that was not in use";
        poison(slot, false);
        slot = Slot();
    }

private:
    enum class State { Free, Fetched, Ready };
    struct Slot {
        State state = State::Free;
        std::vector<StreamPart> parts;
    };
    bool isResident(const StreamPart& part) const {
        return std::any_of(residents.begin(), residents.end(), [&](const Matrix& m) { return m.data == part.to.data; });
    }
    bool isOfFile(const StreamPart& part) const {
        return std::any_of(files.begin(), files.end(), [&](const Matrix& m) {
            return m.type == part.to.type && m.cols == part.to.cols && part.fileRow >= 0 && part.fileRow + part.rows <= m.rows &&
                   part.file == m.data + fileRow(m) * static_cast<size_t>(part.fileRow);
        });
    }
    uint8_t* rowAt(const StreamPart& part, int64_t r) const {
        return const_cast<uint8_t*>(part.to.data) + _rows.stride(part.to) * static_cast<size_t>(part.rowBegin + r);
    }
    void poison(const Slot& slot, bool residentToo) {
        for (const StreamPart& part : slot.parts) {
            if (isResident(part) && !residentToo) continue;
            for (int64_t r = 0; r < part.rows; ++r) std::memset(rowAt(part, r), kPoison, fileRow(part.to));
        }
    }
    void expectApart(const StreamPart& part) const {
        const uint8_t *begin = rowAt(part, 0), *end = rowAt(part, part.rows);
        for (const Slot& slot : _slots) {
            for (const StreamPart& other : slot.parts) {
                EXPECT_TRUE(end <= rowAt(other, 0) || rowAt(other, other.rows) <= begin) << "two pieces at one place";
            }
        }
        for (const Matrix& m : residents) {
            if (isResident(part)) break;
            EXPECT_TRUE(end <= m.data || m.data + _rows.stride(m) * static_cast<size_t>(m.rows) <= begin) << "a piece over a resident weight";
        }
    }

    GappedRows _rows;
    bool _open = false;
    std::array<Slot, WeightStream::kSlots> _slots;
};

struct GroupShape {
    std::vector<DType> types;
    std::vector<int64_t> cols;
    int64_t rows = 0, cpuRows = 0;
    bool resident = false;
};

// A stream over random matrices, and what each use of it must give.
class World {
public:
    World(GappedRows rows, unsigned seed, size_t capacity = size_t{16} << 30)
        : device(capacity), transfers(rows), stream(allocator, rows.layout(), &transfers), _rows(rows), _random(seed) {}

    struct Group {
        std::vector<Matrix> file, to;
        std::vector<std::vector<uint8_t>> kept;  // resident: what was in the file when it came
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
        for (size_t i = 0; i < shape.types.size(); ++i) {
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
        group.number = shape.resident ? stream.addResident(group.to, group.file) : stream.addStreamed(group.file, shape.cpuRows);
        EXPECT_EQ(group.number, static_cast<int32_t>(groups.size()));
        groups.push_back(std::move(group));
    }
    void startHead() {
        stream.startHead();
        headBegin = groups.size();
    }

    // That a resident group has come, or is just coming.
    void keep(Group& group) {
        for (size_t i = group.kept.size(); i < group.to.size(); ++i) {
            group.kept.emplace_back(group.file[i].data, group.file[i].data + fileBytes(group.file[i]));
        }
    }
    // What the engine does with a group in a pass. stopIn: give up while piece `stopIn` of it is in use.
    void use(Group& group, bool few, int64_t stopIn = -1) {
        if (group.resident()) {
            stream.arrive(group.number);
            keep(group);
            for (size_t i = 0; i < group.to.size(); ++i) expectRows(group.to[i], group.kept[i].data(), "resident");
            return;
        }
        _stopIn = stopIn;
        // One matrix, as the head is, may be used alike in both kinds of passes.
        if (few || (group.file.size() == 1 && _random() % 2)) return useTogether(group, few ? group.cpuRows : 0);
        for (size_t i = 0; i < group.file.size(); ++i) useMember(group, static_cast<int32_t>(i));
    }
    void useTogether(const Group& group, int64_t cpuRows = 0) {
        Walk walk{group.file, group.file[0].rows - cpuRows};
        stream.forPieces(group.number, [&](const std::vector<Matrix>& parts, int64_t rowBegin) { usePiece(walk, parts, rowBegin); });
        EXPECT_EQ(walk.next, walk.rows) << "not all rows came";
    }
    void useMember(const Group& group, int32_t member) {
        const Matrix& file = group.file[static_cast<size_t>(member)];
        Walk walk{{file}, file.rows};
        stream.forPieces(group.number, member, [&](const Matrix& part, int64_t rowBegin) { usePiece(walk, {part}, rowBegin); });
        EXPECT_EQ(walk.next, walk.rows) << "not all rows came of matrix " << member;
    }

    void pass(bool few, bool withHead, bool headAlone = false) {
        transfers.fetches = 0;
        fetchesAtUse.clear();
        const int before = transfers.passes;
        if (headAlone) stream.beginHead();
        else stream.begin(few, withHead);
        EXPECT_EQ(stream.active(), transfers.passes == before + 1) << "a pass with nothing to bring over is none";
        const size_t first = headAlone ? headBegin : 0, end = withHead ? groups.size() : std::min(headBegin, groups.size());
        for (size_t i = first; i < end; ++i) use(groups[i], few);
        stream.end();
        EXPECT_FALSE(stream.active());
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
        EXPECT_TRUE(bytes <= WeightStream::kPieceBytes || parts[0].rows <= WeightStream::kRowStep) << bytes;
        if (walk.next == 0) walk.usual = parts[0].rows;
        walk.next += parts[0].rows;
        EXPECT_TRUE(walk.next == walk.rows || (parts[0].rows == walk.usual && parts[0].rows % WeightStream::kRowStep == 0)) << parts[0].rows;
        fetchesAtUse.push_back(transfers.fetches);
        if (_stopIn-- == 0) throw GivenUp();
    }
    void expectRows(const Matrix& device, const uint8_t* file, const char* what) {
        const size_t bytes = fileRow(device), stride = _rows.stride(device);
        for (int64_t r = 0; r < device.rows; ++r) {
            const auto row = static_cast<size_t>(r);
            ASSERT_EQ(std::memcmp(device.data + stride * row, file + bytes * row, bytes), 0) << what << ", row " << r << " of " << device.rows;
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
    size_t headBegin = SIZE_MAX;
    int64_t residentRows = 0;
    std::vector<size_t> fetchesAtUse;  // begun in this pass when each streamed piece was used

private:
    GappedRows _rows;
    std::mt19937_64 _random;
    int64_t _stopIn = -1;
    std::deque<std::vector<uint8_t>> _files;
    std::vector<Buffer> _buffers;
};

constexpr DType kTypes[] = {DType::F32, DType::F16, DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q2_K, DType::MXFP4};

GroupShape randomGroup(std::mt19937& random, int64_t mostRows, int residentOf10) {
    GroupShape shape;
    shape.rows = 1 + static_cast<int64_t>(random() % mostRows);
    for (size_t i = 1 + random() % 3; i > 0; --i) {
        shape.types.push_back(kTypes[random() % std::size(kTypes)]);
        shape.cols.push_back(256 * (1 + static_cast<int64_t>(random() % 4)));
    }
    shape.resident = static_cast<int>(random() % 10) < residentOf10;
    if (!shape.resident && random() % 2) {
        shape.cpuRows = random() % 4 == 0 ? shape.rows : shape.rows - std::min(shape.rows, 32 * static_cast<int64_t>(random() % 20));
    }
    return shape;
}

void addRandomGroups(World& world, std::mt19937& random, size_t count, int64_t mostRows, int residentOf10) {
    const size_t head = random() % 3 == 0 ? count : count - 1 - random() % 2;
    for (size_t i = 0; i < count; ++i) {
        if (i == head) world.startHead();
        world.add(randomGroup(random, mostRows, residentOf10));
    }
    if (head == count && random() % 2) world.startHead();  // a head with nothing of its own
}

TEST(WeightStream, EveryByteUsedIsTheFiles) {
    std::mt19937 random(11);
    // Gap and most rows. One piece; some; 32 rows of two matrices may be more than a piece may be; of one, too.
    const std::pair<size_t, int64_t> kinds[] = {{0, 300}, {size_t{12} << 10, 1500}, {size_t{120} << 10, 120}, {size_t{300} << 10, 90}};
    for (int round = 0; round < 48; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        const auto& [gap, mostRows] = kinds[round % 4];
        World world({gap, round % 5 == 0 ? 0 : 3}, 100u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 3 + random() % 8, mostRows, round / 4 % 4 * 3);
        const Matrix table = world.random(DType::Q6_K, 50, 256);
        world.stream.addTable(table);
        world.stream.take();
        EXPECT_EQ(world.transfers.prepared, 1);
        EXPECT_TRUE(liesIn(world.transfers.always, table.data, fileBytes(table)));
        const auto any = [&](const auto& is) { return std::any_of(world.groups.begin(), world.groups.end(), is); };
        const bool streams = any([](const World::Group& g) { return !g.resident(); });
        EXPECT_EQ(world.stream.streams(), streams);
        EXPECT_EQ(world.stream.sharesRows(), any([](const World::Group& g) { return g.cpuRows > 0; }));
        world.stream.uploadAll();
        EXPECT_EQ(world.transfers.finished, streams ? 0 : 1);
        if (!streams) std::for_each(world.groups.begin(), world.groups.end(), [&](World::Group& group) { world.keep(group); });
        world.changeFiles();
        for (int pass = 0; pass < 6; ++pass) {
            const bool headAlone = pass < 5 && world.headBegin != SIZE_MAX && random() % 4 == 0;
            world.pass(!headAlone && random() % 2, headAlone || pass == 5 || random() % 3 > 0, headAlone);
            world.changeFiles();
        }
        EXPECT_EQ(world.transfers.residentRows, world.residentRows);
        for (const bool few : {true, false}) {  // only what is streamed comes again, and each use finds all slots under way
            world.pass(few, true);
            EXPECT_EQ(world.transfers.fetches, world.fetchesAtUse.size());
            const size_t slots = world.transfers.slotsSeen.size();
            for (size_t i = 0; i < world.fetchesAtUse.size(); ++i) EXPECT_EQ(world.fetchesAtUse[i], std::min(world.transfers.fetches, i + slots));
        }
        EXPECT_EQ(world.transfers.residentRows, world.residentRows) << "each resident row comes once";
        if (streams) {
            EXPECT_EQ(world.transfers.slotsSeen.size(), std::min(size_t{WeightStream::kSlots}, world.fetchesAtUse.size()));
        }

        world.stream.finishUploads();
        world.stream.finishUploads();
        EXPECT_EQ(world.transfers.finished, 1);
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(WeightStream, PiecesOfLargeMatricesAreAlikeAndFit) {
    const struct {
        GroupShape shape;
        size_t few, many;  // pieces
    } cases[] = {
        {{{DType::Q6_K}, {4096}, 5000, 0, false}, 2, 2},                           // 16 MiB and a little
        {{{DType::Q4_K, DType::Q6_K}, {4096, 4096}, 6001, 1984, false}, 2, 1 + 2},
        {{{DType::Q8_0}, {1024}, 15420, 0, false}, 1, 1},                          // 16 MiB less 256 bytes
        {{{DType::Q8_0}, {1024}, 15421, 0, false}, 2, 2},
        {{{DType::F32}, {1 << 17}, 33, 0, false}, 2, 2},                           // 32 rows are 16 MiB
        {{{DType::F32}, {(1 << 17) + 256}, 100, 64, false}, 2, 4},                 // 32 rows are more
        {{{DType::F32, DType::F32}, {1 << 16, 1 << 16}, 70, 0, false}, 3, 2 + 2},  // 32 rows of both are 16 MiB, 64 of one
    };
    World world({0, 3}, 5);
    for (const auto& c : cases) world.add(c.shape);
    world.stream.take();
    for (const bool few : {false, true}) {
        world.stream.begin(few, true);
        for (size_t i = 0; i < world.groups.size(); ++i) {
            SCOPED_TRACE("case " + std::to_string(i));
            world.fetchesAtUse.clear();
            world.use(world.groups[i], few);
            EXPECT_EQ(world.fetchesAtUse.size(), few ? cases[i].few : cases[i].many);
        }
        world.stream.end();
    }
}

TEST(WeightStream, ResidentWeightsComeOnceAndTheOthersEachTime) {
    World world({0, 3}, 7);
    world.add({{DType::Q4_K, DType::Q6_K}, {512, 512}, 9000, 0, true});  // several uploads of 2 MiB
    world.add({{DType::Q8_0}, {256}, 100, 32, false});
    world.startHead();
    world.add({{DType::Q6_K}, {256}, 300, 0, true});
    world.stream.take();
    const std::vector<uint8_t> first(world.groups[0].file[0].data, world.groups[0].file[0].data + fileBytes(world.groups[0].file[0]));
    world.pass(false, false);
    EXPECT_GT(world.transfers.fetches, 4u);
    EXPECT_EQ(world.transfers.residentRows, 18000) << "the head's have not been asked for";
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 0) << "the head's have not come";
    world.changeFiles();
    const std::vector<uint8_t> headWhenUsed(world.groups[2].file[0].data, world.groups[2].file[0].data + fileBytes(world.groups[2].file[0]));
    world.pass(true, true);  // use() holds every byte against what the file was, or is
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);
    world.changeFiles();
    world.pass(false, true);
    EXPECT_EQ(world.transfers.fetches, 1u);
    EXPECT_EQ(world.transfers.residentRows, world.residentRows);
    EXPECT_EQ(world.groups[0].kept[0], first);
    EXPECT_EQ(world.groups[2].kept[0], headWhenUsed);
    EXPECT_NE(std::memcmp(world.groups[0].file[0].data, first.data(), first.size()), 0) << "the file was not changed";
}

TEST(WeightStream, APassGivenUpHalfWayHarmsNoOther) {
    std::mt19937 random(21);
    for (int round = 0; round < 30; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        World world({round % 2 ? size_t{12} << 10 : size_t{0}, 3}, 500u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 6, 1000, 4);
        world.stream.take();
        for (int pass = 0; pass < 4; ++pass) {
            const bool few = random() % 2;
            world.stream.begin(few, true);
            const size_t stop = random() % world.groups.size();
            try {
                for (size_t i = 0; i <= stop; ++i) world.use(world.groups[i], few, i == stop ? static_cast<int64_t>(random() % 3) : -1);
            } catch (const World::GivenUp&) {
            }
            world.transfers.mayGiveUp = true;
            world.changeFiles();
            if (pass % 2) world.pass(random() % 2, true);
        }
        world.transfers.mayGiveUp = true;
        world.pass(false, true);
        if (::testing::Test::HasFailure()) return;
    }
}

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

TEST(WeightStream, RefusesUsesOutOfOrder) {
    World world({0, 3}, 9);
    for (const size_t matrices : {0, 2, 1, 0}) {  // 0: a resident one
        world.add({std::vector<DType>(std::max<size_t>(matrices, 1), DType::Q8_0), {256, 512}, 40, 0, matrices == 0});
    }
    // 10 group + member, as in a pass of many rows; 10 group + 9: all its matrices; or the pass ends.
    constexpr int kEnd = -1;
    const auto use = [&](int what) {
        if (what == kEnd) return world.stream.end();
        World::Group& group = world.groups[static_cast<size_t>(what / 10)];
        if (group.resident()) world.use(group, false);
        else if (what % 10 == 9) world.useTogether(group);
        else world.useMember(group, what % 10);
    };
    const auto begin = [&](bool few) {
        world.transfers.mayGiveUp = true;
        world.stream.begin(few, true);
    };
    expectInternal([&] { world.stream.begin(false, true); });  // nothing is taken
    world.stream.take();
    expectInternal([&] { world.stream.take(); });
    for (const int first : {0, 10, 19}) expectInternal([&] { use(first); });  // no pass
    const struct {
        bool few;
        std::vector<int> uses;  // only the last one is refused
    } orders[] = {{false, {10}}, {false, {30}}, {false, {0, 11}}, {false, {0, 20}}, {false, {0, 29}}, {false, {0, 10, 10}}, {false, {0, 10, 20}},
                  {false, {0, 10, 29}}, {false, {0, 10, 11, 10}}, {false, {0, 10, 11, 11}}, {false, {0, 10, 11, 30}}, {false, {0, 10, 11, 20, 20}},
                  {false, {0, kEnd}}, {false, {0, 10, kEnd}}, {false, {0, 10, 11, kEnd}}, {true, {0, 19, kEnd}},
                  {true, {0, 29}}, {true, {0, 19, 19}}, {true, {0, 19, 30}}, {true, {0, 10}}, {true, {0, 19, 20}}};
    for (const auto& order : orders) {
        SCOPED_TRACE(::testing::PrintToString(order.uses) + (order.few ? " few" : " many"));
        begin(order.few);
        for (size_t i = 0; i + 1 < order.uses.size(); ++i) use(order.uses[i]);
        expectInternal([&] { use(order.uses.back()); });
    }
    begin(true);
    for (const int what : {0, 19}) use(what);
    expectInternal([&] { use(20); });  // and the pass goes on
    for (const int what : {29, 30}) use(what);
    world.stream.end();
    world.transfers.mayGiveUp = true;
    world.pass(false, true);
}

TEST(WeightStream, WithNothingStreamedAllComesAtOnceAndStagingGoes) {
    World world({0, 3}, 13);
    for (int i = 0; i < 5; ++i) world.add({{DType::Q4_K, DType::F32}, {512, 256}, 3000, 0, true});
    world.stream.startHead();
    world.add({{DType::Q6_K}, {256}, 100, 0, true});
    world.stream.take();
    EXPECT_EQ(world.held("slots for weights that are not resident"), 0u);
    EXPECT_EQ(world.held("staging for weights"), 3 * world.transfers.stageBytes);
    world.stream.uploadAll();
    EXPECT_EQ(world.held("staging for weights"), 0u);
    EXPECT_EQ(world.transfers.finished, 1);
    EXPECT_EQ(world.transfers.passes, 1);
    EXPECT_EQ(world.transfers.residentRows, world.residentRows);
    for (const World::Group& group : world.groups) {
        for (size_t i = 0; i < group.to.size(); ++i) world.expectRows(group.to[i], group.file[i].data, "uploaded");
    }
    world.pass(true, true);
    EXPECT_EQ(world.transfers.passes, 1) << "there was nothing left to do";
    world.stream.finishUploads();
    EXPECT_EQ(world.transfers.finished, 1);
}

// A plan: the same adds over the same layout, without a file and without transfers.
TEST(WeightStream, APlanTakesTheSameMemory) {
    std::mt19937 random(31);
    for (int round = 0; round < 12; ++round) {
        const GappedRows rows{round % 2 ? size_t{30} << 10 : size_t{0}, 3};
        World world(rows, 700u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 5, 500, round % 3 * 5);
        FakeDevice device{size_t{16} << 30};
        Allocator allocator(device);
        WeightStream planned(allocator, rows.layout(), nullptr);
        size_t residents = 0;
        for (const World::Group& group : world.groups) {
            std::vector<Matrix> file = group.file;
            for (Matrix& m : file) m.data = nullptr;
            if (group.resident()) planned.addResident(group.to, file);
            else planned.addStreamed(file, group.cpuRows);
            for (const Matrix& m : group.to) residents += rows.layout().bytes(m);
        }
        world.stream.take();
        planned.take();
        EXPECT_EQ(allocator.held() + residents, world.allocator.held());
        world.stream.uploadAll();
        planned.uploadAll();
        planned.finishUploads();
        EXPECT_EQ(allocator.held() + residents, world.allocator.held()) << "after uploading";
        expectInternal([&] { planned.begin(false, true); });
        EXPECT_EQ(planned.deviceAddress(world.groups[0].file[0].data), world.groups[0].file[0].data);
        EXPECT_EQ(world.stream.deviceAddress(world.groups[0].file[0].data), world.groups[0].file[0].data + 4096);
    }
}

TEST(WeightStream, SlotsThatDoNotFitAreRefusedByName) {
    World world({0, 3}, 17, size_t{4} << 20);
    world.add({{DType::Q8_0}, {1024}, 9000, 0, false});
    expectError(ErrorKind::OutOfMemory, "slots", [&] { world.stream.take(); });
    EXPECT_EQ(world.transfers.prepared, 0);
}

}  // namespace
