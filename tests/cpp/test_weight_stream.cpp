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

// Rows lie `gap` bytes apart, as they do not in the file: so few file bytes make many large pieces, and whoever takes the
// file's layout for the device's is found out.
struct GappedRows {
    size_t gap = 0;
    int stages = 3;
    size_t stride(const Matrix& m) const { return fileRow(m) + gap; }
    DeviceLayout layout() const {
        DeviceLayout made;
        made.bytes = [*this](const Matrix& m) { return stride(m) * static_cast<size_t>(m.rows); };
        made.stages = stages;
        return made;
    }
};

bool liesIn(const std::vector<HostRange>& ranges, const uint8_t* at, size_t bytes) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const HostRange& r) { return at >= r.begin && at + bytes <= r.begin + r.bytes; });
}

class StrictTransfers : public Transfers {
public:
    explicit StrictTransfers(GappedRows rows) : _rows(rows) {}

    std::vector<HostRange> always, once;
    std::vector<Matrix> residents;  // their places on the device
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
        // All of it is there.
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
    World(GappedRows rows, unsigned seed) : transfers(rows), stream(allocator, rows.layout(), &transfers), _rows(rows), _random(seed) {}

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
            if (!shape.resident) continue;
            Matrix to = group.file.back();
            _buffers.emplace_back(allocator, _rows.layout().bytes(to), "a resident weight");
            to.data = _buffers.back().as<uint8_t>();
            group.to.push_back(to);
            transfers.residents.push_back(to);
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
        int64_t next = 0, piece = 0, usual = 0;
        const int64_t rows = group.file[0].rows - (few ? group.cpuRows : 0);
        stream.forPieces(group.number, [&](const std::vector<Matrix>& parts, int64_t rowBegin) {
            ASSERT_EQ(parts.size(), group.file.size());
            ASSERT_EQ(rowBegin, next);
            size_t bytes = 0;
            for (size_t i = 0; i < parts.size(); ++i) {
                ASSERT_EQ(parts[i].type, group.file[i].type);
                ASSERT_EQ(parts[i].cols, group.file[i].cols);
                ASSERT_EQ(parts[i].rows, parts[0].rows);
                expectRows(parts[i], group.file[i].data + fileRow(parts[i]) * static_cast<size_t>(rowBegin), "streamed");
                bytes += Allocator::aligned(_rows.layout().bytes(parts[i]));
            }
            next += parts[0].rows;
            ASSERT_LE(next, rows);
            EXPECT_TRUE(bytes <= WeightStream::kPieceBytes || parts[0].rows <= WeightStream::kRowStep) << bytes;
            if (piece == 0) usual = parts[0].rows;
            if (next < rows) {
                EXPECT_EQ(parts[0].rows % WeightStream::kRowStep, 0);
                EXPECT_EQ(parts[0].rows, usual);
            }
            ++streamedPieces;
            fetchesAtUse.push_back(transfers.fetches);
            if (piece++ == stopIn) throw GivenUp();
        });
        EXPECT_EQ(next, rows) << "not all rows came";
    }

    void pass(bool few, bool withHead, bool headAlone = false) {
        streamedPieces = 0;
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

    void expectRows(const Matrix& device, const uint8_t* file, const char* what) {
        const size_t bytes = fileRow(device), stride = _rows.stride(device);
        for (int64_t r = 0; r < device.rows; ++r) {
            const auto row = static_cast<size_t>(r);
            ASSERT_EQ(std::memcmp(device.data + stride * row, file + bytes * row, bytes), 0) << what << ", row " << r << " of " << device.rows;
        }
    }
    int64_t residentRows() const {
        int64_t rows = 0;
        for (const Matrix& m : transfers.residents) rows += m.rows;
        return rows;
    }
    size_t held(const std::string& name) const {
        for (const Holding& h : allocator.holdings())
            if (h.name == name) return h.bytes;
        return 0;
    }

    FakeDevice device{size_t{16} << 30};
    Allocator allocator{device};
    StrictTransfers transfers;
    WeightStream stream;
    std::vector<Group> groups;
    size_t headBegin = SIZE_MAX;
    int64_t streamedPieces = 0;          // used in this pass
    std::vector<size_t> fetchesAtUse;    // begun when each streamed piece was used

private:
    GappedRows _rows;
    std::mt19937_64 _random;
    std::deque<std::vector<uint8_t>> _files;
    std::vector<Buffer> _buffers;
};

