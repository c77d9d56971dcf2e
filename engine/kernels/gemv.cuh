// One block's share of a matrix times up to eight vectors: weights stream through shared memory into the tensor
// cores. The warps of a block split the columns; a block owns whole rows, so no sum crosses blocks and the order of
// every sum is fixed, whatever the number of vectors.
//
// The first kRing chunks of a warp are requested before the kernel waits for its predecessor, into shared memory, where
// each lane reads back what it asked for itself. Few registers and a wave of one block a multiprocessor leave room for
// several kernels of the chain at once: the weights of the stages to come travel while those before still compute.
#pragma once
#include "formats.cuh"

// Which eight rows of the matrix make tile `i` of the group that starts at tile `first`.
template <int ROWS>
struct RowsInOrder {
    static constexpr int kRows = ROWS, kTiles = ceil_div(ROWS, 8);
    __device__ static constexpr int row(int first, int i) { return (first + i) * 8; }
};

template <int HALF>
struct GateAndUp {  // eight rows of the gate, then the eight rows of the up projection that go with them
    static constexpr int kRows = 2 * HALF, kTiles = HALF / 4;
    static_assert(HALF % 8 == 0, "rows");
    __device__ static constexpr int row(int first, int i) { return first * 4 + (i / 2) * 8 + (i % 2) * HALF; }
};

template <int FORMAT, int GROUP, int COLUMNS, int WARPS, int TILES, int BLOCK_TILES, int RING, int BATCH, class Map>
struct Gemv {
    using C = Chunk<FORMAT, GROUP>;
    static constexpr int kUnits = COLUMNS / C::kSpan;
    static constexpr int kDepth = ceil_div(kUnits, WARPS);  // chunks a warp has of one tile
    static constexpr bool kEven = kUnits % WARPS == 0;
    static constexpr int kChunks = kDepth * TILES;  // of one group of tiles
    static constexpr int kRing = RING < kChunks ? RING : kChunks;
    static constexpr int kSets = ceil_div(BATCH, 4);
    // Where a warp's activations fit its registers the loop over chunks is unrolled whole. Else it rolls over the depth,
    // with the activations of this and the next step.
    static constexpr bool kRolls = kDepth * C::kWords * kSets > 16 || kChunks % kRing != 0;
    static constexpr int kHeldX = kRolls ? 1 : kDepth;
    static constexpr int kRows = TILES * 8;
    static constexpr int kChains = TILES >= 4 ? 1 : TILES >= 2 ? 2 : 4;  // sums a tile is kept in, to hide latency
    static constexpr int kGroups = ceil_div(BLOCK_TILES, TILES);
    static constexpr bool kFull = Map::kTiles % BLOCK_TILES == 0 && BLOCK_TILES % TILES == 0;  // no group is cut short
    static constexpr long long kStride = (long long)kUnits * 64;                              // bytes of a row
    static_assert(COLUMNS % C::kSpan == 0, "columns");
    static_assert(kRing % TILES == 0, "the ring must hold whole steps");
    static_assert(BATCH >= 1 && BATCH <= 8, "batch");

    using Sums = float[WARPS][BATCH][kRows];

    const u8* weights;  // this lane's part of the first unit of row 0
    const u32* scales;
    const u16* activations;
    int first_tile, last_tile;  // of this block, the last one excluded
    int warp, lane;
    u8* ring;  // shared memory: [kRing][threads] words of 16 bytes, then [kRing][scales][threads] words of 4
    using Word = Pair[C::kWords][kSets];
    Word x[kHeldX];
    int at = 0;  // where in the ring the next chunk is, if the loop rolls

    __device__ __forceinline__ Gemv(const u8* w, const u32* s, const u16* a, u8* shared) : ring(shared) {
        first_tile = blockIdx.x * BLOCK_TILES;
        last_tile = kFull || first_tile + BLOCK_TILES < Map::kTiles ? first_tile + BLOCK_TILES : Map::kTiles;
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        const int g = lane >> 2, t = lane & 3;
        weights = w + g * kStride + warp * kDepth * 64 + t * 16;
        scales = s + warp * kDepth * C::kScales * 8 + g;
        activations = a + u64(g >> 1) * COLUMNS + warp * kDepth * C::kSpan + C::x_offset(t, 0) + (g & 1) * 2;
    }

    __device__ __forceinline__ bool has(int depth) const { return kEven || warp * kDepth + depth < kUnits; }

    using LaneSlot = Slot<C::kScales>;
    __device__ __forceinline__ LaneSlot slot(int i) const {
        constexpr int kThreads = WARPS * 32;
        u32* scales_of = reinterpret_cast<u32*>(ring + kRing * kThreads * 16) + i * C::kScales * kThreads;
        return {reinterpret_cast<Quad*>(ring)[i * kThreads + threadIdx.x], scales_of + threadIdx.x, kThreads};
    }

    // Asks for one chunk of the group that starts at tile `first`.
    __device__ __forceinline__ void fetch(const LaneSlot& to, int first, int depth, int tile) {
        if (!has(depth)) {
            end_of_chunk();
            return;
        }
        if (!kFull && first + tile >= last_tile) tile = last_tile - 1 - first;  // any will do
        const int row = Map::row(first, tile);
        const u8* p = weights + row * kStride + depth * 64;
        if constexpr (Map::kRows % 8 != 0) {
            const int beyond = row + (lane >> 2) - (Map::kRows - 1);
            if (beyond > 0) p -= beyond * kStride;
        }
        to.fetch(p, scales + ((row / 8) * (long long)kUnits + depth) * (C::kScales * 8));
    }

