// See block.h and warp.h.
#include "execution/block.h"

#include <immintrin.h>

#include <algorithm>
#include <deque>
#include <thread>

#include "execution/lanes.h"

namespace sharpi::emulator {

namespace {

constexpr size_t kSharedAlignment = 1024;
constexpr int64_t kTurn = 200000;  // instructions of a warp before another one has its turn
// Turns of each warp in which nothing but tests of mbarriers happens, until it counts as a deadlock. A warp may test an
// mbarrier and then do something else, but not that often.
constexpr int kRoundsOfTests = 1000;
constexpr uint8_t kUnsetByte = 0xff;

}  // namespace

uint32_t lanesOf(const uint32_t* predicate) {
    uint32_t bits = 0;
    for (int part = 0; part < 4; ++part) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(predicate + 8 * part));
        bits |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(words))) << (8 * part);
    }
    return bits;
}

void fault(const Warp& warp, const Instruction& in, uint32_t lanes, const std::string& what) {
    const Kernel& kernel = warp.block->kernel();
    throw Fault(kernel.placeOf(in) + ": " + what + " (block " + warp.block->name() + ", warp " +
                std::to_string(warp.number) + ", lane " + std::to_string(lanes ? __builtin_ctz(lanes) : 0) + ", " +
                kernel.name + ")");
}

// --- warps ----------------------------------------------------------------------------------------------------------

void Warp::start(Block& owner, int which, uint32_t present) {
    block = &owner;
    const Kernel& kernel = owner.kernel();
    const Launch& launch = owner.launch();
    number = which;
    code = kernel.code.data();
    _registers.resize(kernel.registerBytes + 64);
    bases[0] = _registers.data() + (64 - reinterpret_cast<uintptr_t>(_registers.data()) % 64) % 64;
    bases[1] = const_cast<uint8_t*>(kernel.constants.data());
    _localMemory.assign(kernel.localBytes * kLanes, kUnsetByte);
    local = _localMemory.data();
    state = State::Ready;
    paused = false;
    failedTest = {};
    arrived = false;
    pc = 0;
    lanes = active = present;
    exited = ~present;
    join = -1;
    waiting.clear();
    copies.clear();
    copyGroups = 0;

    const auto fill = [&](Special special, auto value) {
        if (!(kernel.specials >> static_cast<int>(special) & 1)) return;
        auto* out = at<uint32_t>(static_cast<int>(special) * kSlotBytes);
        for (int l = 0; l < kLanes; ++l) out[l] = value(static_cast<unsigned>(l));
    };
    const auto constant = [&](Special special, uint32_t value) { fill(special, [=](unsigned) { return value; }); };
    const Size3 size = launch.block, place = owner.place();
    const unsigned first = which * kLanes;
    fill(Special::TidX, [=](unsigned l) { return (first + l) % size.x; });
    fill(Special::TidY, [=](unsigned l) { return (first + l) / size.x % size.y; });
    fill(Special::TidZ, [=](unsigned l) { return (first + l) / size.x / size.y; });
    constant(Special::NtidX, size.x);
    constant(Special::NtidY, size.y);
    constant(Special::NtidZ, size.z);
    constant(Special::CtaidX, place.x);
    constant(Special::CtaidY, place.y);
    constant(Special::CtaidZ, place.z);
    constant(Special::NctaidX, launch.grid.x);
    constant(Special::NctaidY, launch.grid.y);
    constant(Special::NctaidZ, launch.grid.z);
    fill(Special::Lane, [](unsigned l) { return l; });
    fill(Special::LaneBit, [](unsigned l) { return 1u << l; });
    fill(Special::LanesBelow, [](unsigned l) { return (1u << l) - 1; });
    fill(Special::LanesBelowOrAt, [](unsigned l) { return (2u << l) - 1; });
    fill(Special::LanesAbove, [](unsigned l) { return ~((2u << l) - 1); });
    fill(Special::LanesAboveOrAt, [](unsigned l) { return ~((1u << l) - 1); });
    constant(Special::WarpNumber, which);
}