constexpr DType kTypes[] = {DType::F32, DType::F16, DType::Q4_0, DType::Q8_0, DType::Q4_K, DType::Q5_K, DType::Q6_K, DType::Q2_K, DType::MXFP4};

GroupShape randomGroup(std::mt19937& random, int64_t mostRows, int residentOf10) {
    GroupShape shape;
    const size_t matrices = 1 + random() % 2;
    shape.rows = 1 + static_cast<int64_t>(random() % mostRows);
    for (size_t i = 0; i < matrices; ++i) {
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
    const struct {
        size_t gap;
        int64_t mostRows;
    } kinds[] = {{0, 300}, {size_t{24} << 10, 900}, {size_t{300} << 10, 120}};  // one piece; some; 32 rows are more than a piece may be
    for (int round = 0; round < 45; ++round) {
        const auto& kind = kinds[round % 3];
        SCOPED_TRACE("round " + std::to_string(round));
        World world({kind.gap, round % 5 == 0 ? 0 : 3}, 100u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 3 + random() % 8, kind.mostRows, round % 4 * 3);
        const Matrix table = world.random(DType::Q6_K, 50, 256);
        world.stream.addTable(table);
        world.stream.take();
        EXPECT_EQ(world.transfers.prepared, 1);
        EXPECT_TRUE(liesIn(world.transfers.always, table.data, fileBytes(table)));
        const bool streams = std::any_of(world.groups.begin(), world.groups.end(), [](const World::Group& g) { return !g.resident(); });
        EXPECT_EQ(world.stream.streams(), streams);
        const bool shares = std::any_of(world.groups.begin(), world.groups.end(), [](const World::Group& g) { return g.cpuRows > 0; });
        EXPECT_EQ(world.stream.sharesRows(), shares);
        world.stream.uploadAll();
        EXPECT_EQ(world.transfers.finished, streams ? 0 : 1);
        for (World::Group& group : world.groups) {
            if (!streams) world.keep(group);
        }
        world.changeFiles();

        std::vector<std::pair<std::vector<size_t>, size_t>> ahead;  // of each pass: fetches at each use, and in all
        const auto runPass = [&](bool few, bool withHead, bool headAlone) {
            world.transfers.fetches = 0;
            world.pass(few, withHead, headAlone);
            ahead.emplace_back(world.fetchesAtUse, world.transfers.fetches);
            world.changeFiles();
        };
        for (int pass = 0; pass < 5; ++pass) {
            const bool headAlone = world.headBegin != SIZE_MAX && random() % 4 == 0;
            runPass(!headAlone && random() % 2, headAlone || random() % 3 > 0, headAlone);
        }
        runPass(false, true, false);
        const int64_t pieces = world.streamedPieces;
        if (streams) {
            EXPECT_EQ(static_cast<int64_t>(world.transfers.slotsSeen.size()), std::min<int64_t>(WeightStream::kSlots, pieces));
        }
        EXPECT_EQ(world.transfers.residentRows, world.residentRows()) << "each resident row comes once";
        EXPECT_EQ(ahead.back().second, static_cast<size_t>(pieces)) << "only what is streamed comes again";
        // Of a pass in which nothing resident came, the n-th use finds all slots under way.
        const size_t slots = world.transfers.slotsSeen.size();
        const auto& [atUse, total] = ahead.back();
        for (size_t i = 0; i < atUse.size(); ++i) EXPECT_EQ(atUse[i], std::min(total, i + slots));

        world.stream.finishUploads();
        world.stream.finishUploads();
        EXPECT_EQ(world.transfers.finished, 1);
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(WeightStream, PiecesOfLargeMatricesAreAlikeAndFit) {
    const struct {
        GroupShape shape;
        int64_t pieces;
    } cases[] = {
        {{{DType::Q6_K}, {4096}, 5000, 0, false}, 3},                    // 16 MiB and a little
        {{{DType::Q4_K, DType::Q6_K}, {4096, 4096}, 3001, 992, false}, 3},
        {{{DType::Q8_0}, {1024}, 7710, 0, false}, 1},                    // 8 MiB less 128 bytes
        {{{DType::Q8_0}, {1024}, 7711, 0, false}, 2},
        {{{DType::F32}, {1 << 16}, 33, 0, false}, 2},                    // 32 rows are 8 MiB
        {{{DType::F32}, {(1 << 16) + 256}, 100, 0, false}, 4},           // 32 rows are more
    };
    World world({0, 3}, 5);
    for (const auto& c : cases) world.add(c.shape);
    world.stream.take();
    for (const bool few : {false, true}) {
        world.stream.begin(few, true);
        for (size_t i = 0; i < world.groups.size(); ++i) {
            SCOPED_TRACE("case " + std::to_string(i));
            world.streamedPieces = 0;
            world.use(world.groups[i], few);
            if (!few) {
                EXPECT_EQ(world.streamedPieces, cases[i].pieces);
            }
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
    EXPECT_EQ(world.transfers.residentRows, world.residentRows());
    EXPECT_EQ(world.groups[0].kept[0], first);
    EXPECT_EQ(world.groups[2].kept[0], headWhenUsed);
    EXPECT_NE(std::memcmp(world.groups[0].file[0].data, first.data(), first.size()), 0) << "the file was not changed";
}

TEST(WeightStream, APassGivenUpHalfWayHarmsNoOther) {
    std::mt19937 random(21);
    for (int round = 0; round < 30; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        World world({round % 2 ? size_t{24} << 10 : size_t{0}, 3}, 500u + static_cast<unsigned>(round));
        addRandomGroups(world, random, 6, 700, 4);
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

template <typename Call> void expectInternal(const Call& call) {
    try {
        call();
        ADD_FAILURE() << "no error";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::Internal) << e.what();
    }
}

TEST(WeightStream, RefusesUsesOutOfOrder) {
    World world({0, 3}, 9);
    for (const bool resident : {true, false, false, true}) world.add({{DType::Q8_0}, {256}, 40, 0, resident});
    const auto use = [&](size_t i) { world.use(world.groups[i], false); };
    expectInternal([&] { world.stream.begin(false, true); });  // nothing is taken
    world.stream.take();
    expectInternal([&] { world.stream.take(); });
    expectInternal([&] { use(0); });  // no pass
    expectInternal([&] { use(1); });
    for (const std::vector<size_t>& order : std::vector<std::vector<size_t>>{{1}, {0, 2}, {0, 1, 1}, {0, 1, 3}, {3}}) {
        world.transfers.mayGiveUp = true;
        world.stream.begin(false, true);
        for (size_t i = 0; i + 1 < order.size(); ++i) use(order[i]);
        expectInternal([&] { use(order.back()); });
    }
    world.transfers.mayGiveUp = true;
    world.stream.begin(false, true);
    use(0);
    use(1);
    expectInternal([&] { world.stream.end(); });  // two are left
    EXPECT_FALSE(world.stream.active());
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
    EXPECT_EQ(world.transfers.residentRows, world.residentRows());
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
        const GappedRows rows{round % 2 ? size_t{24} << 10 : size_t{0}, 3};
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
    FakeDevice device(size_t{4} << 20);
    Allocator allocator(device);
    StrictTransfers transfers({0, 3});
    WeightStream stream(allocator, GappedRows{0, 3}.layout(), &transfers);
    std::vector<uint8_t> file(rowBytes(DType::Q8_0, 1024) * 9000);
    stream.addStreamed({{DType::Q8_0, 9000, 1024, file.data()}}, 0);
    try {
        stream.take();
        ADD_FAILURE() << "it fits";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::OutOfMemory);
        EXPECT_NE(std::string(e.what()).find("slots"), std::string::npos) << e.what();
    }
    EXPECT_EQ(transfers.prepared, 0);
}

TEST(CopyingTransfers, RowsComeToTheirPlaces) {
    FakeDevice device(size_t{8} << 20);
    Allocator allocator(device);
    CopyingTransfers transfers(device);
    Matrix m{DType::Q4_0, 70, 64, nullptr};
    const Buffer place(allocator, fileBytes(m), "a matrix");
    std::memset(place.as<uint8_t>(), kPoison, fileBytes(m));
    std::vector<uint8_t> file(fileBytes(m));
    std::mt19937 random(3);
    for (auto& b : file) b = static_cast<uint8_t>(random());
    m.data = place.as<uint8_t>();
    transfers.fetch({{m, 32, 38, file.data() + 32 * fileRow(m)}}, 0);
    for (size_t i = 0; i < 32 * fileRow(m); ++i) ASSERT_EQ(place.as<uint8_t>()[i], kPoison);
    transfers.fetch({{m, 0, 32, file.data()}}, 1);
    EXPECT_EQ(std::memcmp(place.as<uint8_t>(), file.data(), file.size()), 0);
}

}  // namespace
