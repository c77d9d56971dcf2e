// One block's share of a matrix times up to eight vectors: weights stream through shared memory into the tensor cores.
// A block owns whole rows, so no sum crosses blocks, and the order of every sum is fixed whatever the number of vectors.
//
// A tile is eight rows of the matrix, a segment a run of its columns, a stage of the ring one segment of one tile. All
// segments are equal, but that the last may be shorter. A warp by itself, the producer, has stages copied; the others, the
// consumers, split the columns of each stage. The first stages are requested before the kernel waits for its predecessor:
// few registers and a wave of one block a multiprocessor leave room for several kernels of the chain at once, and the
// weights of the stages to come travel while those before still compute. No more than WINDOW stages of a block are under
// way at a time: whatever is asked of memory queues, and a stage's few activations would stand behind the weights of the
// stages to come.
#pragma once
#include "formats.cuh"

#ifndef OP_EACH_ARRIVES
#define OP_EACH_ARRIVES 0
#endif

// Which eight rows make tile `i` of the group that starts at tile `first`, and where in the matrix one of them lies.
template <int ROWS>
struct RowsInOrder {
    static constexpr int kRows = ROWS, kTiles = ceil_div(ROWS, 8);
    __device__ static constexpr int row(int first, int i) { return (first + i) * 8; }
    __device__ static constexpr int source(int row) { return kRows % 8 != 0 && row >= kRows ? kRows - 1 : row; }
};

template <int HALF>
struct GateAndUp {  // eight rows of the gate, then the eight rows of the up projection that go with them
    static constexpr int kRows = 2 * HALF, kTiles = HALF / 4;
    static_assert(HALF % 8 == 0, "rows");
    __device__ static constexpr int row(int first, int i) { return first * 4 + (i / 2) * 8 + (i % 2) * HALF; }
    __device__ static constexpr int source(int row) { return row; }
};

// Sums that one of TILES tiles is kept in, to hide latency. Part of the order of its sums.
__host__ __device__ constexpr int chains_of(int tiles) { return tiles >= 4 ? 1 : tiles >= 2 ? 2 : 4; }

template <int FORMAT, int GROUP, int COLUMNS, int WARPS, int DEPTH, int TILES, int BLOCK_TILES, int RING, int WINDOW,
          int BATCH, class Map, int CHAINS = chains_of(TILES)>
struct Gemv {
    using C = Chunk<FORMAT, GROUP>;
    static constexpr int kThreads = WARPS * 32 + 32;
    static constexpr int kUnits = COLUMNS / C::kSpan;        // 64 bytes of a row each
    static constexpr int kSegments = ceil_div(kUnits, WARPS * DEPTH);
    static constexpr int kSpan = kSegments > 1 ? WARPS * DEPTH : kUnits;  // units of a segment
    static constexpr int kLastSpan = kUnits - (kSegments - 1) * kSpan;    // and of the last
    static constexpr int kSets = ceil_div(BATCH, 4);
    static constexpr int kRows = TILES * 8;                               // of a group
    static constexpr int kGroups = ceil_div(BLOCK_TILES, TILES);
    static constexpr int kStagesOfGroup = kSegments * TILES;
    static constexpr int kRing = RING < kGroups * kStagesOfGroup ? RING : kGroups * kStagesOfGroup;
    static constexpr int kWindow = WINDOW < kRing ? WINDOW : kRing;       // stages that may be under way
    static constexpr bool kWhole = kRing == kGroups * kStagesOfGroup;     // every stage has a place of its own
    static constexpr bool kFull = Map::kTiles % BLOCK_TILES == 0 && BLOCK_TILES % TILES == 0;  // no group is cut short
    // Where a warp's activations fit its registers they stay there; else those of one segment, and the next is loaded ahead:
    // two segments take no more. Unpacking four bits needs registers of its own.
    static constexpr int kMostHeld = FORMAT == kInt4 ? 16 : 32;
    static constexpr bool kHoldsX = kSegments <= 2 || kSegments * DEPTH * C::kWords * kSets <= kMostHeld;
    static constexpr int kHeldSegments = kHoldsX ? kSegments : 1;
    static constexpr int kChains = CHAINS;
    static constexpr long long kStride = (long long)kUnits * 64;          // bytes of a row
    // Rows lie 64 bytes off a multiple of 128, so that the eight lanes of a phase meet all banks.
    static constexpr int kRowBytes = kSpan * 64, kRowStride = kRowBytes + (kRowBytes % 128 == 0 ? 64 : 0);
    // Packed weights lie as a warp reads them, 512 bytes a tile and unit.
    static constexpr int kTileBytes = C::kPacked ? kSpan * 512 : 8 * kRowStride;
    static constexpr int kScaleBytes = kSpan * C::kScales * 32;
    static constexpr int kStageBytes = ceil_div(kTileBytes + kScaleBytes, 128) * 128;
    // Whether every lane says that a place was read: racecheck follows nothing else. Otherwise one for its warp, behind a
    // barrier of the warp; steps of Qwen3-0.6B in four bits are 1.2 % shorter so, of Mistral-7B in eight 0.7 % longer.
    static constexpr bool kEachArrives = OP_EACH_ARRIVES;
    static_assert(COLUMNS % C::kSpan == 0, "columns");
    static_assert(BATCH >= 1 && BATCH <= 8, "batch");

