// A block of threads, and the launch that it belongs to.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "execution/device_memory.h"
#include "execution/warp.h"
#include "ptx/program.h"

namespace sharpi::emulator {

struct Size3 {
    unsigned x = 1, y = 1, z = 1;
    int64_t count() const { return static_cast<int64_t>(x) * y * z; }
};

// One execution of a kernel.
struct Launch {
    const Kernel* kernel = nullptr;
    Size3 grid, block;
    size_t dynamicShared = 0;
    std::vector<uint8_t> parameters;
    std::vector<Range> lastRanges;  // for each instruction, where its last access was

    void run();
};

// A copy to shared memory that was started (cp.async.bulk) and not yet carried out.
struct BulkCopy {
    uint8_t* to;
    const uint8_t* from;
    size_t bytes;
    uintptr_t mbarrier;  // that it completes on
    const Warp* warp;    // that started it
    const Instruction* instruction;
    int lane;
};

class Block {
public:
    explicit Block(Launch& launch);
    void start(int64_t number);
    // Until it is done, or waits for others. Whether it is done.
    bool run();
    std::string name() const;

    Launch& launch() const { return *_launch; }
    const Kernel& kernel() const { return *_launch->kernel; }
    uint8_t* shared() const { return _sharedData; }
    size_t sharedBytes() const { return _sharedBytes; }
    Size3 place() const { return _place; }
    // A warp has come to a barrier of `threads` threads (0: all).
    void arrive(Warp& warp, int barrier, int threads);

    std::vector<BulkCopy> bulkCopies;

private:
    struct Barrier {
        int expected = 0;
        std::vector<Warp*> here;
    };
    void giveTurn(Warp& warp);
    // After each warp had a turn, and whether one of them did more than to test mbarriers.
    void noticeDeadlock(bool moved);
    void release(Barrier& barrier);
    void releaseWithoutExited();

    Launch* _launch;
    Size3 _place;
    std::vector<Warp> _warps;
    std::array<Barrier, 16> _barriers;
    int _roundsOfTests = 0;  // one after the other, in which no warp did more
    std::vector<uint8_t> _sharedMemory;
    uint8_t* _sharedData = nullptr;
    size_t _sharedBytes = 0;
};

}  // namespace sharpi::emulator
