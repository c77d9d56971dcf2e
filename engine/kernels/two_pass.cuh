// What the heads in two passes share: the coarse copy's product, that of a list of the matrix' own rows in the tiles and
// the order of sums that `head` has, and between which numbers the coarse product says that a logit lies.
#pragma once
#include "drawing.cuh"
#include "gemv.cuh"

using Scan = Gemv<kInt8Tiles, 64, OP_COLUMNS, OP_WARPS, OP_DEPTH, OP_TILES, OP_BLOCK_TILES, OP_RING, OP_WINDOW, OP_BATCH,
                  RowsInOrder<ceil_div(OP_ROWS, 8) * 8>>;
constexpr int kBlockRows = OP_BLOCK_TILES * 8;

struct Listed {  // rows of a list in shared memory, the last one as often as it takes
    static constexpr int kTiles = OP_BLOCK_TILES + 1;  // how many there are is known later
    const u16* rows;
    int first, count;
    __device__ static constexpr int row(int tile, int i) { return (tile + i) * 8; }
    __device__ __forceinline__ int source(int at) const { return first + rows[at < count ? at : count - 1]; }
};

using Again = Gemv<kBf16, 128, OP_COLUMNS, OP_WARPS, OP_PLAIN_DEPTH, 1, OP_BLOCK_TILES, OP_PLAIN_RING, OP_PLAIN_RING, OP_BATCH,
                   Listed, chains_of(OP_PLAIN_TILES)>;
constexpr int kConsumers = OP_WARPS * 32;
constexpr int kEach = ceil_div(OP_BATCH * Scan::kRows, kConsumers);  // outputs a thread has in a group
constexpr int kAll = ceil_div(OP_COLUMNS, kConsumers * 8);           // runs of eight columns a thread has of an activation
constexpr float kLarge = 1e30f;  // beyond, a sum may overflow on its way: no bound holds
constexpr u32 kReached = 0x00800000u;  // by every finite score, as `ordered`
constexpr float kSmall = 1e-30f;  // what numbers below the normal ones may add to a sum
static_assert(OP_COLUMNS % 8 == 0, "columns");

// Adds what this thread has of the squares of each activation.
__device__ __forceinline__ void add_squares(const u16* x, float (&sums)[OP_BATCH]) {
#pragma unroll
    for (int m = 0; m < OP_BATCH; ++m) {
        float s = 0.f;
#pragma unroll
        for (int i = 0; i < kAll; ++i) {
            const int n = (threadIdx.x + i * kConsumers) * 8;
            if (n >= OP_COLUMNS) continue;
            const Quad q = load_shared_state(static_cast<const void*>(x + u64(m) * OP_COLUMNS + n));
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const float low = bf16_to_float(u16(q.r[w])), high = bf16_to_float(u16(q.r[w] >> 16));
                s += low * low + high * high;
            }
        }
        s = warp_sum(s);
        if (threadIdx.x % 32 == 0) atomicAdd(&sums[m], s);
    }
}

// Between which numbers a logit lies. Total: the coarse row's; margin: its scale below, its bound above, bf16 each;
// length: the activation's.
struct Between {
    float low, high;
    __device__ __forceinline__ Between(float total, u32 margin, float length, float factor) {
        const float middle = total * factor * bf16_to_float(u16(margin));
        const float apart = bf16_to_float(u16(margin >> 16)) * length + kSmall;  // before the factor
        const float slack = apart * factor;
        const bool known = apart < kLarge && fabsf(middle) + slack < kLarge;  // false where one is no number
        low = known ? __fsub_rd(middle, slack) : minus_infinity();
        high = known ? __fadd_ru(middle, slack) : -minus_infinity();
    }
};
