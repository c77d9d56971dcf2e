// Copies of the stages of a product of many tokens: 64 bytes of each of 128 rows of weights, their scales, and the same
// columns of the tokens. What a thread copies differs from stage to stage by a constant, so it is worked out once.
#pragma once
#include "copies.cuh"
#include "formats.cuh"

template <int FORMAT, int GROUP, int TOKENS>
struct Feed {
    static constexpr bool kPacked = FORMAT == kInt4;
    static constexpr int kThreads = 256, kRows = 128;
    static constexpr int kSpan = kPacked ? 128 : 64;              // columns of a stage
    static constexpr int kGroups = kPacked ? kSpan / GROUP : 0;   // of them with scales of their own
    static constexpr int kWeightBytes = kRows * 64, kScaleBytes = kGroups * kRows * 4, kTokenBytes = TOKENS * kSpan * 2;
    static constexpr int kSegments = kSpan / 8, kTogether = kThreads / kSegments;  // of 16 bytes a token; tokens at once
    static constexpr int kPasses = ceil_div(TOKENS, kTogether);

    const u8 *row[2], *words, *token;
    u64 token_step;          // bytes from a token to the one that is copied with it
    int tokens_there;        // passes with a token
    bool row_there[2], words_there;

    __device__ __forceinline__ Feed(const u16* x, const u8* weights, const u32* scales, int rows, int columns, int tokens,
                                    int row0, int token0, int first) {
        const int units = columns / kSpan, at = threadIdx.x;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if constexpr (kPacked) {  // 512 bytes for eight rows
                const int tile = row0 / 8 + at / 32 + 8 * k;
                row_there[k] = tile * 8 < rows;
                row[k] = weights + (u64(row_there[k] ? tile : 0) * units + first) * 512 + at % 32 * 16;
            } else {
                const int r = row0 + at / 4 + 64 * k;
                row_there[k] = r < rows;
                row[k] = weights + u64(row_there[k] ? r : 0) * columns + first * kSpan + at % 4 * 16;
            }
        }
        if constexpr (kPacked) {  // [tile][group][8] words, as they lie
            const int tile = row0 / 8 + at / (2 * kGroups), part = at % (2 * kGroups);
            words_there = tile * 8 < rows;
            words = reinterpret_cast<const u8*>(scales) +
                    ((u64(words_there ? tile : 0) * units + first) * kGroups * 8 + part * 4) * 4;
        }
        const int own = token0 + at / kSegments, left = tokens - own;
        tokens_there = left > 0 ? ceil_div(left, kTogether) : 0;
        token = reinterpret_cast<const u8*>(x + u64(left > 0 ? own : 0) * columns + first * kSpan + at % kSegments * 8);
        token_step = u64(kTogether) * columns * 2;
    }

    // The next stage's weights, and scales after them.
    __device__ __forceinline__ void weights_to(u8* stage) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            copy_async(stage + (threadIdx.x + k * kThreads) * 16, row[k], row_there[k]);
            row[k] += kPacked ? 512 : kSpan;
        }
        if constexpr (kPacked) {
            if (threadIdx.x < kScaleBytes / 16) copy_async(stage + kWeightBytes + threadIdx.x * 16, words, words_there);
            words += kGroups * 32;
        }
    }

    // The next stage's tokens: this thread's of pass i go to `to` + i · STEP.
    template <int STEP>
    __device__ __forceinline__ void tokens_to(u8* to) {
        if (TOKENS >= kTogether || int(threadIdx.x) / kSegments < TOKENS) {
            const u8* from = token;
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const bool there = i < tokens_there;
                copy_async(to + i * STEP, from, there);
                if (i + 1 < tokens_there) from += token_step;
            }
        }
        token += kSpan * 2;
    }
};
