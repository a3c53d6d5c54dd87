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

private:
    struct Barrier {
        int expected = 0;
        std::vector<Warp*> here;
    };
    void release(Barrier& barrier);
    void releaseWithoutExited();

    Launch* _launch;
    Size3 _place;
    std::vector<Warp> _warps;
    std::array<Barrier, 16> _barriers;
    std::vector<uint8_t> _sharedMemory;
    uint8_t* _sharedData = nullptr;
    size_t _sharedBytes = 0;
};

}  // namespace sharpi::emulator
