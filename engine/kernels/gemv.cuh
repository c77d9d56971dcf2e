// One block's share of a matrix times up to eight vectors: weights stream from memory through registers into the tensor
// cores. The warps of a block split the columns; a block owns whole rows, so no sum crosses blocks and the order of
// every sum is fixed, whatever the number of vectors.
//
// The first kRing chunks of a warp are requested before the kernel waits for its predecessor: in a chain of dependent
// launches the weights of a stage travel while the stage before still computes.
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
    static constexpr bool kKeepX = kDepth * C::kWords * kSets <= 16;
    static constexpr int kXRing = kKeepX ? kDepth : 16 / (C::kWords * kSets);
    static constexpr int kRows = TILES * 8;
    static constexpr int kChains = TILES >= 4 ? 1 : TILES >= 2 ? 2 : 4;  // sums a tile is kept in, to hide latency
    static constexpr int kGroups = ceil_div(BLOCK_TILES, TILES);
    static constexpr bool kFull = Map::kTiles % BLOCK_TILES == 0 && BLOCK_TILES % TILES == 0;  // no group is cut short
    static constexpr long long kStride = (long long)kUnits * 64;                              // bytes of a row
    static_assert(COLUMNS % C::kSpan == 0, "columns");
    static_assert(kChunks % kRing == 0, "the ring must divide a group's chunks");
    static_assert(BATCH >= 1 && BATCH <= 8, "batch");

    using Sums = float[WARPS][BATCH][kRows];

    const u8* weights;  // this lane's part of the first unit of row 0
    const u32* scales;
    const u16* activations;
    int first_tile, last_tile;  // of this block, the last one excluded
    int warp, lane;
    C ring[kRing];
    Pair x[kXRing][C::kWords][kSets];

    __device__ __forceinline__ Gemv(const u8* w, const u32* s, const u16* a) {
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

    __device__ __forceinline__ void load(C& c, int first, int i) {
        const int depth = i / TILES;
        if (!has(depth)) return;
        int tile = i % TILES;
        if (!kFull && first + tile >= last_tile) tile = last_tile - 1 - first;  // any will do
        int row = Map::row(first, tile);
        const u8* p = weights + row * kStride + depth * 64;
        if constexpr (Map::kRows % 8 != 0) {
            const int beyond = row + (lane >> 2) - (Map::kRows - 1);
            if (beyond > 0) p -= beyond * kStride;
        }
        c.load(p, scales + ((row / 8) * (long long)kUnits + depth) * (C::kScales * 8));
    }

    __device__ __forceinline__ void load_x(int depth) {
#pragma unroll
        for (int i = 0; i < C::kWords; ++i)
#pragma unroll
            for (int s = 0; s < kSets; ++s) {
                Pair& q = x[depth % kXRing][i][s];
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
        for (int i = 0; i < kRing; ++i) load(ring[i], first_tile, i);
    }

    // After the wait.
    __device__ __forceinline__ void start_x() {
#pragma unroll
        for (int d = 0; d < kXRing; ++d) load_x(d);
    }

    // The sums of one group of TILES tiles, each warp's part apart.
    __device__ __forceinline__ void group(int first, Sums& sums) {
        const bool more = kGroups > 1 && first + TILES < last_tile;
        float d[TILES][kChains][kSets][4] = {};
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            const int depth = i / TILES;
            if (has(depth)) ring[i % kRing].multiply(d[i % TILES][depth % kChains], x[depth % kXRing]);
            const int next = i + kRing;
            if (next < kChunks) {
                load(ring[i % kRing], first, next);
            } else if (more) {
                load(ring[i % kRing], first + TILES, next - kChunks);
            }
            if constexpr (!kKeepX)
                if (i % TILES == TILES - 1 && depth + kXRing < kDepth) load_x(depth + kXRing);
        }
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
        if constexpr (!kKeepX)
            if (more) start_x();
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
