// out[token] = silu(gate) · up for hundreds of tokens and plain weights: `gate` is x · Wᵀ by the first half of W's rows, `up`
// by the second. For GPUs of compute capability 9.0.
//
// A block multiplies 128 tokens by OP_TILE rows, as many of the gate as of up, so that a lane holds both of a number and
// neither is ever written. Two blocks form a cluster: they have the same rows and the tokens below each other, and each
// copies half of the rows to both. A warp copies, stage by stage; two warpgroups multiply 64 tokens each. A cluster goes
// from tile to tile, and its stages of the next are copied while the last one's results are worked out.
#include "boxes.cuh"
#include "copies.cuh"
#include "gating.cuh"
#include "panels.cuh"

constexpr int kPeers = 2, kReaders = 2, kReaderWarps = 4 * kReaders, kThreads = 32 * (kReaderWarps + 1);
constexpr int kTokens = 64 * kReaders, kTile = OP_TILE, kStages = OP_STAGES;
constexpr int kSpan = 64, kUnits = ceil_div(OP_COLUMNS, kSpan);  // columns of a stage; stages of a tile
constexpr int kOut = kTile / 2;                                  // numbers of a token that a tile gives
constexpr int kTokenBytes = kTokens * 128, kHalfBytes = kOut * 128, kStage = kTokenBytes + kPeers * kHalfBytes;
constexpr int kOutRow = 256;  // bytes of a token's results on their way
constexpr int kGroup = 8;     // clusters' tokens that all rows are gone through for before the next: they stay in the L2
static_assert(kTile % 32 == 0 && kOut * 2 <= kOutRow && OP_HALF % 8 == 0, "tile");

using Barriers = ClusterBarriers<kStages, kReaderWarps, kPeers>;
using Place = RingPlace<kStages>;

// The tiles of a cluster, one after the other: tokens first, in groups.
struct Tiles {
    int pairs, all, at, token0, out0;

    __device__ __forceinline__ explicit Tiles(int tokens) {
        pairs = ceil_div(tokens, kPeers * kTokens);
        all = pairs * ceil_div(OP_HALF, kOut);
        at = blockIdx.x / kPeers;
        find();
    }
    __device__ __forceinline__ bool left() const { return at < all; }
    __device__ __forceinline__ int count() const { return left() ? ceil_div(all - at, int(gridDim.x) / kPeers) : 0; }
    __device__ __forceinline__ void next() { at += gridDim.x / kPeers, find(); }

  private:
    __device__ __forceinline__ void find() {
        constexpr int kAcross = ceil_div(OP_HALF, kOut);
        const int group = at / (kGroup * kAcross), first = group * kGroup;
        const int together = pairs - first < kGroup ? pairs - first : kGroup, within = at - group * kGroup * kAcross;
        if (together <= 0) return;
        token0 = ((first + within % together) * kPeers + int(rank_in_cluster())) * kTokens;
        out0 = within / together * kOut;
    }
};

// By one thread.
struct Copies {
    const Map *x, *weights;
    u8* stages;
    Barriers& barriers;
    u32 rank;

    __device__ __forceinline__ void weights_of(const Tiles& tile, int unit, int stage) const {
        expect_bytes(barriers.full[stage], kStage);
        u8* to = stages + stage * kStage + kTokenBytes + rank * kHalfBytes;
        copy_box_to((1 << kPeers) - 1, barriers.full[stage], to, weights, unit * kSpan, int(rank) * OP_HALF + tile.out0);
    }
    __device__ __forceinline__ void tokens_of(const Tiles& tile, int unit, int stage) const {
        copy_box(barriers.full[stage], stages + stage * kStage, x, unit * kSpan, tile.token0);
    }

