// Products of a warpgroup with both operands in shared memory, as `warpgroup.cuh` has them there, by W columns at a time.
#pragma once
#include "warpgroup.cuh"

#define SUMS_80 SUMS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SUMS_96 SUMS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_112 SUMS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define SUMS_128 SUMS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define HELD_80 HELD_64, HELD_16(64)
#define HELD_96 HELD_80, HELD_16(80)
#define HELD_112 HELD_96, HELD_16(96)
#define HELD_128 HELD_112, HELD_16(112)

// d [64, W] (+)= a [64, 16] · b [W, 16]ᵀ; lanes hold d as for `mma`.
#define PRODUCT_OF(width, count, a_at, b_at, more_at)                                                              \
    __device__ __forceinline__ void multiply(float (&d)[count], u64 a, u64 b, bool more) {                         \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " more_at ", 0;\n"                                            \
                     "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" SUMS_##count "}, " a_at ", " \
                     b_at ", p, 1, 1, 0, 0; }"                                                                     \
                     : HELD_##count                                                                                \
                     : "l"(a), "l"(b), "r"(int(more)));                                                            \
    }
PRODUCT_OF(128, 64, "%64", "%65", "%66")
PRODUCT_OF(160, 80, "%80", "%81", "%82")
PRODUCT_OF(192, 96, "%96", "%97", "%98")
PRODUCT_OF(224, 112, "%112", "%113", "%114")
PRODUCT_OF(256, 128, "%128", "%129", "%130")

// Two 8×8 matrices of 16-bit values, below each other, into sixteen rows of shared memory; lane r < 16 names row r.
__device__ __forceinline__ void store_matrices(void* row, u32 upper, u32 lower) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(upper), "r"(lower)
                 : "memory");
}
