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

// Waits at the mbarrier at `address` until the phase with this parity is over, as kernels do: with labels in braces.
std::string waitFor(const std::string& address, const std::string& parity) {
    return "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [" + address + "], " + parity +
           ";\n@done bra over;\nbra again;\nover:\n}\n";
}

// A thread tests both parities at first, after one of two arrivals, after both, and after a second phase.
TEST(Emulator, AnMbarriersPhasesEndWithTheLastArrival) {
    std::string body = "mbarrier.init.shared::cta.b64 [bar], 2;\n";
    const auto test = [&](int number) {
        for (const int parity : {0, 1}) {
            body += std::string("mbarrier.") + (number % 2 ? "try" : "test") + "_wait.parity.shared" +
                    (parity ? "::cta" : "") + ".b64 %p1, [bar], " + std::to_string(parity) +
                    ";\nselp.u32 %r2, 1, 0, %p1;\nst.global.u32 [%rd1+" + std::to_string(8 * number + 4 * parity) +
                    "], %r2;\n";
        }
    };
    test(0);
    body += "mbarrier.arrive.shared.b64 _, [bar];\n";
    test(1);
    body += "mbarrier.arrive.shared::cta.b64 %rd6, [bar];\n";
    test(2);
    body += "mbarrier.arrive.shared.b64 %rd6, [bar];\nmbarrier.arrive.shared.b64 %rd6, [bar];\n";
    test(3);
    Values<int32_t> out(std::vector<int32_t>(8, -1));
    run(kernelOf(body, ".shared .align 8 .b8 bar[8];\n"), out.get(), nullptr, 1);
    EXPECT_EQ(out.read(), (std::vector<int32_t>{0, 1, 0, 1, 1, 0, 0, 1}));
}

// A ring of two stages, each with an mbarrier at 8 * stage that it is full and one at 16 + 8 * stage that it is empty.
// Warp 1 copies: each lane `bytes` bytes from %rd6 to %r13, and `arrivals` lanes arrive. The warps before and after it
// read. Rounds are many, so that failed tests are, too.
constexpr int kRounds = 3000;
std::string ring(const std::string& arrivals, const std::string& bytes, const std::string& copy) {
    const std::string next = "add.u32 %r3, %r3, 1;\nsetp.lt.u32 %p2, %r3, " + std::to_string(kRounds) + ";\n@%p2 bra ";
    const std::string stage =  // %r4: of the round %r3, %r5: its parity, %r6: its mbarriers, %r7: its data
        "and.b32 %r4, %r3, 1;\nshr.u32 %r5, %r3, 1;\nand.b32 %r5, %r5, 1;\nshl.b32 %r6, %r4, 3;\n"
        "add.u32 %r6, %r6, %r10;\nshl.b32 %r7, %r4, 7;\nadd.u32 %r7, %r7, %r11;\n";
    return "mov.u32 %r10, bars;\nmov.u32 %r11, memory;\nand.b32 %r2, %r1, 31;\nshr.u32 %r12, %r1, 5;\n"
           "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra $made;\n"
           "mbarrier.init.shared.b64 [%r10], " +
           arrivals + ";\nmbarrier.init.shared.b64 [%r10+8], " + arrivals +
           ";\n"
           "mbarrier.init.shared.b64 [%r10+16], 64;\nmbarrier.init.shared.b64 [%r10+24], 64;\n"
           "$made:\nbar.sync 0;\nmov.u32 %r3, 0;\nmov.u32 %r8, 0;\nsetp.ne.u32 %p1, %r12, 1;\n@%p1 bra $read;\n"
           "mul.wide.u32 %rd6, %r2, " +
           bytes + ";\nadd.s64 %rd6, %rd2, %rd6;\nmul.lo.u32 %r9, %r2, " + bytes +
           ";\n"
           "$copy:\n" +
           stage + "xor.b32 %r5, %r5, 1;\n" + waitFor("%r6+16", "%r5") + "add.u32 %r13, %r7, %r9;\n" + copy +
           "add.s64 %rd6, %rd6, 128;\n" + next +
           "$copy;\nbra.uni $end;\n"
           "$read:\nsub.u32 %r9, 31, %r2;\nshl.b32 %r9, %r9, 2;\n$again:\n" +
           stage + waitFor("%r6", "%r5") +
           "add.u32 %r13, %r7, %r9;\nld.shared.u32 %r14, [%r13];\nmad.lo.u32 %r8, %r8, 3, %r14;\n"
           "mbarrier.arrive.shared.b64 _, [%r6+16];\n" +
           next + "$again;\n$end:\nst.global.u32 [%rd4], %r8;";
}

