// out[token][row] = x · Wᵀ for up to some hundred tokens and plain weights, or, OP_GATED, silu(gate) · up as
// `gated_product.cu` has it for more. For GPUs of compute capability 9.0.
//
// What takes the time is to bring operands into shared memory, the tokens above all, which every block needs. So OP_PEERS
// blocks, whose rows lie side by side, form a cluster, and each copies its part of the tokens to all of them. A warp
// copies, stage by stage, weights before the kernel's predecessor has ended; each warpgroup multiplies 64 tokens, the
// last of which need not be there: nothing is copied in their place, since zeros take longer than numbers, and what comes
// out for them goes nowhere. Where rows are too few for all multiprocessors, blocks share the columns.
#include "boxes.cuh"
#include "copies.cuh"
#include "gating.cuh"
#include "panels.cuh"

constexpr int kTokens = OP_TOKENS, kTile = OP_TILE, kPeers = OP_PEERS, kStages = OP_STAGES;
constexpr int kReaders = ceil_div(kTokens, 64), kReaderWarps = 4 * kReaders, kThreads = 32 * (kReaderWarps + 1);
constexpr int kSpan = 64, kUnits = ceil_div(OP_COLUMNS, kSpan);  // columns of a stage; stages of all columns
constexpr int kShare = kTokens / kPeers;                         // tokens that a block copies to all
constexpr int kTokenBytes = kReaders * 64 * 128, kRowBytes = kTile * 128, kStage = kTokenBytes + kRowBytes;
constexpr int kWidth = OP_GATED ? OP_ROWS / 2 : OP_ROWS, kOut = OP_GATED ? kTile / 2 : kTile;  // of all rows, of a tile
static_assert(kShare * kPeers == kTokens && kShare % 8 == 0 && kTile % 16 == 0 && kWidth % 8 == 0, "tile");
static_assert(!OP_GATED || !OP_SLICES, "a part of the columns cannot be gated");

using Barriers = ClusterBarriers<kStages, kReaderWarps, kPeers>;
using Place = RingPlace<kStages>;

// By one thread.
struct Copies {
    const Map *x, *weights;
    u8* stages;
    Barriers& barriers;
    int token0, out0;

    __device__ __forceinline__ void weights_of(int unit, int stage) const {
        u64& full = barriers.full[stage];
        u8* to = stages + stage * kStage + kTokenBytes;
        expect_bytes(full, kTokens * 128 + kRowBytes);
        copy_box(full, to, weights, unit * kSpan, out0);
        if constexpr (OP_GATED) copy_box(full, to + kRowBytes / 2, weights, unit * kSpan, kWidth + out0);
    }
    __device__ __forceinline__ void tokens_of(int unit, int stage) const {
        const int first = int(rank_in_cluster()) * kShare;
        u8* to = stages + stage * kStage + first * 128;
        copy_box_to((1 << kPeers) - 1, barriers.full[stage], to, x, unit * kSpan, token0 + first);
    }

    // Units first to last. Tokens once the cluster's barriers are there.
    __device__ __forceinline__ void ahead(int first, int last) const {
        prefetch_map(x), prefetch_map(weights);
        for (int i = 0; i < kStages && first + i < last; ++i) weights_of(first + i, i);
    }
    __device__ __forceinline__ void all(int first, int last) const {
        wait_for_previous();
        publish_to_copies();
        int unit = first;
        for (int i = 0; i < kStages && unit < last; ++i, ++unit) tokens_of(unit, i);
        for (Place place; unit < last; ++unit, place.next()) {
            wait_barrier(barriers.empty[place.stage], place.round);
            weights_of(unit, place.stage);
            tokens_of(unit, place.stage);
        }
    }
};

// A warpgroup's 64 tokens by the block's rows; lanes hold them as for `mma`.
struct Products {
    float sums[kTile / 2];

    __device__ __forceinline__ void all(const u8* stages, Barriers& barriers, int units, int group) {
        const u64 first = operand(stages, 16);  // counts 16 bytes
        Place place;
        int before = 0;
        for (int unit = 0; unit < units; ++unit, place.next()) {
            const u64 stage = first + u32(place.stage) * (kStage / 16), rows = stage + kTokenBytes / 16;
            wait_barrier(barriers.full[place.stage], place.round);
            multiply_panel(sums, stage + group * (64 * 128 / 16), rows, unit > 0);
            if (unit > 0) {
                wait_products<1>();
                // Only what is filled again: then no arrival is still on its way to a block that has gone.
                if (unit - 1 + kStages < units) barriers.leave(before);
            }
            before = place.stage;
        }
        wait_products<0>();
        settle(sums);
    }

    // Tokens before `end`; `token0` is the warp's first of sixteen.
    __device__ __forceinline__ void store(u8* out, int token0, int out0, int end) const {
        const int lane = threadIdx.x % 32, token = token0 + lane / 4;
#pragma unroll
        for (int j = 0; j < kOut / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float* v = sums + 4 * j + 2 * half;
                const int m = token + 8 * half, n = out0 + 8 * j + lane % 4 * 2;
                if (m >= end || n >= kWidth) continue;
                const u64 at = u64(m) * kWidth + n;
                if constexpr (OP_SLICES) {
                    *reinterpret_cast<Float2*>(out + at * 4) = Float2{v[0], v[1]};
                } else if constexpr (OP_GATED) {
                    const float* up = v + kTile / 4;
                    *reinterpret_cast<u32*>(out + at * 2) = pack_bf16(gated(v[0], up[0]), gated(v[1], up[1]));
                } else {
                    *reinterpret_cast<u32*>(out + at * 2) = pack_bf16(v[0], v[1]);
                }
            }
    }
};

// Grid: tiles of rows, as many as the clusters have blocks; of tokens; slices of the columns. `out` is bf16 [tokens, width],
// or, OP_SLICES, float32 [slices, tokens, width], and whoever reads it adds them up. Boxes of x: kShare tokens by 64
// columns; of weights: kOut rows by 64.
extern "C" __global__ void __cluster_dims__(kPeers, 1, 1) __launch_bounds__(kThreads, 1)
    plain_product(const __grid_constant__ Map x, const __grid_constant__ Map weights, u8* out, int tokens, int trigger) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ Barriers barriers;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // alike in a warp
    if (trigger == 0) let_next_start();
    const int out0 = blockIdx.x * kOut, token0 = blockIdx.y * kTokens, slices = gridDim.z;
    const int first = kUnits * blockIdx.z / slices, last = kUnits * (blockIdx.z + 1) / slices;
    barriers.init();
    __syncthreads();
    const Copies copies{&x, &weights, stages, barriers, token0, out0};
    const bool copier = threadIdx.x == 32 * kReaderWarps;
    if (copier) copies.ahead(first, last);
    __syncwarp();
    meet_cluster();
    if (warp == kReaderWarps) {
        if (copier) copies.all(first, last);
        __syncwarp();
    } else {
        wait_for_previous();  // who may still read `out`
        if (trigger == 1) let_next_start();
        Products products;
        products.all(stages, barriers, last - first, warp / 4);
        out += u64(blockIdx.z) * tokens * kWidth * 4;  // one slice: of any size
        products.store(out, token0 + warp * 16, out0, min(tokens, token0 + kTokens));
        __syncwarp();
    }
    meet_cluster();  // nobody leaves before what the others do to its memory
}
