// Blocks of a cluster (compute capability 9.0) run at the same time, can wait for each other, and can write to each
// other's shared memory. launchClusters launches them. On older devices no kernel may call these functions.
#pragma once

#include <cstdint>

namespace sharpi::cuda {

// A barrier of all threads of the cluster, in two halves. What was written before the first is visible after the
// second.
__device__ __forceinline__ void arriveAtCluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void waitForCluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The first half for a thread that has written nothing and only needs to know that the other blocks have begun.
__device__ __forceinline__ void arriveAtClusterSilently() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Stores to the place in block `rank` of the cluster that corresponds to `own` in this block.
__device__ __forceinline__ void storeInCluster(float4* own, uint32_t rank, float4 x) {
#if __CUDA_ARCH__ >= 900
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
#endif
}

}  // namespace sharpi::cuda
