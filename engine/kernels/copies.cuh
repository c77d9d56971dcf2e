// Copies of 16 bytes into shared memory in groups that a thread waits for, and operands of the tensor core out of it.
#pragma once
#include "common.cuh"

// Zeros where `there` is false; the address must be valid all the same.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copy_groups() {  // until at most LEFT of the newest are under way
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// An arrival of the thread's once all its copies so far are done; it waits for none.
__device__ __forceinline__ void arrive_when_copied(u64& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// What earlier kernels wrote is seen by the copy engine.
__device__ __forceinline__ void publish_to_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Where in a ring of stages one is.
template <int STAGES>
struct RingPlace {
    int stage = 0;
    u32 round = 0;  // odd or even

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, round ^= 1;
    }
};

__device__ __forceinline__ Quad load_quad(const void* p) { return *reinterpret_cast<const Quad*>(p); }

// Four 8×8 matrices of 16-bit values; lane 8i + r names row r of matrix i, and lane (g, t) gets row g, columns 2t and
// 2t + 1 of each; transposed: row 2t and 2t + 1 of column g.
__device__ __forceinline__ Quad load_matrices(const void* row) {
    Quad v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3])
                 : "r"(shared_address(row))
                 : "memory");
    return v;
}
__device__ __forceinline__ Quad load_matrices_transposed(const void* row) {
    Quad v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3])
                 : "r"(shared_address(row))
                 : "memory");
    return v;
}