// What each thread reads, in which round and from which lane, shows in its sum.
void expectRing(const std::string& body) {
    Values<int32_t> in(counted(32 * kRounds)), out(std::vector<int32_t>(96, -1));
    run(kernelOf(body, ".shared .align 8 .b8 bars[32];\n.shared .align 16 .b8 memory[256];\n"), out.get(), in.get(),
        96);
    const std::vector<int32_t> got = out.read();
    for (int t = 0; t < 96; ++t) {
        uint32_t expected = 0;
        for (int round = 0; round < kRounds && t / 32 != 1; ++round) expected = expected * 3 + 32 * round + 31 - t % 32;
        EXPECT_EQ(static_cast<uint32_t>(got[t]), expected) << t;
    }
}

TEST(Emulator, WarpsHandARingOnThroughMbarriers) {
    expectRing(ring("32", "4",
                    "cp.async.ca.shared.global [%r13], [%rd6], 4;\n"
                    "cp.async.mbarrier.arrive.noinc.shared.b64 [%r6];\n"));
}

const std::string kBulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes ";

// Eight lanes copy a row of 16 bytes each, and expect them before or afterwards.
TEST(Emulator, BulkCopiesFillARing) {
    const std::string some = "setp.lt.u32 %p3, %r2, 8;\nmov.u32 %r15, 16;\n@%p3 ";
    const std::string copy = kBulk + "[%r13], [%rd6], %r15, [%r6];\n";
    const std::string expect = "mbarrier.arrive.expect_tx.shared.b64 _, [%r6], 16;\n";
    expectRing(ring("8", "16", some + expect + "@%p3 " + copy));
    expectRing(ring("8", "16", some + copy + "@%p3 " + expect));
}

// A lane copies 32 bytes between others that must stay as they are. It reads all of them after it tested another
// mbarrier, and after the wait.
TEST(Emulator, BulkCopiesMustBeWaitedFor) {
    const auto text = [](const std::string& name, const std::string& expect) {
        const auto read = [](int to) {
            std::string body;
            for (int i = 0; i < 16; ++i)
                body += "ld.shared.u32 %r2, [memory+" + std::to_string(4 * i) + "];\nst.global.u32 [%rd1+" +
                        std::to_string(4 * (to + i)) + "], %r2;\n";
            return body;
        };
        std::string body =
            "mbarrier.init.shared.b64 [bar], 1;\nmbarrier.init.shared.b64 [bar+8], 1;\n"
            "fence.mbarrier_init.release.cluster;\n";
        for (int i = 0; i < 16; ++i) body += "st.shared.u32 [memory+" + std::to_string(4 * i) + "], 1000;\n";
        body += "fence.proxy.async.shared::cta;\nmov.u32 %r3, memory;\nmov.u32 %r4, bar;\n" + expect + name +
                "[%r3+16], [%rd2+64], 32, [%r4+8];\nmbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;\n" + read(0) +
                waitFor("bar+8", "0") + read(16);
        return kernelOf(body, ".shared .align 8 .b8 bar[16];\n.shared .align 16 .b8 memory[64];\n");
    };
    const std::string ofBlock = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes ";
    const std::string expect = "mbarrier.arrive.expect_tx.shared::cta.b64 %rd6, [bar+8], 32;\n";
    std::vector<int32_t> expected(32, 1000);
    for (int i = 0; i < 8; ++i) {
        expected[4 + i] = -1;
        expected[20 + i] = 16 + i;
    }
    Values<int32_t> in(counted(64));
    for (const std::string& name : {kBulk, ofBlock}) {
        Values<int32_t> out(std::vector<int32_t>(32));
        run(text(name, expect), out.get(), in.get(), 1);
        EXPECT_EQ(out.read(), expected) << name;
    }
    // Bytes that nobody expects do not hold the phase up.
    for (int i = 0; i < 8; ++i) expected[20 + i] = -1;
    Values<int32_t> out(std::vector<int32_t>(32));
    run(text(kBulk, "mbarrier.arrive.shared.b64 _, [bar+8];\n"), out.get(), in.get(), 1);
    EXPECT_EQ(out.read(), expected);
}

