// Products of a warpgroup with operands in shared memory: rows of 128 bytes, eight of them 1024 bytes, their segments of 16
// bytes permuted by the row's number; further columns in panels of their own.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Between a wait and the use of what the products waited for have read or written: the compiler knows no other order.
template <int N>
__device__ __forceinline__ void settle(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void settle(u32 (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// A warpgroup's, each of its threads: what one gives away another can have.
template <int N>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// `panel`: bytes between panels of 64 columns, where the product goes over more than one of them.
__device__ __forceinline__ u64 operand(const u8* at, u32 panel) {
    return u64((shared_address(at) & 0x3FFFFu) >> 4) | (u64(panel >> 4) << 16) | (u64(64) << 32) | (u64(1) << 62);
}

// A list names the sums that a lane has of 64 rows and twice as many columns, as operands of `asm`.
#define SUMS_32                                                                                               \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31"
#define SUMS_48 SUMS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SUMS_64 SUMS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS_80 SUMS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SUMS_96 SUMS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define HELD_4_FROM(n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define HELD_16_FROM(n) HELD_4_FROM(n), HELD_4_FROM(n + 4), HELD_4_FROM(n + 8), HELD_4_FROM(n + 12)
#define HELD_32 HELD_16_FROM(0), HELD_16_FROM(16)
#define HELD_48 HELD_32, HELD_16_FROM(32)
#define HELD_64 HELD_48, HELD_16_FROM(48)
#define HELD_80 HELD_64, HELD_16_FROM(64)
#define HELD_96 HELD_80, HELD_16_FROM(80)

// d [64, n] (+)= a [64, 16] · b, lanes hold d and a as for `mma`. b is n rows of 16 columns, or, BY_ROWS, 16 rows of n
// columns.
#define PRODUCT_OF_REGISTERS(width, count, a_at, b_at, more_at, by_rows_at)                                    \
    template <bool BY_ROWS>                                                                                    \
    __device__ __forceinline__ void multiply(float (&d)[count], const u32 (&a)[4], u64 b, bool more) {         \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, " more_at ", 0;\n"                                        \
                     "wgmma.mma_async.sync.aligned.m64n" #width "k16.f32.bf16.bf16 {" SUMS_##count "}, {" a_at \
                     "}, " b_at ", p, 1, 1, " by_rows_at "; }"                                                 \
                     : HELD_##count                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(more)), "n"(int(BY_ROWS))); \
    }
PRODUCT_OF_REGISTERS(64, 32, "%32,%33,%34,%35", "%36", "%37", "%38")
PRODUCT_OF_REGISTERS(96, 48, "%48,%49,%50,%51", "%52", "%53", "%54")
PRODUCT_OF_REGISTERS(128, 64, "%64,%65,%66,%67", "%68", "%69", "%70")
PRODUCT_OF_REGISTERS(160, 80, "%80,%81,%82,%83", "%84", "%85", "%86")
PRODUCT_OF_REGISTERS(192, 96, "%96,%97,%98,%99", "%100", "%101", "%102")
