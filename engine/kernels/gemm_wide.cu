// out[token][row] = x · Wᵀ as `gemm.cu` has it, for 64 tokens and more on a card of compute capability 9.0: products of a
// warpgroup, 64 rows of W from registers by all tokens of the block from shared memory, so that each weight is unpacked
// once for all of them. The tokens' columns come in the order of `order.cuh`, in which a lane's weights lie.
#include "feed.cuh"
#include "store.cuh"

constexpr bool kInt4Weights = OP_FORMAT == kInt4;
constexpr int kThreads = 256, kRows = 128, kTokens = OP_TOKENS;
constexpr int kSums = kTokens / 2;                            // of a lane
using From = Feed<OP_FORMAT, OP_GROUP, OP_TOKENS>;
constexpr int kGroups = From::kGroups, kTokenBytes = From::kTokenBytes;  // runs of 64 columns, [run][token][128 bytes]
constexpr int kStage = ceil_div(kTokenBytes + From::kWeightBytes + From::kScaleBytes, 1024) * 1024;
constexpr int kOutRow = kRows + 4;  // floats of a token's row of results; the four keep lanes in banks of their own
static_assert(OP_FORMAT == kInt4 || OP_FORMAT == kInt8, "format");
static_assert(OP_STAGES >= 4 && OP_STAGES * kStage >= kTokens * kOutRow * 4, "shared memory");

// ---- products of a warpgroup ---------------------------------------------------------------------------------------

// Registers written before it are seen by the products after it.
__device__ __forceinline__ void before_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Shared memory that threads wrote is seen by the products.
__device__ __forceinline__ void publish_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Sixteen columns of all tokens: rows of 128 bytes, eight of them 1024 bytes, their segments of 16 bytes permuted.
__device__ __forceinline__ u64 operand(const u8* at) {
    return u64((shared_address(at) & 0x3FFFFu) >> 4) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
}

// d [64 rows, tokens] (+)= a · tokens; lanes hold both as for `mma`.
#if OP_TOKENS == 128
__device__ __forceinline__ void multiply(float (&d)[64], const u32 (&a)[4], u64 tokens, bool more) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
          "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
          "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(int(more)));
}
#else
__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 tokens, bool more) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
          "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
          "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
          "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(int(more)));
}
#endif

// ---- stages --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 nibbles(u32 word, int n, u32 minus_zero) {
    return fma_bf16x2(((word >> (4 * n)) & 0x000F000Fu) | 0x43004300u, 0x3F803F80u, minus_zero);
}

struct Sums {
    float of[kSums];

    // One stage; `rows` is where the warp's sixteen rows of weights lie in it.
    __device__ __forceinline__ void four_bits(const u8* stage, int warp, int g, int t) {
        constexpr int kEach = 4 / (kGroups > 0 ? kGroups : 1);  // words of a group
        const u8* rows = stage + kTokenBytes + warp * 1024;
        const u32* words = reinterpret_cast<const u32*>(stage + kTokenBytes + From::kWeightBytes) + warp * 2 * kGroups * 8 + g;
        const Quad upper = load_quad(rows + g * 64 + t * 16), lower = load_quad(rows + 512 + g * 64 + t * 16);
        float part[kSums];
#pragma unroll
        for (int q = 0; q < kGroups; ++q) {
            const u32 scale[2] = {words[q * 8], words[(kGroups + q) * 8]};
            const u32 zero[2] = {__byte_perm(scale[0], 0u, 0x3232u), __byte_perm(scale[1], 0u, 0x3232u)};
#pragma unroll
            for (int j = q * kEach; j < (q + 1) * kEach; ++j) {
                u32 a[2][4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    a[i][0] = nibbles(upper.r[j], 2 * i, zero[0]), a[i][1] = nibbles(lower.r[j], 2 * i, zero[1]);
                    a[i][2] = nibbles(upper.r[j], 2 * i + 1, zero[0]), a[i][3] = nibbles(lower.r[j], 2 * i + 1, zero[1]);
                }
                before_products();
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    multiply(part, a[i], operand(stage + j / 2 * kTokens * 128 + (j % 2 * 2 + i) * 32), i > 0 || j > q * kEach);
                end_products();
            }
            wait_products<0>();
            const float f[2] = {half_to_float(u16(scale[0])), half_to_float(u16(scale[1]))};
#pragma unroll
            for (int n = 0; n < kSums; ++n) of[n] += f[n / 2 % 2] * part[n];
        }
    }

