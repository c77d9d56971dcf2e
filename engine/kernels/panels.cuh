// Products of a warpgroup with both operands in shared memory, as `warpgroup.cuh` has them there, by W columns at a time.
#pragma once
#include "warpgroup.cuh"

#define SUMS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define SUMS_16 SUMS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_24 SUMS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS_112 SUMS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define SUMS_128 SUMS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define HELD_8 HELD_4_FROM(0), HELD_4_FROM(4)
#define HELD_16 HELD_16_FROM(0)
#define HELD_24 HELD_16, HELD_4_FROM(16), HELD_4_FROM(20)
#define HELD_112 HELD_96, HELD_16_FROM(96)
#define HELD_128 HELD_112, HELD_16_FROM(112)

// d [64, W] (+)= a [64, 16] · b [W, 16]ᵀ; lanes hold d as for `mma`.
#define PRODUCT_OF(width, count, a_at, b_at, more_at)                                                              \
    __device__ __forceinline__ void multiply(float (&d)[count], u64 a, u64 b, bool more) {                         \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " more_at ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" SUMS_##count "}, " a_at ", " \
                     b_at ", p, 1, 1, 0, 0; }"                                                                     \
                     : HELD_##count                                                                                \
                     : "l"(a), "l"(b), "r"(int(more)));                                                            \
    }
PRODUCT_OF(16, 8, "%8", "%9", "%10")
PRODUCT_OF(32, 16, "%16", "%17", "%18")
PRODUCT_OF(48, 24, "%24", "%25", "%26")
PRODUCT_OF(64, 32, "%32", "%33", "%34")
PRODUCT_OF(96, 48, "%48", "%49", "%50")
PRODUCT_OF(128, 64, "%64", "%65", "%66")
PRODUCT_OF(160, 80, "%80", "%81", "%82")
PRODUCT_OF(192, 96, "%96", "%97", "%98")
PRODUCT_OF(224, 112, "%112", "%113", "%114")
PRODUCT_OF(256, 128, "%128", "%129", "%130")

// d (+)= a · bᵀ over the 64 columns of a panel of each, as a group of products to be waited for.
template <int N>
__device__ __forceinline__ void multiply_panel(float (&d)[N], u64 a, u64 b, bool more) {
    before_products();
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply(d, a + i * 2, b + i * 2, more || i > 0);  // 32 bytes are sixteen columns
    end_products();
}

// Two 8×8 matrices of 16-bit values, below each other, into sixteen rows of shared memory; lane r < 16 names row r.
__device__ __forceinline__ void store_matrices(void* row, u32 upper, u32 lower) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(upper), "r"(lower)
                 : "memory");
}