// Twice each, as the first test of a phase only lets copies go on. The second phase's copy comes before it is expected.
TEST(Emulator, APhaseEndsWithTheLastArrivalAndTheLastByte) {
    std::string body = "mbarrier.init.shared.b64 [bar], 2;\nmov.u32 %r3, memory;\nmov.u32 %r4, bar;\n";
    int tests = 0;
    const auto test = [&](const std::string& before, int parity) {
        body += before;
        for (int i = 0; i < 2; ++i)
            body += "mbarrier.try_wait.parity.shared.b64 %p1, [bar], " + std::to_string(parity) +
                    ";\nselp.u32 %r2, 1, 0, %p1;\nst.global.u32 [%rd1+" + std::to_string(4 * tests++) + "], %r2;\n";
    };
    const std::string arrive = "mbarrier.arrive.shared.b64 _, [bar];\n";
    const std::string expect = "mbarrier.arrive.expect_tx.shared.b64 _, [bar], ";
    const auto copy = [](const char* bytes) { return kBulk + "[%r3], [%rd2], " + bytes + ", [%r4];\n"; };
    test(expect + "1048575;\n" + copy("1048560"), 0);
    test(expect + "17;\n", 0);
    test(copy("32"), 0);
    test(copy("1048560"), 1);
    test(arrive, 1);
    test(expect + "1048560;\n", 1);
    test(expect + "0;\n" + arrive, 0);
    Values<int32_t> in(counted(1 << 18)), out(std::vector<int32_t>(tests, -1));
    run(kernelOf(body, ".shared .align 8 .b8 bar[8];\n.shared .align 16 .b8 memory[1048576];\n"), out.get(), in.get(),
        1);
    EXPECT_EQ(out.read(), (std::vector<int32_t>{0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1}));
}

// A thread tests after each of many copies: all but the last test fail, which is no deadlock.
TEST(Emulator, TestsBetweenBulkCopiesMayFail) {
    const std::string text = kernelOf(
        "mbarrier.init.shared.b64 [bar], 1;\nmov.u32 %r3, memory;\nmov.u32 %r4, bar;\nmov.u32 %r5, 0;\n"
        "mbarrier.arrive.expect_tx.shared.b64 _, [bar], 48000;\n$again:\n" +
            kBulk +
            "[%r3], [%rd2], 16, [%r4];\nmbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;\nadd.u32 %r5, %r5, 1;\n"
            "setp.lt.u32 %p2, %r5, 3000;\n@%p2 bra $again;\n" +
            waitFor("bar", "0"),
        ".shared .align 8 .b8 bar[8];\n.shared .align 16 .b8 memory[16];\n");
    Values<int32_t> in(counted(4));
    EXPECT_EQ(faultOf(text, nullptr, in.get(), 1), "no fault");
}

