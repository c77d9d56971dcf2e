// out[token][row] = x · Wᵀ for many tokens, W in four or eight bits as `weights.py` lays it out.
//
// A block has 128 rows of W and OP_TOKENS tokens, and a slice of the columns where the grid divides them. Weights are the
// first operand of the tensor core: two tiles of eight rows fill its 16 rows, and a lane's 16 bytes of weights meet 16
// bytes of a token each two products, since what is called k is free to be any order. Weights become whole numbers in
// bf16, exact; scales multiply float32 sums, of a group (four bits) or of a row (eight).
#include "feed.cuh"
#include "store.cuh"

constexpr bool kInt4Weights = OP_FORMAT == kInt4;
constexpr int kWarpCount = 8, kThreads = kWarpCount * 32, kRows = 128, kTokens = OP_TOKENS;
constexpr int kWarpTokens = kTokens < 32 ? kTokens : 32;
constexpr int kTokenWarps = kTokens / kWarpTokens, kRowWarps = kWarpCount / kTokenWarps;
constexpr int kWarpRows = kRows / kRowWarps;
constexpr int kMi = kWarpRows / 16, kNi = kWarpTokens / 8;
static_assert(OP_FORMAT == kInt4 || OP_FORMAT == kInt8, "format");
static_assert(kTokens % 8 == 0 && kTokenWarps * kWarpTokens == kTokens && kMi >= 1, "tokens");

using From = Feed<OP_FORMAT, OP_GROUP, OP_TOKENS>;
constexpr int kGroups = From::kGroups, kTokenBytes = From::kSpan * 2;  // of a token, in a stage
constexpr int kWeightBytes = From::kWeightBytes, kScaleBytes = From::kScaleBytes;
constexpr int kStage = kWeightBytes + kScaleBytes + kTokens * kTokenBytes;
constexpr int kOutRow = kRows + 4;  // floats of a token's row of results; the four keep lanes in banks of their own
static_assert(OP_STAGES >= 2 && OP_STAGES * kStage >= kTokens * kOutRow * 4, "shared memory");

// Segments of 16 bytes are permuted within a token, so that eight lanes never meet in a bank.
__device__ __forceinline__ int segment_of(int token, int s) { return kInt4Weights ? s ^ ((token & 1) << 2) : s ^ (token & 1); }

struct Sums {
    float of[kMi][kNi][4];

    __device__ __forceinline__ void add(const u8* stage, int row_warp, int token_warp, int g, int t) {
        const u8* w = stage + row_warp * kWarpRows * 64;
        const u8* x = stage + kWeightBytes + kScaleBytes + (token_warp * kWarpTokens + g) * kTokenBytes;
        Quad weight[kMi][2];
#pragma unroll
        for (int m = 0; m < kMi; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) weight[m][h] = load_quad(w + (m * 16 + h * 8 + g) * 64 + t * 16);
        if constexpr (kInt4Weights) {
            const u32* words = reinterpret_cast<const u32*>(stage + kWeightBytes) + row_warp * (kWarpRows / 8) * kGroups * 8 + g;
            four_bits(weight, words, x, g, t);
        } else {
            eight_bits(weight, x, g, t);
        }
    }

