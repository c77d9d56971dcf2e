// out[token][row] = x · Wᵀ as `gemm.cu` has it, for 64 tokens and more on a card of compute capability 9.0: products of a
// warpgroup, 64 rows of W from registers by all tokens of the block from shared memory, so that each weight is unpacked
// once for all of them. The tokens come as `order.cuh` lays them out: a lane's weights meet their columns, and what a
// block needs of them at a time are runs of bytes, which the copy engine brings. Each warp copies its own weights. So no
// warp waits for another but where the engine is to write over what others may still read, two stages later.
#include "gemm_wide.cuh"
#include "store.cuh"
#include "warpgroup.cuh"

// ---- stages --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 nibbles(u32 word, int n, u32 minus_zero) {
    return fma_bf16x2(((word >> (4 * n)) & 0x000F000Fu) | 0x43004300u, 0x3F803F80u, minus_zero);
}

struct Sums {
    float of[kSums];

    // One stage, whose weights are in registers. `ahead` loads those of the next while the last products run.
    template <class Ahead>
    __device__ __forceinline__ void four_bits(const u8* stage, const Quad (&own)[2], int warp, int g, Ahead&& ahead) {
        constexpr int kEach = 4 / (kGroups > 0 ? kGroups : 1);  // words of a group
        const u32* words = reinterpret_cast<const u32*>(stage + kTokenBytes + kWeightBytes) + warp * 2 * kGroups * 8 + g;
        const Quad upper = own[0], lower = own[1];
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
                    multiply<false>(part, a[i], operand(stage + j / 2 * kTokens * 128 + (j % 2 * 2 + i) * 32, 16),
                                    i > 0 || j > q * kEach);
                end_products();
            }
            if (q == kGroups - 1) ahead();
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
        for (int i = 0; i < 4; ++i) multiply<false>(of, a[i], operand(stage + i * 32, 16), true);
        end_products();
        wait_products<1>();
    }
};

// Grid: token tiles, row tiles, slices of the columns. With one slice `out` is bf16 [tokens, rows]; with several it is
// float32 [slices, tokens, rows], and whoever reads it adds them up.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm(const u8* x, const u8* weights, const u32* scales, const float* row_scale, const float* bias, u8* out, int rows,
         int columns, int tokens, int trigger) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ Tokens brought;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    if (trigger == 0) let_next_start();
    const int row0 = blockIdx.y * kRows, token0 = blockIdx.x * kTokens;
    const int units = columns / kSpan, slices = gridDim.z;
    const int first = int(u64(units) * blockIdx.z / slices), last = int(u64(units) * (blockIdx.z + 1) / slices);
    Weights from(weights, scales, rows, columns, row0, first);
    constexpr int kAhead = OP_STAGES - 2;  // stages under way; the two others are in use by warps that are not equally far
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
        if (first + s < last) from.next(stages + s * kStage);
        end_copy_group();
    }
    brought.init();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const u64 run_step = u64(tokens) * 128;
    const u8* source = x + u64(first) * kRuns * run_step + u64(token0) * 128;
    if (threadIdx.x == 0) {
        publish_to_copies();
        for (int s = 0; s < kAhead && first + s < last; ++s, source += kRuns * run_step)
            brought.bring(stages + s * kStage, s, source, run_step, tokens - token0);
    }
    Sums sums = {};
    int at = 0, next = kAhead;
    u32 phase = 0, next_phase = 1;  // of `at` when full, of `next` when empty: at first nobody has read it
    auto arrive_at_next = [&](int unit) {
        wait_copy_groups<kAhead - 1>();
        __syncwarp();
        if (unit + kAhead < last) {
            from.next(stages + next * kStage);
            if (threadIdx.x == 0) {
                wait_barrier(brought.empty[next], next_phase);
                brought.bring(stages + next * kStage, next, source, run_step, tokens - token0);
                source += kRuns * run_step;
            }
        }
        end_copy_group();
        wait_barrier(brought.full[at], phase);
        __syncwarp();
    };
    auto move_on = [&] {
        if (++at == OP_STAGES) at = 0, phase ^= 1;
        if (++next == OP_STAGES) next = 0, next_phase ^= 1;
    };
    auto before_at = [&] { return at == 0 ? OP_STAGES - 1 : at - 1; };  // whose products have ended
    if constexpr (kInt4Weights) {
        Quad own[2] = {};  // sixteen rows of the warp, 128 columns
        auto load = [&] {
            const u8* at_own = stages + at * kStage + kTokenBytes + warp * 1024 + lane * 16;
            own[0] = load_quad(at_own), own[1] = load_quad(at_own + 512);
        };
        if (first < last) arrive_at_next(first), load();
        for (int unit = first; unit < last; ++unit) {
            const int here = at;
            sums.four_bits(stages + at * kStage, own, warp, g, [&] {
                move_on();
                if (unit + 1 < last) arrive_at_next(unit + 1), load();
            });
            brought.leave(here);
        }
    } else {
        u32 even[4][4], odd[4][4];
        for (int unit = first; unit < last; unit += 2) {
            arrive_at_next(unit);
            sums.eight_bits(even, stages + at * kStage, warp, g, t);
            if (unit > first) brought.leave(before_at());
            move_on();
            if (unit + 1 == last) break;
            arrive_at_next(unit + 1);
            sums.eight_bits(odd, stages + at * kStage, warp, g, t);
            brought.leave(before_at());
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