    __device__ __forceinline__ void all(Tiles tile) const {
        constexpr int kFirst = kUnits < kStages ? kUnits : kStages;
        prefetch_map(x), prefetch_map(weights);
        if (tile.left())  // weights do not wait for what is before
            for (int unit = 0; unit < kFirst; ++unit) weights_of(tile, unit, unit);
        wait_for_previous();
        publish_to_copies();
        if (tile.left())
            for (int unit = 0; unit < kFirst; ++unit) tokens_of(tile, unit, unit);
        Place place;
        int unit = kFirst;
        for (int i = 0; i < kFirst; ++i) place.next();
        for (; tile.left(); tile.next(), unit = 0)
            for (; unit < kUnits; ++unit, place.next()) {
                wait_barrier(barriers.empty[place.stage], place.round ^ 1);
                weights_of(tile, unit, place.stage);
                tokens_of(tile, unit, place.stage);
            }
    }
};

// A warp's results of sixteen tokens, put together in `room`, which is its own.
__device__ __forceinline__ void store(const float (&sums)[kTile / 2], u8* room, u16* out, int token0, int out0, int tokens) {
    constexpr int kBlocks = kOut / 8;  // of eight numbers, 16 bytes
    const int lane = threadIdx.x % 32;
    u8* row = room + lane % 16 * kOutRow;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
        const float *g = sums + 4 * j, *u = sums + 4 * (j + kBlocks);
        store_matrices(row + ((j ^ lane) & 7 | j & 8) * 16, pack_bf16(gated(g[0], u[0]), gated(g[1], u[1])),
                       pack_bf16(gated(g[2], u[2]), gated(g[3], u[3])));
    }
    __syncwarp();
    for (int i = lane; i < 16 * kBlocks; i += 32) {
        const int r = i / kBlocks, j = i % kBlocks, n = out0 + j * 8;
        if (token0 + r < tokens && n < OP_HALF)
            *reinterpret_cast<Quad*>(out + u64(token0 + r) * OP_HALF + n) =
                load_quad(room + r * kOutRow + ((j ^ r) & 7 | j & 8) * 16);
    }
    __syncwarp();
}

// x: boxes of 128 tokens by 64 columns; weights: of OP_TILE / 2 rows by 64 columns.
extern "C" __global__ void __cluster_dims__(kPeers, 1, 1) __launch_bounds__(kThreads, 1)
    gated_product(const __grid_constant__ Map x, const __grid_constant__ Map weights, u16* out, int tokens, int trigger) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ Barriers barriers;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), group = warp / 4;  // alike in a warp, as is what follows
    if (trigger == 0) let_next_start();
    barriers.init();
    meet_cluster();
    Tiles tile(tokens);
    if (warp == kReaderWarps) {
        if (threadIdx.x % 32 == 0) Copies{&x, &weights, stages, barriers, rank_in_cluster()}.all(tile);
        __syncwarp();
    } else {
        wait_for_previous();  // who may still read `out`
        if (trigger == 1) let_next_start();
        const u64 first = operand(stages, 16);  // counts 16 bytes
        // Stages are left as long as they are filled again: then no arrival is still on its way to a block that has gone.
        int refills = tile.count() * kUnits - kStages;
        Place place;
        for (; tile.left(); tile.next()) {
            float sums[kTile / 2];
            int before = 0;
            for (int unit = 0; unit < kUnits; ++unit, place.next()) {
                const u64 stage = first + u32(place.stage) * (kStage / 16), rows = stage + kTokenBytes / 16;
                wait_barrier(barriers.full[place.stage], place.round);
                multiply_panel(sums, stage + group * (64 * 128 / 16), rows, unit > 0);
                if (unit > 0) {
                    wait_products<1>();
                    if (refills-- > 0) barriers.leave(before);
                }
                before = place.stage;
            }
            wait_products<0>();
            settle(sums);
            if (refills-- > 0) barriers.leave(before);
            store(sums, stages + kStages * kStage + warp * 16 * kOutRow, out, tile.token0 + group * 64 + warp % 4 * 16,
                  tile.out0, tokens);
        }
    }
    meet_cluster();  // nobody leaves before what the other does to its memory
}
