// Copies of boxes of a matrix by tensor maps, into one block or several of a cluster.
#pragma once
#include "cluster.cuh"

// What the copy engine knows of a matrix: where it lies, its shape, and what a box of it is.
struct alignas(64) Map {
    u64 words[16];
};

// The box that begins at this column and row; zeros where the matrix has ended.
__device__ __forceinline__ void copy_box(u64& full, void* to, const Map* map, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(&full)), "r"(column), "r"(row)
        : "memory");
}
// To the same place of each block that `blocks` has a bit for, and each block's own barrier is told.
__device__ __forceinline__ void copy_box_to(u16 blocks, u64& full, void* to, const Map* map, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(&full)), "r"(column), "r"(row), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void prefetch_map(const Map* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
