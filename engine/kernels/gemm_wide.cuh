// What a block of `gemm_wide.cu` holds, and how it comes: stages of weights, their scales, and the same columns of tokens.
#pragma once
#include "copies.cuh"
#include "formats.cuh"

constexpr bool kInt4Weights = OP_FORMAT == kInt4;
constexpr int kThreads = 256, kRows = 128, kTokens = OP_TOKENS;
constexpr int kSums = kTokens / 2;                            // of a lane
constexpr int kWarps = kThreads / 32, kWarpRows = kRows / kWarps;
constexpr int kSpan = kInt4Weights ? 128 : 64, kRuns = kSpan / 64;  // columns of a stage, and their runs
constexpr int kGroups = kInt4Weights ? kSpan / OP_GROUP : 0;  // of them with scales of their own
constexpr int kLanesOfTile = kGroups > 0 ? 2 * kGroups : 1;  // that copy the scales of eight rows
constexpr int kRunBytes = kTokens * 128, kTokenBytes = kRuns * kRunBytes;  // [run][token][128 bytes]
constexpr int kWeightBytes = kRows * 64, kScaleBytes = kGroups * kRows * 4;
constexpr int kStage = ceil_div(kTokenBytes + kWeightBytes + kScaleBytes, 1024) * 1024;
constexpr int kOutRow = kRows + 4;  // floats of a token's row of results; the four keep lanes in banks of their own
static_assert(OP_FORMAT == kInt4 || OP_FORMAT == kInt8, "format");
static_assert(OP_STAGES >= 4 && OP_STAGES * kStage >= kTokens * kOutRow * 4, "shared memory");

// ---- copies --------------------------------------------------------------------------------------------------------

// A warp's weights, stage by stage: 64 bytes of each of its sixteen rows, and their scales. What a lane copies moves on by
// a constant.
struct Weights {
    const u8 *row[2], *words;
    bool there[2], words_there;

    __device__ __forceinline__ Weights(const u8* weights, const u32* scales, int rows, int columns, int row0, int first) {
        const int units = columns / kSpan, lane = threadIdx.x % 32, own = row0 + threadIdx.x / 32 * kWarpRows;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = own + 8 * i + (kInt4Weights ? 0 : lane / 4);
            there[i] = r < rows;
            const u64 at = there[i] ? r : 0;
            if constexpr (kInt4Weights)  // 512 bytes for eight rows
                row[i] = weights + (at / 8 * units + first) * 512 + lane * 16;
            else
                row[i] = weights + at * columns + first * kSpan + lane % 4 * 16;
        }
        if constexpr (kInt4Weights) {  // [tile][group][8] words, as they lie
            const int r = own + lane / kLanesOfTile * 8;
            words_there = lane < 4 * kGroups && r < rows;
            words = reinterpret_cast<const u8*>(scales) +
                    ((u64(words_there ? r / 8 : 0) * units + first) * kGroups * 8 + lane % kLanesOfTile * 4) * 4;
        }
    }

    __device__ __forceinline__ void next(u8* stage) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        u8* to = stage + kTokenBytes + warp * kWarpRows * 64 + lane * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            copy_async(to + i * 512, row[i], there[i]);
            row[i] += kInt4Weights ? 512 : kSpan;
        }
        if constexpr (kInt4Weights) {
            if (lane < 4 * kGroups)
                copy_async(stage + kTokenBytes + kWeightBytes + warp * kGroups * 64 + lane * 16, words, words_there);
            words += kGroups * 32;
        }
    }
};

// The block's tokens, stage by stage.
struct Tokens {
    u64 full[OP_STAGES], empty[OP_STAGES];

    __device__ __forceinline__ void init() {
        if (threadIdx.x < OP_STAGES) {
            init_barrier(full[threadIdx.x], 1);
            init_barrier(empty[threadIdx.x], kWarps);
        }
        publish_barriers();
        __syncthreads();
    }
    // By one thread; `from`: the stage's first run, `there`: tokens that there are.
    __device__ __forceinline__ void bring(u8* stage, int at, const u8* from, u64 run_step, int there) {
        const int bytes = (there < kTokens ? there : kTokens) * 128;
        expect_bytes(full[at], u32(bytes * kRuns));
#pragma unroll
        for (int run = 0; run < kRuns; ++run) copy_run(full[at], stage + run * kRunBytes, from + run * run_step, bytes);
    }
    // By a warp that reads the stage no more.
    __device__ __forceinline__ void leave(int at) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty[at]);
    }
};
