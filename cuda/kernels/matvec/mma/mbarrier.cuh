// Barriers of a thread block in shared memory, at which some threads only arrive and others only wait (compute
// capability 8.0 and above).
#pragma once

#include <cstdint>

namespace sharpi::cuda {

// A barrier in 8 bytes of shared memory.
class Mbarrier {
public:
    __device__ __forceinline__ explicit Mbarrier(uint32_t at) : _at(at) {}

    // arrivals: those that end a phase. One thread calls it, before all threads meet.
    __device__ __forceinline__ void init(int arrivals) const {
#if __CUDA_ARCH__ >= 800
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(_at), "r"(arrivals) : "memory");
#endif
    }
    __device__ __forceinline__ void arrive() const {
#if __CUDA_ARCH__ >= 800
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(_at) : "memory");
#endif
    }
    // Arrives when the calling thread's copies so far are done. It is one of init()'s arrivals.
    __device__ __forceinline__ void arriveWithCopies() const {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(_at) : "memory");
#endif
    }
    // Waits for the end of the phase of this parity: 0 for the first, 1 for the second, 0 for the third, ...
    __device__ __forceinline__ void wait(uint32_t parity) const {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra over;\nbra "
            "again;\nover:\n}" ::"r"(_at),
            "r"(parity)
            : "memory");
#elif __CUDA_ARCH__ >= 800
        asm volatile(
            "{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n@done bra over;\nbra "
            "again;\nover:\n}" ::"r"(_at),
            "r"(parity)
            : "memory");
#endif
    }

private:
    uint32_t _at;
};

// A slot of a ring, and how often the ring has come around, modulo 2: the parity of the phase in which the slot becomes
// full.
struct RingPlace {
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int slots) {
        if (++at < slots) return;
        at = 0;
        parity ^= 1;
    }
    // Several times next(). by: at most the number of slots.
    __device__ __forceinline__ void move(int by, int slots) {
        at += by;
        if (at < slots) return;
        at -= slots;
        parity ^= 1;
    }
};

}  // namespace sharpi::cuda
