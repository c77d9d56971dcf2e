// What a block of `gemm_wide.cu` holds, and how it comes: stages of weights, their scales, and the same columns of tokens.
#pragma once
#include "boxes.cuh"
#include "copies.cuh"
#include "formats.cuh"

constexpr bool kInt4Weights = OP_FORMAT == kInt4;
constexpr int kRows = OP_ROWS, kTokens = OP_TOKENS, kStages = OP_STAGES;
constexpr int kReaderWarps = 8, kThreads = 32 * kReaderWarps + 128;  // two warpgroups multiply, one copies
constexpr int kParts = kRows / 128;                                  // of the rows that both multiply at a time
constexpr int kSums = kTokens / 2;                                   // of a lane and part
constexpr int kSpan = kInt4Weights ? 128 : 64, kRuns = kSpan / 64;   // columns of a stage, and their runs
constexpr int kGroups = kInt4Weights ? kSpan / OP_GROUP : 1;         // of them with scales of their own
constexpr int kRunBytes = kTokens * 128, kTokenBytes = kRuns * kRunBytes;  // [run][token][128 bytes]
constexpr int kWeightBytes = kRows * 64, kScaleBytes = kInt4Weights ? kGroups * kRows * 4 : 0;
constexpr int kStage = kTokenBytes + kWeightBytes + kScaleBytes;
constexpr int kOutRow = kRows + 4;  // floats of a token's row of results; the four keep lanes in banks of their own
static_assert(OP_FORMAT == kInt4 || OP_FORMAT == kInt8, "format");
static_assert(kRows == 128 || kRows == 256, "rows");
static_assert(kStages >= 2 && kStages * kStage >= kTokens * kOutRow * 4, "shared memory");

using Place = RingPlace<kStages>;

// Where a stage's parts lie: all stages' tokens first, since products want their runs at multiples of 1024 bytes.
struct Stage {
    u8 *tokens, *weights, *scales;

    __device__ __forceinline__ Stage(u8* stages, int n)
        : tokens(stages + n * kTokenBytes),
          weights(stages + kStages * kTokenBytes + n * kWeightBytes),
          scales(stages + kStages * (kTokenBytes + kWeightBytes) + n * kScaleBytes) {}
};

struct Barriers {
    u64 full[kStages], empty[kStages];

    __device__ __forceinline__ void init() {
        if (threadIdx.x < kStages) {
            init_barrier(full[threadIdx.x], 1);
            init_barrier(empty[threadIdx.x], kReaderWarps);
        }
        publish_barriers();
        __syncthreads();
    }
    // By a warp that reads the stage no more.
    __device__ __forceinline__ void leave(int stage) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty[stage]);
    }
};

// By one thread. Weights come in boxes: run by run, each a few hundred bytes, they take the copy engine three quarters longer
// than the products take, and by threads' own copies a quarter.
struct Copies {
    static constexpr int kBoxColumns = kInt4Weights ? 128 : kSpan;  // words of eight rows, or bytes of one
    const Map &weights, &scales;
    u8* stages;
    Barriers& barriers;
    int box_row;

    __device__ __forceinline__ void next_weights(int unit, int stage, int token_bytes) const {
        const Stage to(stages, stage);
        u64& full = barriers.full[stage];
        expect_bytes(full, u32(kWeightBytes + kScaleBytes + token_bytes * kRuns));
        copy_box(full, to.weights, &weights, unit * kBoxColumns, box_row);
        if constexpr (kInt4Weights) copy_box(full, to.scales, &scales, unit * kGroups * 8, box_row);
    }

    // Units first to last. `x`: the block's first token in the first run; `run_step`: bytes from run to run.
    __device__ __forceinline__ void all(int first, int last, const u8* x, u64 run_step, int token_bytes, bool then_start) const {
        const int ahead = min(last - first, kStages);
        auto next_tokens = [&](int unit, int stage) {
#pragma unroll
            for (int run = 0; run < kRuns; ++run)
                copy_run(barriers.full[stage], Stage(stages, stage).tokens + run * kRunBytes,
                         x + u64(unit * kRuns + run) * run_step, token_bytes);
        };
        prefetch_map(&weights);
        if constexpr (kInt4Weights) prefetch_map(&scales);
        for (int i = 0; i < ahead; ++i) next_weights(first + i, i, token_bytes);  // they do not wait for what is before
        wait_for_previous();
        if (then_start) let_next_start();
        publish_to_copies();
        for (int i = 0; i < ahead; ++i) next_tokens(first + i, i);
        Place place;
        for (int unit = first + ahead; unit < last; ++unit, place.next()) {
            wait_barrier(barriers.empty[place.stage], place.round);
            next_weights(unit, place.stage, token_bytes);
            next_tokens(unit, place.stage);
        }
    }
};