    __device__ __forceinline__ void load_x(Word& to, int depth) const {
#pragma unroll
        for (int i = 0; i < C::kWords; ++i)
#pragma unroll
            for (int s = 0; s < kSets; ++s) {
                Pair& q = to[i][s];
                q = Pair{0u, 0u};
                if ((lane >> 3) + 4 * s < BATCH && has(depth)) {
                    const u32* p = reinterpret_cast<const u32*>(activations + u64(4 * s) * COLUMNS + depth * C::kSpan +
                                                                C::x_offset(0, i));
                    q.x = load_shared_state(p);
                    q.y = load_shared_state(p + 2);
                }
            }
    }

    // Before the wait: nothing here depends on an earlier kernel.
    __device__ __forceinline__ void fill() {
#pragma unroll
        for (int i = 0; i < kRing; ++i) fetch(slot(i), first_tile, i / TILES, i % TILES);
    }

    // After the wait.
    __device__ __forceinline__ void start_x() {
#pragma unroll
        for (int d = 0; d < kHeldX; ++d) load_x(x[d], d);
    }

    using Products = float[TILES][kChains][kSets][4];

    __device__ __forceinline__ void multiply_unrolled(int first, bool more, Products& d) {
        unrolled<kChunks>([&](auto index) {
            constexpr int i = decltype(index)::value, depth = i / TILES, next = i + kRing;
            // In a single group nothing follows the last chunk; else every chunk is followed by kRing - 1 others.
            wait_for_chunks<(kGroups == 1 && next > kChunks) ? kChunks - 1 - i : kRing - 1>();
            if (has(depth)) {
                const C chunk(slot(i % kRing));
                chunk.multiply(d[i % TILES][depth % kChains], x[depth % kHeldX]);
            }
            if constexpr (next < kChunks) {
                fetch(slot(i % kRing), first, next / TILES, next % TILES);
            } else if constexpr (kGroups > 1) {
                if (more) fetch(slot(i % kRing), first + TILES, (next - kChunks) / TILES, (next - kChunks) % TILES);
                else end_of_chunk();
            }
        });
    }

    __device__ __forceinline__ void multiply_rolled(int first, bool more, Products& d) {
        constexpr int kAhead = kRing / TILES;  // steps
        static_assert(kAhead <= kDepth, "the ring must not pass the group");
        Word next_x;
#pragma unroll 1
        for (int round = 0; round < kDepth; round += kChains) {
            unrolled<kChains>([&](auto index) {
                constexpr int chain = decltype(index)::value;
                const int depth = round + chain;
                if (depth >= kDepth) return;
                load_x(next_x, depth + 1 < kDepth ? depth + 1 : 0);
                unrolled<TILES>([&](auto which) {
                    constexpr int tile = decltype(which)::value;
                    wait_for_chunks<kRing - 1>();
                    const LaneSlot here = slot(at);
                    if (has(depth)) {
                        const C chunk(here);
                        chunk.multiply(d[tile][chain], x[0]);
                    }
                    if (depth + kAhead < kDepth) fetch(here, first, depth + kAhead, tile);
                    else if (more) fetch(here, first + TILES, depth + kAhead - kDepth, tile);
                    else end_of_chunk();
                    at = at + 1 == kRing ? 0 : at + 1;
                });
#pragma unroll
                for (int i = 0; i < C::kWords; ++i)
#pragma unroll
                    for (int s = 0; s < kSets; ++s) x[0][i][s] = next_x[i][s];
            });
        }
    }

    // The sums of one group of TILES tiles, each warp's part apart.
    __device__ __forceinline__ void group(int first, Sums& sums) {
        const bool more = kGroups > 1 && first + TILES < last_tile;
        Products d = {};
        if constexpr (kRolls) multiply_rolled(first, more, d);
        else multiply_unrolled(first, more, d);
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int s = 0; s < kSets; ++s)
                if (t + 4 * s < BATCH) {
                    float v = d[i][0][s][0] + d[i][0][s][3];
#pragma unroll
                    for (int c = 1; c < kChains; ++c) v += d[i][c][s][0] + d[i][c][s][3];
                    sums[warp][t + 4 * s][i * 8 + g] = v;
                }
    }

    // A tree over the warps: the same for every batch.
    template <int FROM, int COUNT>
    __device__ static __forceinline__ float total(const Sums& sums, int m, int n) {
        if constexpr (COUNT == 1) {
            return sums[FROM][m][n];
        } else {
            return total<FROM, COUNT / 2>(sums, m, n) + total<FROM + COUNT / 2, COUNT - COUNT / 2>(sums, m, n);
        }
    }
    __device__ static __forceinline__ float total(const Sums& sums, int m, int n) {
        return total<0, WARPS>(sums, m, n);
    }
};

// 1 / root mean square of a row whose squares were summed in PARTS pieces by the kernel before; by one whole warp.
template <int PARTS>
__device__ __forceinline__ float inverse_rms(const float* squares, int columns, float eps, int lane) {
    float s = 0.f;
#pragma unroll
    for (int i = 0; i < ceil_div(PARTS, 32); ++i)
        if (PARTS % 32 == 0 || lane + 32 * i < PARTS) s += load_shared_state(squares + lane + 32 * i);
    return rsqrtf(warp_sum(s) / float(columns) + eps);
}
