// Blocks of a cluster, which share what they copy.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of it. What they wrote is not therefore seen, but barriers that were published are: to release to a cluster
// takes a fence of the whole GPU, a microsecond.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the barrier that the block of this rank has in the same place, by a thread that has written nothing for it to see.
__device__ __forceinline__ void arrive_at(u64& barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(&barrier)),
        "r"(rank)
        : "memory");
}

// Of a ring of stages that each of PEERS blocks has and all of them fill; READERS warps of each read.
template <int STAGES, int READERS, int PEERS>
struct ClusterBarriers {
    u64 full[STAGES], empty[STAGES];  // empty: of all blocks' readers

    // They are there for the block's other threads once those have met, and for the cluster's likewise.
    __device__ __forceinline__ void init() {
        if (threadIdx.x < STAGES) {
            init_barrier(full[threadIdx.x], 1);
            init_barrier(empty[threadIdx.x], READERS * PEERS);
        }
        publish_barriers();
    }
    // By a warp that reads the stage no more.
    __device__ __forceinline__ void leave(int stage) {
        __syncwarp();
        if (threadIdx.x % 32 < PEERS) arrive_at(empty[stage], threadIdx.x % 32);
    }
};
