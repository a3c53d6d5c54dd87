// What DevicePlacer makes of a plan's homes: which of a matrix's rows are the CPU's. And what a plan counts beside
// weights.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "core/contract.h"
#include "cpu/cpu_kind.h"
#include "experts/expert_slots.h"
#include "fake_device.h"
#include "memory/allocator.h"
#include "memory/stream/weight_stream.h"
#include "placement/placer.h"
#include "plan/cuda_kind.h"
#include "planning/memory_plan.h"
#include "tiny_model.h"

namespace {

using namespace sharpi;

DeviceLayout plainLayout() {
    DeviceLayout layout;
    layout.bytes = [](const Matrix& m) { return rowBytes(m.type, m.cols) * static_cast<size_t>(m.rows); };
    return layout;
}

struct World {
    World()
        : device(size_t{1} << 26),
          allocator(device),
          stream(allocator, plainLayout(), nullptr),
          slots(allocator, plainLayout()),
          placer(allocator, plainLayout(), stream, slots, nullptr),
          data(size_t{1} << 20) {}

    Weight place(int64_t rows, Home home, int64_t cpuRows) {
        FileMatrix matrix;
        matrix.file = {DType::F32, rows, 64, data.data()};
        matrix.home.home = home;
        matrix.home.cpuRows = cpuRows;
        matrix.name = "w";
        return placer.weights({matrix})[0];
    }

    FakeDevice device;
    Allocator allocator;
    WeightStream stream;
    ExpertSlotManager slots;
    DevicePlacer placer;
    std::vector<uint8_t> data;
};

// The GPU's rows end with a block of the contract, so that either side quantizes whole blocks; it takes the rows that
// are left over.
TEST(DevicePlacer, TheCpuGetsTheRowsThatAreAskedForUpToABlock) {
    World world;
    for (const int64_t rows : {32, 96, 100, 1024}) {
        for (const int64_t asked : {0, 1, 31, 32, 33, 64, 95, 96, 100, 1000, 2000}) {
            const int64_t cpu = world.place(rows, Home::Direct, asked).cpuRows;
            SCOPED_TRACE(std::to_string(asked) + " of " + std::to_string(rows) + " gave " + std::to_string(cpu));
            EXPECT_GE(cpu, 0);
            EXPECT_LE(cpu, std::min(asked, rows));
            EXPECT_GT(cpu + kContractBlock, std::min(asked, rows)) << "less than a block is lost";
            if (cpu > 0) {
                EXPECT_EQ((rows - cpu) % kContractBlock, 0) << "whole blocks on the GPU's side";
            }
        }
    }
    for (const int64_t asked : {32, 64, 1024}) EXPECT_EQ(world.place(1024, Home::Direct, asked).cpuRows, asked);
}

// The rights of the mapping that holds this address, as the system lists them.
std::string rightsAt(uintptr_t address) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        char* after = nullptr;
        const uintptr_t begin = std::strtoull(line.c_str(), &after, 16), end = std::strtoull(after + 1, &after, 16);
        if (begin <= address && address < end) return std::string(after + 1, 4);
    }
    return "none";
}

// What a device uploads from may be pinned for reading alone, with what lies near it in the same mapping: nothing that
// is written may be there.
TEST(DevicePlacer, WhatIsMadeLiesOnPagesOfItsOwn) {
    World world;
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    std::vector<uintptr_t> pages;
    for (const int64_t rows : {1, 3, 40, 64, 65, 1}) {
        std::vector<uint8_t> bytes(static_cast<size_t>(rows) * 64 * sizeof(float));
        for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7 + static_cast<size_t>(rows));
        const Weight made = world.placer.made({DType::F32, rows, 64, nullptr}, bytes, "made");
        EXPECT_EQ(std::memcmp(made.file, bytes.data(), bytes.size()), 0);
        const auto begin = reinterpret_cast<uintptr_t>(made.file);
        EXPECT_EQ(begin % page, 0u);
        EXPECT_EQ(rightsAt(begin), "r--p");
        for (uintptr_t at = begin; at < begin + bytes.size(); at += page) pages.push_back(at / page);
    }
    std::sort(pages.begin(), pages.end());
    EXPECT_EQ(std::adjacent_find(pages.begin(), pages.end()), pages.end());
}

TEST(DevicePlacer, NoRowsOfWhatIsResidentAreTheCpus) {
    World world;
    const Weight weight = world.place(96, Home::Vram, 64);
    EXPECT_EQ(weight.cpuRows, 0);
    EXPECT_NE(weight.data, nullptr);
    EXPECT_EQ(world.place(96, Home::Direct, 64).data, nullptr);
}

// Captured steps take memory that nobody asks the allocator for: a plan counts it too.
TEST(PlannedLines, GraphsAreCounted) {
    const tiny::Model model{tiny::Options()};
    for (const bool cuda : {false, true}) {
        EngineOptions options(cuda ? cudaKind() : cpuKind());
        options.context = 100;
        options.batch = 16;
        const std::vector<TraceLine> lines = plannedLines(model.spec(), model.table(), options);
        EXPECT_EQ(lines.back().name, "graphs");
        EXPECT_EQ(lines.back().taken, static_cast<int64_t>(lines.back().asked));
        if (cuda) {
            EXPECT_GE(lines.back().taken, int64_t{16} << 20);
        } else {
            EXPECT_EQ(lines.back().taken, 0);
        }
        int64_t sum = 0;
        for (const TraceLine& line : lines) sum += line.taken;
        EXPECT_EQ(plannedBytes(model.spec(), model.table(), options), static_cast<size_t>(sum));
    }
}

}  // namespace