void Warp::run(int64_t budget) {
    while (state == State::Ready && budget-- > 0 && !paused && !failedTest.instruction) {
        const Instruction& in = code[pc++];
        exec = active;
        if (in.guard != kNone && !in.control) {
            const uint32_t chosen = lanesOf(at<uint32_t>(in.guard));
            exec &= in.negated ? ~chosen : chosen;
            if (!exec) continue;
        }
        in.run(*this, in);
    }
}

void Warp::resume() {
    while (!active) {
        if (waiting.empty()) {
            finishCopies(0);
            state = State::Done;
            return;
        }
        const Waiting next = waiting.back();
        waiting.pop_back();
        active = next.lanes & ~exited;
        pc = next.at;
        join = next.join;
    }
}

void Warp::finishCopies(int pending) {
    size_t kept = 0;
    for (size_t i = 0; i < copies.size(); ++i) {
        const Copies& copy = copies[i];
        if (copy.group >= copyGroups - pending) {
            if (kept != i) copies[kept] = copy;
            ++kept;
            continue;
        }
        finish(copy, copy.lanes);
    }
    copies.resize(kept);
}

void Warp::finishCopiesOf(uint32_t those) {
    for (Copies& copy : copies) {
        finish(copy, copy.lanes & those);
        copy.lanes &= ~those;
    }
    const auto isDone = [](const Copies& copy) { return copy.lanes == 0; };
    copies.erase(std::remove_if(copies.begin(), copies.end(), isDone), copies.end());
}

void Warp::finish(const Copies& copy, uint32_t those) {
    forLanes(those, [&](int l) {
        if (copy.used[l]) std::memcpy(copy.to[l], copy.from[l], copy.used[l]);
        std::memset(copy.to[l] + copy.used[l], 0, copy.bytes - copy.used[l]);
    });
}

// --- blocks ---------------------------------------------------------------------------------------------------------

Block::Block(Launch& launch) : _launch(&launch), _warps((launch.block.count() + kLanes - 1) / kLanes) {
    _sharedBytes = kernel().sharedBytes + launch.dynamicShared;
    _sharedMemory.resize(_sharedBytes + kSharedAlignment);
    const auto address = reinterpret_cast<uintptr_t>(_sharedMemory.data());
    _sharedData = _sharedMemory.data() + (kSharedAlignment - address % kSharedAlignment) % kSharedAlignment;
}

void Block::start(int64_t block) {
    const Size3 grid = _launch->grid;
    _place = {static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
              static_cast<unsigned>(block / grid.x / grid.y)};
    std::memset(_sharedData, kUnsetByte, _sharedBytes);
    for (Barrier& barrier : _barriers) barrier = {};
    bulkCopies.clear();
    _roundsOfTests = 0;
    const int64_t threads = _launch->block.count();
    for (size_t w = 0; w < _warps.size(); ++w) {
        const int64_t present = std::min<int64_t>(kLanes, threads - static_cast<int64_t>(w) * kLanes);
        _warps[w].start(*this, static_cast<int>(w), present == kLanes ? kAllLanes : (1u << present) - 1);
    }
}

std::string Block::name() const {
    return std::to_string(_place.x) + "," + std::to_string(_place.y) + "," + std::to_string(_place.z);
}

bool Block::run() {
    for (;;) {
        bool ran = false, isPaused = false, moved = false, done = true;
        for (Warp& warp : _warps) {
            if (warp.state == Warp::State::Ready) {
                giveTurn(warp);
                ran = true;
                isPaused = isPaused || warp.paused;
                moved = moved || !warp.failedTest.instruction || warp.arrived;
            }
            done = done && warp.state == Warp::State::Done;
        }
        if (done) return true;
        releaseWithoutExited();
        if (ran) noticeDeadlock(moved);
        if (!ran) {
            const bool stuck =
                std::none_of(_warps.begin(), _warps.end(), [](const Warp& w) { return w.state == Warp::State::Ready; });
            if (stuck) {
                for (const Warp& warp : _warps)
                    if (warp.state == Warp::State::AtBarrier)
                        fault(warp, *warp.barrierInstruction, warp.active,
                              "waits at a barrier that the others never reach");
            }
        }
        if (isPaused) return false;
    }
}

void Block::giveTurn(Warp& warp) {
    warp.paused = false;
    warp.failedTest = {};
    warp.arrived = false;
    warp.run(kTurn);
}

