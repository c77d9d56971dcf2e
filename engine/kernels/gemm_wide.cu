// out[token][row] = x · Wᵀ as `gemm.cu` has it, for 33 tokens and more on a card of compute capability 9.0: products of a
// warpgroup, 64 rows of W from registers by all tokens of the block from shared memory, so that each weight is unpacked
// once for all of them. The tokens come as `order.cuh` lays them out: a lane's weights meet their columns, and what a
// block needs of them at a time are runs of bytes, which the copy engine brings.
//
// A thread copies, two warpgroups multiply, and unpack the next weights while products run. Four bits are scaled before
// their product and rounded to bf16, as plain copies of the weights are: scaled behind it, group by group, they would need
// as many sums again, and no product could run on into the next stage.
#include "gemm_wide.cuh"
#include "store.cuh"
#include "warpgroup.cuh"

// ---- weights of a stage ------------------------------------------------------------------------------------------------

constexpr int kProducts = kSpan / 16;  // sixteen columns each

// A scale twice, as the sum of two numbers of bf16.
struct Scale {
    u32 high, low;

    __device__ __forceinline__ explicit Scale(u16 half) {
        const float scale = half_to_float(half);
        high = pack_bf16(scale, scale);
        const float rest = scale - __uint_as_float(high & 0xFFFF0000u);
        low = pack_bf16(rest, rest);
    }
};

// `nibbles` times their scale, rounded to bf16 once. Mask and exponent are one instruction here, of which the compiler makes
// two.
__device__ __forceinline__ u32 scaled_nibbles(u32 word, int n, u32 minus_zero, const Scale& scale) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(word >> (4 * n)), "r"(0x000F000Fu), "r"(0x43004300u));
    v = fma_bf16x2(v, 0x3F803F80u, minus_zero);
    return fma_bf16x2(v, scale.high, fma_bf16x2(v, scale.low, 0x80008000u));
}

// As bf16, a lane's own of sixteen rows of a warp: the first operands of the stage's products.
struct Operands {
    u32 of[kProducts][4];

    // `rows`: the warp's number among those that have sixteen rows each.
    __device__ __forceinline__ void unpack(const Stage& stage, int rows) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const u8* bytes = stage.weights + rows * 1024;
        if constexpr (kInt4Weights) {
            constexpr int kEach = kProducts / kGroups;
            const u32* words = reinterpret_cast<const u32*>(stage.scales) + rows * 2 * kGroups * 8 + g;
            const Quad upper = load_quad(bytes + lane * 16), lower = load_quad(bytes + 512 + lane * 16);
#pragma unroll
            for (int q = 0; q < kGroups; ++q) {
                const u32 up_words = words[q * 8], low_words = words[(kGroups + q) * 8];
                const u32 up_zero = __byte_perm(up_words, 0u, 0x3232u), low_zero = __byte_perm(low_words, 0u, 0x3232u);
                const Scale up_scale{u16(up_words)}, low_scale{u16(low_words)};
#pragma unroll
                for (int i = q * kEach; i < (q + 1) * kEach; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        of[i][2 * half] = scaled_nibbles(upper.r[i / 2], i % 2 * 2 + half, up_zero, up_scale);
                        of[i][2 * half + 1] = scaled_nibbles(lower.r[i / 2], i % 2 * 2 + half, low_zero, low_scale);
                    }
            }
        } else {
            using Bytes = Chunk<kInt8, 128>;
            const Quad upper = load_quad(bytes + g * 64 + t * 16), lower = load_quad(bytes + 512 + g * 64 + t * 16);
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
                of[i][0] = Bytes::pair(upper.r[i], 0x4140u), of[i][1] = Bytes::pair(lower.r[i], 0x4140u);
                of[i][2] = Bytes::pair(upper.r[i], 0x4342u), of[i][3] = Bytes::pair(lower.r[i], 0x4342u);
            }
        }
    }
};

// ---- a warpgroup's products --------------------------------------------------------------------------------------------

struct Products {
    float sums[kParts][kSums] = {};

    // Of all stages. Those of the operands before may still run while the next are unpacked.
    __device__ __forceinline__ void all(u8* stages, Barriers& barriers, int units, int warp) {
        Place place;
        Operands even, odd;
        int before = 0;  // the stage whose products may still run
        auto start = [&](Operands& own, int part) {
            const Stage stage(stages, place.stage);
            own.unpack(stage, part * kReaderWarps + warp);
            before_products();
#pragma unroll
            for (int i = 0; i < kProducts; ++i)
                multiply<false>(sums[part], own.of[i], operand(stage.tokens + i / 4 * kRunBytes + i % 4 * 32, 16), true);
            end_products();
            wait_products<1>();
        };
        auto wait = [&] { wait_barrier(barriers.full[place.stage], place.round); };
        auto leave_before = [&](bool any) {
            if (any) barriers.leave(before);
            before = place.stage;
        };
        if constexpr (kParts == 2) {
            for (int unit = 0; unit < units; ++unit, place.next()) {
                wait();
                start(even, 0);
                leave_before(unit > 0);
                start(odd, 1);
            }
        } else {
            for (int unit = 0; unit < units; unit += 2) {
                wait();
                start(even, 0);
                leave_before(unit > 0);
                place.next();
                if (unit + 1 == units) break;
                wait();
                start(odd, 0);
                leave_before(true);
                place.next();
            }
        }
        wait_products<0>();
    }
};

// ---- the block ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void lay_out(const Products& products, int warp, float* tile) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                tile[(n * 8 + 2 * t + (c & 1)) * kOutRow + part * 128 + warp * 16 + c / 2 * 8 + g] =
                    products.sums[part][n * 4 + c];
}

// Grid: token tiles, row tiles, slices of the columns. With one slice `out` is bf16 [tokens, rows]; with several it is
// float32 [slices, tokens, rows], and whoever reads it adds them up. Boxes of weights: 512 bytes of kRows / 8 tiles, or 64
// of kRows rows; of scales: a stage's groups of kRows / 8 tiles, four bits alone.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm(const u8* x, const __grid_constant__ Map weights, const __grid_constant__ Map scales, const float* row_scale,
         const float* bias, u8* out, int rows, int columns, int tokens, int trigger) {
    extern __shared__ __align__(1024) u8 stages[];
    __shared__ Barriers barriers;
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // alike in a warp
    if (trigger == 0) let_next_start();
    const int row0 = blockIdx.y * kRows, token0 = blockIdx.x * kTokens;
    const int units = columns / kSpan, slices = gridDim.z;
    const int first = int(u64(units) * blockIdx.z / slices), last = int(u64(units) * (blockIdx.z + 1) / slices);
    float* tile = reinterpret_cast<float*>(stages);
    barriers.init();
    if (warp >= kReaderWarps) {
        fewer_registers<40>();
        if (threadIdx.x == 32 * kReaderWarps)
            Copies{weights, scales, stages, barriers, kInt4Weights ? row0 / 8 : row0}.all(
                first, last, x + u64(token0) * 128, u64(tokens) * 128, min(tokens - token0, kTokens) * 128, trigger == 1);
        __syncwarp();
        __syncthreads();
    } else {
        more_registers<232>();
        wait_for_previous();  // who may still read `out`
        if (trigger == 1) let_next_start();
        Products products;
        if (first < last) products.all(stages, barriers, last - first, warp);
        __syncthreads();  // all stages are read
        lay_out(products, warp, tile);
    }
    __syncthreads();
    store_tile<kTokens, kRows>(tile, kOutRow, row0, token0, row_scale, bias, out, rows, tokens);
}