    __device__ __forceinline__ void four_bits(const Quad (&weight)[kMi][2], const u32* words, const u8* x, int g, int t) {
        constexpr int kEach = 4 / (kGroups > 0 ? kGroups : 1);  // words of a group
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
            u32 scale[kMi][2];
            float part[kMi][kNi][4] = {};
#pragma unroll
            for (int m = 0; m < kMi; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) scale[m][h] = words[((m * 2 + h) * kGroups + q) * 8];
#pragma unroll
            for (int j = q * kEach; j < (q + 1) * kEach; ++j) {
                Quad b[kNi];
#pragma unroll
                for (int n = 0; n < kNi; ++n) b[n] = load_quad(x + n * 8 * kTokenBytes + segment_of(g, j * 4 + t) * 16);
#pragma unroll
                for (int m = 0; m < kMi; ++m) {
                    const u32 zero[2] = {__byte_perm(scale[m][0], 0u, 0x3232u), __byte_perm(scale[m][1], 0u, 0x3232u)};
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const u32 a[4] = {nibbles(weight[m][0].r[j], 2 * i, zero[0]), nibbles(weight[m][1].r[j], 2 * i, zero[1]),
                                          nibbles(weight[m][0].r[j], 2 * i + 1, zero[0]),
                                          nibbles(weight[m][1].r[j], 2 * i + 1, zero[1])};
#pragma unroll
                        for (int n = 0; n < kNi; ++n) mma(part[m][n], a, b[n].r[2 * i], b[n].r[2 * i + 1]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < kMi; ++m) {
                const float f[2] = {half_to_float(u16(scale[m][0])), half_to_float(u16(scale[m][1]))};
#pragma unroll
                for (int n = 0; n < kNi; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) of[m][n][c] += f[c / 2] * part[m][n][c];
            }
        }
    }

    __device__ __forceinline__ void eight_bits(const Quad (&weight)[kMi][2], const u8* x, int g, int t) {
        using Bytes = Chunk<kInt8, 128>;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Quad b[kNi];
#pragma unroll
            for (int n = 0; n < kNi; ++n) b[n] = load_quad(x + n * 8 * kTokenBytes + segment_of(g, t * 2 + half) * 16);
#pragma unroll
            for (int m = 0; m < kMi; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 upper = weight[m][0].r[2 * half + i], lower = weight[m][1].r[2 * half + i];
                    const u32 a[4] = {Bytes::pair(upper, 0x4140u), Bytes::pair(lower, 0x4140u), Bytes::pair(upper, 0x4342u),
                                      Bytes::pair(lower, 0x4342u)};
#pragma unroll
                    for (int n = 0; n < kNi; ++n) mma(of[m][n], a, b[n].r[2 * i], b[n].r[2 * i + 1]);
                }
        }
    }
};

// Grid: token tiles, row tiles, slices of the columns. With one slice `out` is bf16 [tokens, rows]; with several it is
// float32 [slices, tokens, rows], and whoever reads it adds them up.
extern "C" __global__ void __launch_bounds__(kThreads, kTokens >= 64 ? 1 : 2)
    gemm(const u16* x, const u8* weights, const u32* scales, const float* row_scale, const float* bias, u8* out, int rows,
         int columns, int tokens, int trigger) {
    extern __shared__ __align__(128) u8 stages[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int row_warp = warp % kRowWarps, token_warp = warp / kRowWarps;
    if (trigger == 0) let_next_start();
    const int row0 = blockIdx.y * kRows, token0 = blockIdx.x * kTokens;
    const int units = columns / From::kSpan, slices = gridDim.z;
    const int first = int(u64(units) * blockIdx.z / slices), last = int(u64(units) * (blockIdx.z + 1) / slices);
    From from(x, weights, scales, rows, columns, tokens, row0, token0, first);
    const int own = threadIdx.x / From::kSegments;  // where this thread's part of a token goes
    const int place = kWeightBytes + kScaleBytes + own * kTokenBytes + segment_of(own, threadIdx.x % From::kSegments) * 16;
    constexpr int kStep = From::kTogether * kTokenBytes, kAhead = OP_STAGES - 1;  // stages under way
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
        if (first + s < last) from.weights_to(stages + s * kStage);
    wait_for_previous();
    if (trigger == 1) let_next_start();
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
        if (first + s < last) from.tokens_to<kStep>(stages + s * kStage + place);
        end_copy_group();
    }
    Sums sums = {};
    int at = 0, next = kAhead;
    for (int unit = first; unit < last; ++unit) {
        wait_copy_groups<kAhead - 1>();
        __syncthreads();
        if (unit + kAhead < last) {
            from.weights_to(stages + next * kStage);
            from.tokens_to<kStep>(stages + next * kStage + place);
        }
        end_copy_group();
        sums.add(stages + at * kStage, row_warp, token_warp, g, t);
        at = at + 1 == OP_STAGES ? 0 : at + 1, next = next + 1 == OP_STAGES ? 0 : next + 1;
    }
    wait_copy_groups<0>();
    __syncthreads();
    float* tile = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int m = 0; m < kMi; ++m)
#pragma unroll
        for (int n = 0; n < kNi; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int token = token_warp * kWarpTokens + n * 8 + 2 * t + (c & 1);
                tile[token * kOutRow + row_warp * kWarpRows + m * 16 + c / 2 * 8 + g] = sums.of[m][n][c];
            }
    __syncthreads();
    store_tile<kTokens, kRows>(tile, kOutRow, row0, token0, row_scale, bias, out, rows, tokens);
}