void Block::noticeDeadlock(bool moved) {
    _roundsOfTests = moved ? 0 : _roundsOfTests + 1;
    if (_roundsOfTests < kRoundsOfTests) return;
    for (const Warp& warp : _warps) {
        const FailedTest& test = warp.failedTest;
        if (warp.state == Warp::State::Ready && test.instruction)
            fault(warp, *test.instruction, 1u << test.lane,
                  "waits at an mbarrier whose phase never ends, at " + std::to_string(test.at) + " of shared memory");
    }
}

void Block::arrive(Warp& warp, int number, int threads) {
    if (number < 0 || number >= 16) fault(warp, *warp.barrierInstruction, warp.active, "a barrier that does not exist");
    const uint32_t present = warp.lanes & ~warp.exited;
    if (warp.exec != present)
        fault(warp, *warp.barrierInstruction, warp.exec, "a barrier that only a part of a warp's lanes reached");
    Barrier& barrier = _barriers[number];
    if (threads % kLanes) fault(warp, *warp.barrierInstruction, warp.exec, "a barrier of parts of warps");
    if (!barrier.here.empty() && barrier.expected != threads)
        fault(warp, *warp.barrierInstruction, warp.exec, "a barrier with two numbers of threads");
    barrier.expected = threads;
    barrier.here.push_back(&warp);
    warp.state = Warp::State::AtBarrier;
    warp.barrier = number;
    if (threads && static_cast<int>(barrier.here.size()) * kLanes > threads)
        fault(warp, *warp.barrierInstruction, warp.exec, "a barrier that too many threads reached");
    if (threads && static_cast<int>(barrier.here.size()) * kLanes == threads) release(barrier);
    if (!threads) releaseWithoutExited();
}

void Block::releaseWithoutExited() {
    const auto left = static_cast<size_t>(
        std::count_if(_warps.begin(), _warps.end(), [](const Warp& warp) { return warp.state != Warp::State::Done; }));
    for (Barrier& barrier : _barriers)
        if (!barrier.here.empty() && barrier.expected == 0 && barrier.here.size() == left) release(barrier);
}

// An instruction whose o[0] is a result and o[2] a predicate also counts the lanes in which that is true: `immediate`
// says how (control.cpp).
void Block::release(Barrier& barrier) {
    uint32_t count = 0;
    for (const Warp* warp : barrier.here) {
        const Instruction& in = *warp->barrierInstruction;
        if (in.o[2] == kNone) continue;
        const uint32_t chosen = lanesOf(warp->at<uint32_t>(in.o[2]));
        count += __builtin_popcount((in.negated ? ~chosen : chosen) & warp->active);
    }
    const int64_t threads = _launch->block.count();
    for (Warp* warp : barrier.here) {
        const Instruction& in = *warp->barrierInstruction;
        if (in.o[0] != kNone) {
            auto* out = warp->at<uint32_t>(in.o[0]);
            const uint32_t value = in.immediate == 0   ? count
                                   : in.immediate == 1 ? (count ? ~0u : 0)
                                                       : (count == threads ? ~0u : 0);
            for (int l = 0; l < kLanes; ++l)
                if (warp->active >> l & 1) out[l] = value;
        }
        warp->state = Warp::State::Ready;
    }
    barrier = {};
}

// --- launches -------------------------------------------------------------------------------------------------------

void Launch::run() {
    lastRanges.assign(kernel->code.size(), {});
    std::vector<std::unique_ptr<Block>> unused;
    std::deque<std::unique_ptr<Block>> running;
    const int64_t count = grid.count();
    for (int64_t next = 0; next < count || !running.empty();) {
        // All of a grid's blocks run, if some wait for others.
        if (next < count) {
            if (unused.empty()) unused.push_back(std::make_unique<Block>(*this));
            running.push_front(std::move(unused.back()));
            unused.pop_back();
            running.front()->start(next++);
        } else {
            std::this_thread::yield();
        }
        std::unique_ptr<Block> block = std::move(running.front());
        running.pop_front();
        if (block->run()) unused.push_back(std::move(block));
        else running.push_back(std::move(block));
    }
}

}  // namespace sharpi::emulator
