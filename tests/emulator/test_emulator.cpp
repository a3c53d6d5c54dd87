// The emulator itself: kernels of a few lines, whose results are known, and mistakes that it must notice.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "execution/block.h"
#include "ptx/module.h"

namespace sharpi::emulator {
namespace {

constexpr const char* kHead = ".version 8.0\n.target sm_80\n.address_size 64\n";

// A kernel with a pointer to its results and one to its data.
std::string kernelOf(const std::string& body, const std::string& registers = "") {
    return std::string(kHead) +
           ".visible .entry k(\n.param .u64 k_param_0,\n.param .u64 k_param_1\n)\n{\n"
           ".reg .pred %p<8>;\n.reg .b32 %r<32>;\n.reg .f32 %f<16>;\n.reg .b64 %rd<16>;\n" +
           registers +
           "ld.param.u64 %rd1, [k_param_0];\nld.param.u64 %rd2, [k_param_1];\n"
           "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd3, %r1, 4;\nadd.s64 %rd4, %rd1, %rd3;\nadd.s64 %rd5, %rd2, %rd3;\n" +
           body + "\nret;\n}\n";
}

template <typename T> class Values {
public:
    explicit Values(std::vector<T> values) : _count(values.size()) {
        _data = static_cast<T*>(DeviceMemory::instance().take(_count * sizeof(T)));
        std::memcpy(_data, values.data(), _count * sizeof(T));
    }
    ~Values() { DeviceMemory::instance().release(_data); }
    Values(const Values&) = delete;
    Values& operator=(const Values&) = delete;
    T* get() const { return _data; }
    std::vector<T> read() const { return {_data, _data + _count}; }

private:
    T* _data;
    size_t _count;
};

void run(const std::string& text, void* out, void* data, unsigned threads, unsigned blocks = 1, size_t shared = 0) {
    Module module(text);
    Launch launch;
    launch.kernel = &module.kernel("k");
    launch.grid.x = blocks;
    launch.block.x = threads;
    launch.dynamicShared = shared;
    launch.parameters.resize(16);
    std::memcpy(launch.parameters.data(), &out, 8);
    std::memcpy(launch.parameters.data() + 8, &data, 8);
    launch.run();
}

std::string faultOf(const std::string& text, void* out, void* data, unsigned threads, size_t shared = 0) {
    try {
        run(text, out, data, threads, 1, shared);
    } catch (const Fault& fault) {
        return fault.what();
    }
    return "no fault";
}

std::vector<int32_t> counted(int count) {
    std::vector<int32_t> values(count);
    std::iota(values.begin(), values.end(), 0);
    return values;
}

TEST(Emulator, FusedAndSeparateRoundingDiffer) {
    const float a = 1.0f + 0x1p-12f;
    Values<float> in(std::vector<float>(32, a)), out(std::vector<float>(64));
    run(kernelOf("ld.global.f32 %f1, [%rd5];\nneg.f32 %f2, %f1;\nmul.rn.f32 %f3, %f1, %f1;\nmov.f32 %f4, 0fBF800000;\n"
                 "fma.rn.f32 %f5, %f1, %f1, %f4;\nadd.rn.f32 %f6, %f3, %f4;\nst.global.f32 [%rd4], %f5;\n"
                 "st.global.f32 [%rd4+128], %f6;"),
        out.get(), in.get(), 32);
    EXPECT_EQ(out.read()[3], std::fma(a, a, -1.0f));
    EXPECT_EQ(out.read()[35], a * a - 1.0f);
    EXPECT_NE(out.read()[3], out.read()[35]);
}

// Each thread goes through a loop as often as its number says, and around a branch in it if that is odd.
TEST(Emulator, LanesGoTheirWaysAndMeetAgain) {
    const std::string text = kernelOf(
        "mov.u32 %r2, 0;\nmov.u32 %r3, 0;\n"
        "$loop:\nsetp.ge.u32 %p1, %r2, %r1;\n@%p1 bra $end;\n"
        "and.b32 %r4, %r1, 1;\nsetp.eq.s32 %p2, %r4, 0;\n@%p2 bra $even;\n"
        "add.s32 %r3, %r3, 100;\nbra.uni $next;\n$even:\nadd.s32 %r3, %r3, 1;\n"
        "$next:\nadd.s32 %r2, %r2, 1;\nbra.uni $loop;\n"
        "$end:\nshfl.sync.bfly.b32 %r5|%p3, %r3, 1, 31, -1;\nst.global.u32 [%rd4], %r5;");
    Values<int32_t> out(std::vector<int32_t>(64));
    run(text, out.get(), nullptr, 64);
    const std::vector<int32_t> got = out.read();
    for (int t = 0; t < 64; ++t) {
        const int other = t ^ 1;
        EXPECT_EQ(got[t], other * (other % 2 ? 100 : 1)) << t;
    }
}

// Threads exchange values through shared memory: 96 of them, so that warps wait for each other.
const char* kExchange =
    "shl.b32 %r2, %r1, 2;\nmov.u32 %r3, memory;\nadd.s32 %r4, %r3, %r2;\nst.shared.u32 [%r4], %r1;\nbar.sync 0;\n"
    "sub.s32 %r5, 95, %r1;\nshl.b32 %r6, %r5, 2;\nadd.s32 %r7, %r3, %r6;\nld.shared.u32 %r8, [%r7];\n"
    "st.global.u32 [%rd4], %r8;";

TEST(Emulator, BarriersHoldWarpsBack) {
    Values<int32_t> out(std::vector<int32_t>(96));
    run(kernelOf(kExchange, ".shared .align 4 .b8 memory[384];\n"), out.get(), nullptr, 96);
    for (int t = 0; t < 96; ++t) EXPECT_EQ(out.read()[t], 95 - t);
}

TEST(Emulator, SharedMemoryEndsWhereItEnds) {
    Values<int32_t> out(std::vector<int32_t>(96));
    const std::string fault =
        faultOf(kernelOf(kExchange, ".shared .align 4 .b8 memory[380];\n"), out.get(), nullptr, 96);
    EXPECT_NE(fault.find("a write of 4 bytes at 380 of 380 bytes of shared memory"), std::string::npos) << fault;
}

TEST(Emulator, AccessesPastTheEndAreFaults) {
    Values<int32_t> in(counted(31)), out(std::vector<int32_t>(32));
    const std::string copy = kernelOf("ld.global.u32 %r2, [%rd5];\nst.global.u32 [%rd4], %r2;");
    const std::string fault = faultOf(copy, out.get(), in.get(), 32);
    EXPECT_NE(fault.find("a read of 4 bytes"), std::string::npos) << fault;
    EXPECT_NE(fault.find("lane 31"), std::string::npos) << fault;
    EXPECT_EQ(faultOf(copy, out.get(), in.get(), 31), "no fault");
    EXPECT_EQ(out.read()[30], 30);
}

TEST(Emulator, AccessesMustBeAligned) {
    Values<int32_t> in(counted(64)), out(std::vector<int32_t>(64));
    const std::string fault =
        faultOf(kernelOf("ld.global.v2.u32 {%r2, %r3}, [%rd5];\nst.global.u32 [%rd4], %r2;"), out.get(), in.get(), 32);
    EXPECT_NE(fault.find("not aligned"), std::string::npos) << fault;
}

// What a copy brings is there after it was waited for, and nonsense before.
TEST(Emulator, CopiesMustBeWaitedFor) {
    const auto text = [](const char* wait) {
        return kernelOf(
            "shl.b32 %r2, %r1, 2;\nmov.u32 %r3, memory;\nadd.s32 %r4, %r3, %r2;\n"
            "cp.async.ca.shared.global [%r4], [%rd5], 4;\ncp.async.commit_group;\n" +
                std::string(wait) + "ld.shared.u32 %r5, [%r4];\nst.global.u32 [%rd4], %r5;",
            ".shared .align 4 .b8 memory[128];\n");
    };
    Values<int32_t> in(counted(32)), out(std::vector<int32_t>(32));
    run(text("cp.async.wait_group 0;\n"), out.get(), in.get(), 32);
    EXPECT_EQ(out.read(), counted(32));
    run(text("cp.async.wait_group 1;\n"), out.get(), in.get(), 32);
    EXPECT_EQ(out.read(), std::vector<int32_t>(32, -1));
}

TEST(Emulator, ABarrierThatSomeNeverReachIsAFault) {
    Values<int32_t> out(std::vector<int32_t>(64));
    const std::string fault =
        faultOf(kernelOf("setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $end;\nbar.sync 0;\n$end:\nst.global.u32 [%rd4], %r1;"),
                out.get(), nullptr, 64);
    EXPECT_NE(fault.find("only a part of a warp"), std::string::npos) << fault;
}

// The second block sets what the first one waits for.
TEST(Emulator, BlocksMayWaitForEachOther) {
    const std::string text = kernelOf(
        "mov.u32 %r2, %ctaid.x;\nsetp.eq.s32 %p1, %r2, 1;\n@%p1 bra $second;\n"
        "$wait:\nld.acquire.gpu.global.u32 %r3, [%rd2];\nnanosleep.u32 10;\nsetp.eq.s32 %p2, %r3, 0;\n@%p2 bra $wait;\n"
        "st.global.u32 [%rd1], %r3;\nbra.uni $end;\n$second:\nst.release.gpu.global.u32 [%rd2], 7;\n$end:\n");
    Values<int32_t> flag(std::vector<int32_t>{0}), out(std::vector<int32_t>{0});
    run(text, out.get(), flag.get(), 1, 2);
    EXPECT_EQ(out.read()[0], 7);
}

// A constant that looks like the address of what a launch asks for stays what it is.
TEST(Emulator, DynamicSharedMemoryHasAnAddressOfItsOwn) {
    std::string text = kernelOf(
        "mov.f32 %f1, 0f40000000;\nmov.u32 %r2, dynamic;\nst.shared.f32 [%r2], %f1;\n"
        "ld.shared.f32 %f2, [%r2];\nst.global.f32 [%rd4], %f2;");
    text.insert(std::strlen(kHead), ".extern .shared .align 16 .b8 dynamic[];\n");
    Values<float> out(std::vector<float>(1));
    run(text, out.get(), nullptr, 1, 1, 4);
    EXPECT_EQ(out.read()[0], 2.0f);
}

TEST(Emulator, SaysWhichInstructionItLacks) {
    EXPECT_NE(faultOf(kernelOf("tanh.approx.f32 %f1, %f2;"), nullptr, nullptr, 32).find("tanh.approx.f32"),
              std::string::npos);
}

}  // namespace
}  // namespace sharpi::emulator
