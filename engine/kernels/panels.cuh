// Products of a warpgroup with both operands in shared memory, as `warpgroup.cuh` has them there, by W columns at a time;
// and the copies of such operands out of plain matrices, by tensor maps, into one or two blocks of a cluster.
#pragma once
#include "warpgroup.cuh"

// d [64, W] (+)= a [64, 16] · b [W, 16]ᵀ; lanes hold d as for `mma`. A list names the W / 2 sums that a lane has.
#define SUMS_64                                                                                               \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27," \
    "%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,"   \
    "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS_80 SUMS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SUMS_96 SUMS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_112 SUMS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define SUMS_128 SUMS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define HELD_4(n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define HELD_16(n) HELD_4(n), HELD_4(n + 4), HELD_4(n + 8), HELD_4(n + 12)
#define HELD_64 HELD_16(0), HELD_16(16), HELD_16(32), HELD_16(48)
#define HELD_80 HELD_64, HELD_16(64)
#define HELD_96 HELD_80, HELD_16(80)
#define HELD_112 HELD_96, HELD_16(96)
#define HELD_128 HELD_112, HELD_16(112)
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

// ---- two blocks that share what they copy ---------------------------------------------------------------------------

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_cluster() {  // all threads of it; what they wrote is seen
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// At the barrier that the block of this rank has in the same place, by a thread that has written nothing for it to see: to
// release to a cluster would take a fence of the whole GPU, a microsecond.
__device__ __forceinline__ void arrive_at(u64& barrier, u32 rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(&barrier)),
        "r"(rank)
        : "memory");
}

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

// Two 8×8 matrices of 16-bit values, below each other, into sixteen rows of shared memory; lane r < 16 names row r.
__device__ __forceinline__ void store_matrices(void* row, u32 upper, u32 lower) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)), "r"(upper), "r"(lower)
                 : "memory");
}