    struct Shared {
        u64 full[kRing], empty[kRing];
        float sums[kGroups > 1 ? 2 : 1][WARPS][BATCH][kRows];
    };
    using Word = Pair[C::kWords][kSets];

    Shared& sh;
    u8* ring;
    const u8* weights;
    const u32* scales;
    const u16* activations;  // this lane's part of the first unit
    const Map map;
    int first_tile, last_tile, groups;  // of this block, the last tile excluded
    int warp, lane;
    int slot = 0, buffer = 0;
    u32 parity = 0;
    Word x[kHeldSegments][DEPTH];

    __device__ __forceinline__ Gemv(const u8* w, const u32* s, const u16* a, Shared& shared, u8* dynamic, Map rows = {})
        : sh(shared), ring(dynamic), weights(w), scales(s), map(rows) {
        first_tile = blockIdx.x * BLOCK_TILES;
        last_tile = kFull || first_tile + BLOCK_TILES < Map::kTiles ? first_tile + BLOCK_TILES : Map::kTiles;
        groups = kFull ? kGroups : ceil_div(last_tile - first_tile, TILES);
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        const int g = lane >> 2, t = lane & 3;
        activations = a + u64(g >> 1) * COLUMNS + warp * DEPTH * C::kSpan + C::x_offset(t, 0) + (g & 1) * 2;
    }

    __device__ __forceinline__ bool produces() const { return warp == WARPS; }

    __device__ static constexpr int span_of(int segment) {
        return kLastSpan == kSpan || segment + 1 < kSegments ? kSpan : kLastSpan;
    }

    // Has stage `n` of this block copied to its place in the ring.
    __device__ __forceinline__ void copy_stage(int n, int place) {
        const int group = n / kStagesOfGroup, segment = n % kStagesOfGroup / TILES, span = span_of(segment);
        int tile = n % TILES;
        const int first = first_tile + group * TILES;
        if (!kFull && first + tile >= last_tile) tile = last_tile - 1 - first;  // any will do
        const int row = map.row(first, tile);
        u8* to = ring + place * kStageBytes;
        u64& full = sh.full[place];
        if (lane == 0) expect_bytes(full, span * (512 + C::kScales * 32));
        __syncwarp();
        if constexpr (C::kPacked) {
            copy_runs<1>(
                full, span * 512, lane,
                [&](int) { return weights + (row / 8) * (8 * kStride) + segment * (kSpan * 512); },
                [&](int) { return to; });
            if constexpr (kScaleBytes > 0)
                copy_runs<1>(
                    full, span * (C::kScales * 32), lane,
                    [&](int) {
                        return reinterpret_cast<const u8*>(scales) + (row / 8) * ((long long)kUnits * C::kScales * 32) +
                               segment * kScaleBytes;
                    },
                    [&](int) { return to + kTileBytes; });
        } else {
            copy_runs<8>(
                full, span * 64, lane,
                [&](int i) { return weights + map.source(row + i) * kStride + segment * kRowBytes; },
                [&](int i) { return to + i * kRowStride; });
        }
        end_of_copies(full);
    }

    // Before the wait: nothing here depends on an earlier kernel.
    __device__ __forceinline__ void fill() {
        if (produces()) {
            static_assert(kRing <= 32, "a lane sets up a stage's barriers");
            constexpr int kReaders = kEachArrives ? WARPS * 32 : WARPS;
            if (lane < kRing) init_barrier(sh.full[lane], kReporters), init_barrier(sh.empty[lane], kReaders);
            publish_barriers();
        }
        __syncthreads();
        if (produces()) {
            const int stages = groups * kStagesOfGroup;
#pragma unroll 1
            for (int n = 0; n < kRing && (kFull || n < stages); ++n) {
                if (n >= kWindow) wait_barrier(sh.full[n - kWindow], 0);
                copy_stage(n, n);
            }
        }
    }

    // After the wait. The producer returns when all is under way.
    __device__ __forceinline__ void produce() {
        if constexpr (!kWhole) {
            const int stages = groups * kStagesOfGroup;
            int place = 0;
            u32 phase = 0;
            int last = kRing - kWindow;  // place of the stage that must have come
            u32 last_phase = 0;
            for (int n = kRing; n < stages; ++n) {
                wait_barrier(sh.empty[place], phase);
                wait_barrier(sh.full[last], last_phase);
                copy_stage(n, place);
                if (++place == kRing) place = 0, phase ^= 1;
                if (++last == kRing) last = 0, last_phase ^= 1;
            }
        }
    }

    __device__ __forceinline__ bool has(int segment, int depth) const {
        return span_of(segment) == WARPS * DEPTH || warp * DEPTH + depth < span_of(segment);
    }