TEST(Emulator, MistakesWithBulkCopiesAreFaults) {
    Values<int32_t> in(counted(16));
    const auto faultAfter = [&](const std::string& body) {
        return faultOf(kernelOf("mov.u32 %r3, memory;\nmov.u32 %r4, bar;\nmbarrier.init.shared.b64 [bar], 1;\n" + body,
                                ".shared .align 16 .b8 memory[64];\n.shared .align 8 .b8 bar[16];\n"),
                       nullptr, in.get(), 1);
    };
    const auto copy = [](const std::string& operands) { return kBulk + operands + ";\n"; };
    const std::string expect = "mbarrier.arrive.expect_tx.shared.b64 _, [bar], ", good = "[%r3], [%rd2], 64, [%r4]";
    EXPECT_EQ(faultAfter(expect + "64;\n" + copy(good) + waitFor("bar", "0")), "no fault");
    const auto check = [&](const std::string& body, const char* what) {
        const std::string fault = faultAfter(body);
        EXPECT_NE(fault.find(what), std::string::npos) << body << "\n" << fault;
    };
    check(copy("[%r3+8], [%rd2], 16, [%r4]"), "an access of 16 bytes at 8 of shared or local memory, which is not");
    check(copy("[%r3], [%rd2+8], 16, [%r4]"), "8, which is not aligned");
    check(copy("[%r3], [%rd2], 16, [%r4+4]"), "an access of 8 bytes at 68 of shared or local memory, which is not");
    check(copy("[%r3], [%rd2], 0, [%r4]"), "a bulk copy of 0 bytes, not of 16, 32 and so on");
    check(copy("[%r3], [%rd2], 24, [%r4]"), "a bulk copy of 24 bytes, not of 16, 32 and so on");
    check(copy("[%r3+48], [%rd2], 48, [%r4]"), "a write of 48 bytes at 48 of 80 bytes of shared memory");
    check(copy("[%r3+96], [%rd2], 16, [%r4]"), "a write of 16 bytes at 96 of 80 bytes of shared memory");
    check(copy("[%r3], [%rd2+32], 48, [%r4]"), "a read of 48 bytes, 32 before the end of an allocation of 64");
    check(copy("[%r3], [%rd1], 48, [%r4]"), "at 0x0, where nothing is");
    check(copy("[%r3], [%rd2], 16, [%r4+16]"), "a write of 8 bytes at 80 of 80 bytes of shared memory");
    check(copy("[%r3], [%rd2], 16"), "an instruction that is not emulated");
    const char* const unset = "an mbarrier that was not initialized or was overwritten, at 72 of shared memory";
    check(copy("[%r3], [%rd2], 16, [%r4+8]"), unset);
    check("mbarrier.arrive.expect_tx.shared.b64 _, [bar+8], 16;\n", unset);
    check(copy(good) + "st.shared.u32 [bar+4], 5;\n" + waitFor("bar", "0"), "overwritten, at 64 of shared memory");
    check(expect + "1048576;", "an mbarrier that expects 1048576 bytes");
    check(expect + "16;\n" + expect + "16;", "an arrival at an mbarrier that waits for bytes alone");
    const char* const never = "waits at an mbarrier whose phase never ends, at 64 of shared memory";
    check(expect + "80;\n" + copy(good) + waitFor("bar", "0"), never);
    check(expect + "48;\n" + copy(good) + waitFor("bar", "0"), never);
}

// Lanes that arrive have their data, also of copies that no group was made of. The others' copies are still to come.
TEST(Emulator, AnArrivalAfterCopiesIsOfTheLanesThatExecuteIt) {
    const std::string text = kernelOf(
        "shl.b32 %r2, %r1, 2;\nmov.u32 %r3, memory;\nadd.s32 %r4, %r3, %r2;\n"
        "setp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared.b64 [bar], 8;\nbar.sync 0;\n"
        "cp.async.ca.shared.global [%r4], [%rd5], 4;\ncp.async.commit_group;\n"
        "cp.async.ca.shared.global [%r4+128], [%rd5], 4;\n"
        "ld.shared.u32 %r5, [%r4];\nst.global.u32 [%rd4], %r5;\n"
        "setp.lt.u32 %p2, %r1, 8;\n@%p2 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];\n" +
            waitFor("bar", "0") +
            "ld.shared.u32 %r5, [%r4];\nst.global.u32 [%rd4+128], %r5;\n"
            "ld.shared.u32 %r5, [%r4+128];\nst.global.u32 [%rd4+256], %r5;\n"
            "cp.async.wait_all;\nld.shared.u32 %r5, [%r4+128];\nst.global.u32 [%rd4+384], %r5;",
        ".shared .align 4 .b8 memory[256];\n.shared .align 8 .b8 bar[8];\n");
    Values<int32_t> in(counted(32)), out(std::vector<int32_t>(128));
    run(text, out.get(), in.get(), 32);
    const std::vector<int32_t> got = out.read();
    for (int t = 0; t < 32; ++t) {
        EXPECT_EQ(got[t], -1) << t;
        EXPECT_EQ(got[32 + t], t < 8 ? t : -1) << t;
        EXPECT_EQ(got[64 + t], t < 8 ? t : -1) << t;
        EXPECT_EQ(got[96 + t], t) << t;
    }
}