    // The products of the stage before may still run while this one's weights are unpacked; `a` is not theirs.
    __device__ __forceinline__ void eight_bits(u32 (&a)[4][4], const u8* stage, int warp, int g, int t) {
        using Bytes = Chunk<kInt8, 128>;
        const u8* rows = stage + kTokenBytes + warp * 1024;
        const Quad upper = load_quad(rows + g * 64 + t * 16), lower = load_quad(rows + 512 + g * 64 + t * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i][0] = Bytes::pair(upper.r[i], 0x4140u), a[i][1] = Bytes::pair(lower.r[i], 0x4140u);
            a[i][2] = Bytes::pair(upper.r[i], 0x4342u), a[i][3] = Bytes::pair(lower.r[i], 0x4342u);
        }
        before_products();
#pragma unroll
        for (int i = 0; i < 4; ++i) multiply(of, a[i], operand(stage + i * 32), true);
        end_products();
        wait_products<1>();
    }
};

// Grid: token tiles, row tiles, slices of the columns. With one slice `out` is bf16 [tokens, rows]; with several it is
// float32 [slices, tokens, rows], and whoever reads it adds them up.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm(const u16* x, const u8* weights, const u32* scales, const float* row_scale, const float* bias, u8* out, int rows,
         int columns, int tokens, int trigger) {
    extern __shared__ __align__(1024) u8 stages[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    if (trigger == 0) let_next_start();
    const int row0 = blockIdx.y * kRows, token0 = blockIdx.x * kTokens;
    const int units = columns / From::kSpan, slices = gridDim.z;
    const int first = int(u64(units) * blockIdx.z / slices), last = int(u64(units) * (blockIdx.z + 1) / slices);
    From from(x, weights, scales, rows, columns, tokens, row0, token0, first);
    const int own = threadIdx.x / From::kSegments, segment = threadIdx.x % From::kSegments;
    const int place = segment / 8 * kTokens * 128 + own * 128 + ((segment ^ own) & 7) * 16;
    constexpr int kStep = From::kTogether * 128;
    // Stages under way. The products of the last stage read its operands beyond the next barrier where they may.
    constexpr int kAhead = OP_STAGES - (kInt4Weights ? 1 : 2);
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
        if (first + s < last) from.weights_to(stages + s * kStage + kTokenBytes);
    wait_for_previous();
    if (trigger == 1) let_next_start();
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
        if (first + s < last) from.tokens_to<kStep>(stages + s * kStage + place);
        end_copy_group();
    }
    Sums sums = {};
    int at = 0, next = kAhead;
    auto arrive_at_next = [&](int unit) {
        wait_copy_groups<kAhead - 1>();
        publish_to_products();
        __syncthreads();
        if (unit + kAhead < last) {
            from.weights_to(stages + next * kStage + kTokenBytes);
            from.tokens_to<kStep>(stages + next * kStage + place);
        }
        end_copy_group();
    };
    auto move_on = [&] { at = at + 1 == OP_STAGES ? 0 : at + 1, next = next + 1 == OP_STAGES ? 0 : next + 1; };
    if constexpr (kInt4Weights) {
        for (int unit = first; unit < last; ++unit) {
            arrive_at_next(unit);
            sums.four_bits(stages + at * kStage, warp, g, t);
            move_on();
        }
    } else {
        u32 even[4][4], odd[4][4];
        for (int unit = first; unit < last; unit += 2) {
            arrive_at_next(unit);
            sums.eight_bits(even, stages + at * kStage, warp, g, t);
            move_on();
            if (unit + 1 == last) break;
            arrive_at_next(unit + 1);
            sums.eight_bits(odd, stages + at * kStage, warp, g, t);
            move_on();
        }
        wait_products<0>();
    }
    wait_copy_groups<0>();
    __syncthreads();
    float* tile = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            tile[(n * 8 + 2 * t + (c & 1)) * kOutRow + warp * 16 + c / 2 * 8 + g] = sums.of[n * 4 + c];
    __syncthreads();
    store_tile<kTokens, kRows>(tile, kOutRow, row0, token0, row_scale, bias, out, rows, tokens);
}
