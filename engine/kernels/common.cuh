// What every kernel here shares: integer names, bf16 packing, memory access with a stated cache policy, tensor-core
// products, programmatic dependent launch, warp reductions. Self-contained: no header of the CUDA toolkit is needed.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(8) Pair {
    u32 x, y;
};
struct alignas(16) Quad {
    u32 r[4];
};
struct alignas(8) Float2 {
    float x, y;
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- bf16 ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_to_float(u16 v) { return __uint_as_float(u32(v) << 16); }

// A value of the table of embeddings, scaled as the model asks. OP_EMBEDDING_SCALE: the bits of a float32; without it 1.
__device__ __forceinline__ float embedding_value(u16 v) {
#ifdef OP_EMBEDDING_SCALE
    return __uint_as_float(OP_EMBEDDING_SCALE) * bf16_to_float(v);
#else
    return bf16_to_float(v);
#endif
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {  // round to nearest even
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

__device__ __forceinline__ u16 to_bf16(float v) { return u16(pack_bf16(v, 0.f) & 0xFFFFu); }

__device__ __forceinline__ float half_to_float(u16 v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// ---- memory --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_constant(const u32* p) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ float load_constant(const float* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// Written by an earlier kernel of the chain: through L2, since this SM's L1 may hold the last step's value.
__device__ __forceinline__ Quad load_shared_state(const void* p) {
    Quad v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3])
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 load_shared_state(const u32* p) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float load_shared_state(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ Float2 load_shared_state(const Float2* p) {
    Float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ int load_shared_state(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ u64 load_shared_state(const u64* p) {
    u64 v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// Asks L2 for a run of bytes, a multiple of 16.
__device__ __forceinline__ void prefetch_run(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// ---- copies into shared memory -------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// How many threads report that a stage is full: the copy engine's one, or before it every lane that copies.
#if __CUDA_ARCH__ >= 900
constexpr int kReporters = 1;
#else
constexpr int kReporters = 32;
#endif

__device__ __forceinline__ void init_barrier(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() {  // to the copy engine
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(u64& barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrives once `loaded`, the last word that this thread read of the buffer, is there. The barrier's unit does not wait for
// reads under way, and the copy engine that refills the buffer keeps no order with them: only the use of the value does.
__device__ __forceinline__ void arrive_after(u64& barrier, u32 loaded) {
    asm volatile(
        "{ .reg .b64 state; .reg .pred p; setp.ne.u32 p, %1, 0;\n"
        "@p mbarrier.arrive.shared.b64 state, [%0];\n"
        "@!p mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier)),
        "r"(loaded)
        : "memory");
}
// Waits for the end of the phase of this parity.
__device__ __forceinline__ void wait_barrier(u64& barrier, u32 parity) {
    const u32 at = shared_address(&barrier);
    u32 done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
#endif
    }
}
// Announces the bytes of a stage, by one thread, before their copies.
__device__ __forceinline__ void expect_bytes(u64& barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(shared_address(&barrier)),
                 "r"(bytes)
                 : "memory");
#endif
}

// Has the copy engine copy a run of bytes, a multiple of 16, and tell the barrier.
__device__ __forceinline__ void copy_run(u64& full, void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(&full))
                 : "memory");
#endif
}

// Copies ROWS runs of `bytes` (a multiple of 16) by one warp; `source(i)` and `target(i)` say where run i is and goes.
template <int ROWS, class Source, class Target>
__device__ __forceinline__ void copy_runs(u64& full, int bytes, int lane, Source&& source, Target&& target) {
#if __CUDA_ARCH__ >= 900
    // The copy engine has queues of its own: what the block's threads load meanwhile does not stand behind the weights.
    for (int i = lane; i < ROWS; i += 32) copy_run(full, target(i), source(i), bytes);
#else
    for (int i = 0; i < ROWS; ++i)
        for (int at = lane * 16; at < bytes; at += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target(i) + at)),
                         "l"(source(i) + at)
                         : "memory");
#endif
}
// After the copies of a stage, by every lane of the warp.
__device__ __forceinline__ void end_of_copies(u64& full) {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&full)) : "memory");
#endif
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------------

// After this the results of all earlier kernels of the chain are visible. Every block must call it, or the kernel after
// next could start too early.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- tensor cores --------------------------------------------------------------------------------------------------

// D[16×8] += A[16×16]·B[16×8], bf16 in, float32 out. Lane (g, t) = (lane / 4, lane % 4) holds of A the rows g (a0, a2)
// and g + 8 (a1, a3), of B the column g, each at k = 2t, 2t+1 (first register) and 2t+8, 2t+9 (second); of D the columns
// 2t, 2t+1 of row g (d0, d1) and of row g + 8 (d2, d3). What is called k is free to be any order, the same in A and B.
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8×8 matrix of 16-bit values that lies across a warp as two columns a lane.
__device__ __forceinline__ u32 transpose8x8(u32 v) {
    u32 d;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(v));
    return d;
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// ---- warps ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xFFFFFFFFu, v, d);
    return v;
}

// ---- choosing a token ----------------------------------------------------------------------------------------------

// Orders like the float, NaN above everything; never 0, which means "none yet".
__device__ __forceinline__ u32 ordered(float v) {
    if (!(v == v)) return 0xFFFFFFFFu;
    const u32 b = __float_as_uint(v);
    return (b & 0x80000000u) ? ~b : (b | 0x80000000u);
}

__device__ __forceinline__ bool is_finite_score(u32 ordered) { return ordered >= 0x00800000u && ordered <= 0xFF7FFFFFu; }

// The larger key wins; of equal scores the lower id.
__device__ __forceinline__ u64 candidate(float score, int id) { return (u64(ordered(score)) << 32) | u32(~id); }

__device__ __forceinline__ float gumbel(u64 key, int position, int id) {
    u64 z = key + u64(position) * 0x9E3779B97F4A7C15ull + u64(id) * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    // u = (b + 1/2) / 2^24 does not fit a float near 1, but 1 - u does.
    const u32 b = u32(z >> 40);
    const float scale = 5.9604644775390625e-8f;  // 2^-24
    const float e = b < 0x800000u ? -logf((float(b) + 0.5f) * scale) : -log1pf(-(float(0xFFFFFFu - b) + 0.5f) * scale);
    return -logf(e);
}