    __device__ __forceinline__ void load_x(Word (&to)[DEPTH], int segment) const {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int i = 0; i < C::kWords; ++i)
#pragma unroll
                for (int s = 0; s < kSets; ++s) {
                    Pair& q = to[d][i][s];
                    q = Pair{0u, 0u};
                    if ((lane >> 3) + 4 * s < BATCH && has(segment, d)) {
                        const u16* p = activations + u64(4 * s) * COLUMNS + (segment * kSpan + d) * C::kSpan;
                        const u32* words = reinterpret_cast<const u32*>(p + C::x_offset(0, i));
                        q.x = load_shared_state(words);
                        q.y = load_shared_state(words + 2);
                    }
                }
    }

    // After the wait.
    __device__ __forceinline__ void start_x() {
#pragma unroll
        for (int segment = 0; segment < kHeldSegments; ++segment) load_x(x[segment], segment);
    }

    using Products = float[TILES][kChains][kSets][4];

    // Tiles whose stages are awaited together, so that their products overlap: four of a head's copy, where the ring holds
    // as many stages several times over.
    static constexpr bool kFour = FORMAT == kInt8Tiles && TILES % 4 == 0 && kRing >= 12;
    static constexpr int kJoint = kSets > 1              ? 1
                                  : kWhole && DEPTH == 1 ? TILES
                                  : kFour                ? 4
                                  : TILES % 3 == 0       ? 3
                                  : TILES % 2 == 0       ? 2
                                                         : 1;

    __device__ __forceinline__ void multiply_segment(Products& products, const Word (&x)[DEPTH], int segment) {
        const int g = lane >> 2, t = lane & 3;
        constexpr int kUnitBytes = C::kPacked ? 512 : 64;
        const u8* rows = ring + (C::kPacked ? lane * 16 : g * kRowStride + t * 16) + warp * DEPTH * kUnitBytes;
        const u8* scale = ring + kTileBytes + (warp * DEPTH * C::kScales * 8 + g) * 4;
#pragma unroll
        for (int tile = 0; tile < TILES; tile += kJoint) {
            int place[kJoint];
            u32 last[kJoint] = {};
#pragma unroll
            for (int j = 0; j < kJoint; ++j) {
                place[j] = slot;
                wait_barrier(sh.full[slot], parity);
                if (++slot == kRing) slot = 0, parity ^= 1;
            }
#pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                if (has(segment, d)) {
#pragma unroll
                    for (int j = 0; j < kJoint; ++j) {
                        const C chunk(reinterpret_cast<const Quad*>(rows + place[j] * kStageBytes + d * kUnitBytes),
                                      reinterpret_cast<const u32*>(scale + place[j] * kStageBytes) + d * C::kScales * 8);
                        chunk.multiply(products[tile + j][d % kChains], x[d]);
                        last[j] ^= chunk.word();
                    }
                }
            if constexpr (!kWhole) {
                if constexpr (!kEachArrives) __syncwarp();
#pragma unroll
                for (int j = 0; j < kJoint; ++j)
                    if (kEachArrives || lane == 0) arrive_after(sh.empty[place[j]], last[j]);
            }
        }
    }

    // The sums of the next group of TILES tiles, to be read by `total`. By the consumers.
    __device__ __forceinline__ void group() {
        Products d = {};
        if constexpr (kHoldsX) {
#pragma unroll
            for (int segment = 0; segment < kSegments; ++segment) multiply_segment(d, x[segment], segment);
        } else {
            Word next[DEPTH];
#pragma unroll 1
            for (int segment = 0; segment < kSegments; ++segment) {
                load_x(next, segment + 1 < kSegments ? segment + 1 : 0);
                multiply_segment(d, x[0], segment);
#pragma unroll
                for (int i = 0; i < DEPTH; ++i)
#pragma unroll
                    for (int w = 0; w < C::kWords; ++w)
#pragma unroll
                        for (int s = 0; s < kSets; ++s) x[0][i][w][s] = next[i][w][s];
            }
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
                    sh.sums[buffer][warp][t + 4 * s][i * 8 + g] = v;
                }
        sync_consumers();
    }

    __device__ __forceinline__ void sync_consumers() const {
        asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
    }

    // The producer tells the consumers, once, that what it wrote to shared memory may be read.
    __device__ __forceinline__ void tell() { asm volatile("bar.arrive 2, %0;" ::"n"(kThreads) : "memory"); }
    __device__ __forceinline__ void await() const { asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); }

    // A tree over the warps: the same for every batch.
    template <int FROM = 0, int COUNT = WARPS>
    __device__ __forceinline__ float total(int m, int n) const {
        if constexpr (COUNT == 1) {
            return sh.sums[buffer][FROM][m][n];
        } else {
            return total<FROM, COUNT / 2>(m, n) + total<FROM + COUNT / 2, COUNT - COUNT / 2>(m, n);
        }
    }

    __device__ __forceinline__ void next_group() {
        if constexpr (kGroups > 1) buffer ^= 1;
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

