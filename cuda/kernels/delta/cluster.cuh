// Blocks of a cluster (compute capability 9.0): they run at the same time, wait for each other, and write into each
// other's shared memory. Launched by launchClusters; on devices without them nobody may.
#pragma once

#include <cstdint>

namespace sharpi::cuda {

// A barrier of all threads of the cluster in two halves: what was written before the first is seen after the second.
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

// The first half, where nothing was written: to know that the others have begun.
__device__ __forceinline__ void arriveAtClusterSilently() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// To where block `rank` of the cluster has what `own` is here.
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