TEST(Emulator, MistakesWithMbarriersAreFaults) {
    const auto faultAfter = [](const std::string& body) {
        return faultOf(kernelOf(body, ".shared .align 8 .b8 bar[16];\n"), nullptr, nullptr, 1);
    };
    const std::string arrive = "mbarrier.arrive.shared.b64 _, [bar];\n", init = "mbarrier.init.shared.b64 [bar], 1;\n";
    const std::string test = "mbarrier.test_wait.parity.shared.b64 %p1, [bar], ";
    EXPECT_EQ(faultAfter(init + arrive + test + "0;"), "no fault");
    const auto expect = [&](const std::string& body, const char* what) {
        const std::string fault = faultAfter(body);
        EXPECT_NE(fault.find(what), std::string::npos) << body << "\n" << fault;
    };
    const char* const unset = "an mbarrier that was not initialized or was overwritten, at 0 of shared memory";
    expect(arrive, unset);
    expect(test + "1;", unset);
    expect("cp.async.mbarrier.arrive.noinc.shared.b64 [bar];", unset);
    expect(init + "st.shared.u32 [bar], 5;\n" + arrive, unset);
    expect("mbarrier.init.shared.b64 [bar], 0;", "an mbarrier of 0 arrivals");
    expect("mbarrier.init.shared.b64 [bar], 8192;", "an mbarrier of 8192 arrivals, not of 1 to 8191");
    expect("mbarrier.init.shared.b64 [bar+4], 1;", "not aligned");
    expect("mbarrier.init.shared.b64 [bar+16], 1;", "a write of 8 bytes at 16 of 16 bytes of shared memory");
    expect(init + test + "2;", "a parity of an mbarrier that is 2");
    expect("mbarrier.arrive.b64 %rd6, [%rd1];", "an instruction that is not emulated");
}

// The second warp comes to a barrier, the third one ends, so nobody is left to arrive.
TEST(Emulator, AnMbarrierWhosePhaseNeverEndsIsAFault) {
    const auto text = [](int count) {
        return kernelOf("setp.eq.u32 %p1, %r1, 0;\n@%p1 mbarrier.init.shared.b64 [bar+8], " + std::to_string(count) +
                            ";\nbar.sync 0;\nsetp.ge.u32 %p2, %r1, 64;\n@%p2 bra $arrive;\n"
                            "setp.ge.u32 %p2, %r1, 32;\n@%p2 bra $end;\n" +
                            waitFor("bar+8", "0") +
                            "bra.uni $end;\n"
                            "$arrive:\nmbarrier.arrive.shared.b64 _, [bar+8];\nbra.uni $exit;\n"
                            "$end:\nbar.sync 1;\n$exit:\n",
                        ".shared .align 8 .b8 bar[16];\n");
    };
    EXPECT_EQ(faultOf(text(32), nullptr, nullptr, 96), "no fault");
    const std::string fault = faultOf(text(33), nullptr, nullptr, 96);
    EXPECT_NE(fault.find("waits at an mbarrier whose phase never ends, at 8 of shared memory"), std::string::npos)
        << fault;
    EXPECT_NE(fault.find("warp 0"), std::string::npos) << fault;
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

TEST(Emulator, LabelsEndWithTheirBraces) {
    const auto text = [](const char* label) {
        return kernelOf(
            "mov.u32 %r2, 0;\n{\nbra.uni over;\nadd.u32 %r2, %r2, 1;\nover:\n}\nadd.u32 %r2, %r2, 10;\n"
            "{\nbra.uni over;\nadd.u32 %r2, %r2, 100;\nover:\n{\nbra.uni $end;\n}\n}\n" +
            std::string(label) + ":\nadd.u32 %r2, %r2, 1000;\n$end:\nst.global.u32 [%rd4], %r2;");
    };
    Values<int32_t> out(std::vector<int32_t>(1));
    run(text("$last"), out.get(), nullptr, 1);
    EXPECT_EQ(out.read()[0], 10);
    const std::string fault = faultOf(text("$end"), out.get(), nullptr, 1);
    EXPECT_NE(fault.find("a label of two places: $end"), std::string::npos) << fault;
}

TEST(Emulator, SaysWhichInstructionItLacks) {
    EXPECT_NE(faultOf(kernelOf("tanh.approx.f32 %f1, %f2;"), nullptr, nullptr, 32).find("tanh.approx.f32"),
              std::string::npos);
}

}  // namespace
}  // namespace sharpi::emulator
