// Attention of a chunk of one sequence over its pages, where the chunk's own keys and values already are.
//
// A block has 64 tokens of one head, a warp 16 of them. Keys and values come by tiles of kKeys, the next on its way while
// one is worked on; the maximum and the sum of the exponents run along. A long context is divided among the blocks of the
// grid's third dimension; whichever of them comes last puts the parts together.
#include "copies.cuh"
#include "order.cuh"

constexpr int kPage = 16, kWarps = 4, kThreads = kWarps * 32, kQueries = kWarps * 16;
constexpr int kDim = OP_HEAD_DIM, kWidth = OP_Q_HEADS * kDim, kKeys = kDim > 128 ? 16 : 64;
constexpr int kRow = kDim + 8;  // values of a row in shared memory: eight rows of a matrix never share a bank
constexpr int kSegments = kDim / 8, kSteps = kDim / 16;
constexpr int kTile = kKeys * kRow;
constexpr int kLeast = 512 / kKeys, kMostSplits = 16;  // tiles of a part, parts
static_assert(kDim % 16 == 0 && kDim <= 256, "head");

__device__ __forceinline__ float exp2_of(float v) {
    float f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(v));
    return f;
}

struct Pool {
    const u16 *keys, *values;
    const int* pages;
    int kv, known;  // positions written

    __device__ __forceinline__ void load(u16* to, int tile) const {
        for (int i = threadIdx.x; i < kKeys * kSegments; i += kThreads) {
            const int k = i / kSegments, s = i % kSegments, at = tile * kKeys + k;
            const bool there = at < known;  // what lies past it may be anything, even NaN
            const u64 page = there ? u64(pages[at / kPage]) : 0;
            const u64 from = ((page * OP_KV_HEADS + kv) * kPage + at % kPage) * kDim + s * 8;
            copy_async(to + k * kRow + s * 8, keys + from, there);
            copy_async(to + kTile + k * kRow + s * 8, values + from, there);
        }
    }
};

struct Rows {
    float out[kDim / 8][4] = {};
    float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};

    // scores [16 tokens, kKeys] as the tensor core leaves them, masked.
    __device__ __forceinline__ void add(float (&s)[kKeys / 8][4], const u16* values, int lane) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float best = top[r];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) best = fmaxf(best, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
            best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
            const float base = best == minus_infinity() ? 0.f : best, kept = exp2_of(top[r] - base);
            top[r] = best;
            sum[r] *= kept;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int c = 2 * r; c < 2 * r + 2; ++c) s[n][c] = exp2_of(s[n][c] - base), sum[r] += s[n][c];
#pragma unroll
            for (int d = 0; d < kDim / 8; ++d) out[d][2 * r] *= kept, out[d][2 * r + 1] *= kept;
        }
        const u16* row = values + (lane % 16) * kRow + lane / 16 * 8;
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) {
            const u32 a[4] = {pack_bf16(s[2 * j][0], s[2 * j][1]), pack_bf16(s[2 * j][2], s[2 * j][3]),
                              pack_bf16(s[2 * j + 1][0], s[2 * j + 1][1]), pack_bf16(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
            for (int d = 0; d < kSteps; ++d) {
                const Quad v = load_matrices_transposed(row + j * 16 * kRow + d * 16);
                mma(out[2 * d], a, v.r[0], v.r[1]);
                mma(out[2 * d + 1], a, v.r[2], v.r[3]);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads)
    prefill_attention(const u16* queries, const u16* key_pool, const u16* value_pool, const int* place, const int* pages,
                      float* split_out, Float2* split_sums, int* arrivals, u16* out, int tokens, float scale, int window,
                      int trigger) {
    extern __shared__ __align__(128) u16 shared[];
    __shared__ bool last_one;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, first = blockIdx.x * kQueries;
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int count = place[0], start = place[1];
    u16 *query = shared, *stages = shared + kQueries * kRow;
    const Pool pool{key_pool, value_pool, pages, head / (OP_Q_HEADS / OP_KV_HEADS), start + count};
    // Of the block's tokens the newest and the oldest say which keys are seen at all.
    const int newest = start + min(first + kQueries, count) - 1;
    const int oldest = window > 0 ? max(0, start + first - window + 1) : 0;
    int tile = oldest / kKeys;
    const int last = first < count ? newest / kKeys : -1;
    const int tiles = last < 0 ? 1 : last - tile + 1;
    const int each = ceil_div(tiles, min(int(gridDim.z), ceil_div(tiles, kLeast)));
    const int splits = ceil_div(tiles, each), split = blockIdx.z;
    if (split >= splits) return;
    tile = last < 0 ? 0 : tile + split * each;
    const int end = last < 0 ? -1 : min(tile + each - 1, last);
    for (int i = threadIdx.x; i < kQueries * kSegments; i += kThreads) {
        const int m = i / kSegments, s = i % kSegments;
        const bool there = first + m < count;
        copy_async(query + m * kRow + s * 8, queries + (u64(there ? first + m : 0) * OP_Q_HEADS + head) * kDim + s * 8, there);
    }
    if (tile <= end) pool.load(stages, tile);
    end_copy_group();

    Rows rows;
    const int position = start + first + warp * 16 + g;
    const u16* a_row = query + (warp * 16 + lane % 16) * kRow + lane / 16 * 8;
    int half = 0;
    for (; tile <= end; ++tile, half ^= 1) {
        if (tile < end) pool.load(stages + (half ^ 1) * 2 * kTile, tile + 1);
        end_copy_group();
        wait_copy_groups<1>();
        __syncthreads();
        const u16* keys = stages + half * 2 * kTile;
        const u16* b_row = keys + (lane / 16 * 8 + lane % 8) * kRow + lane / 8 % 2 * 8;
        float s[kKeys / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const Quad q = load_matrices(a_row + k * 16);
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                const Quad b = load_matrices(b_row + n * 16 * kRow + k * 16);
                mma(s[2 * n], q.r, b.r[0], b.r[1]);
                mma(s[2 * n + 1], q.r, b.r[2], b.r[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int at = tile * kKeys + n * 8 + 2 * t + (c & 1), own = position + c / 2 * 8;
                s[n][c] = at <= own && (window <= 0 || at > own - window) ? s[n][c] * scale : minus_infinity();
            }
        rows.add(s, keys + kTile, lane);
        __syncthreads();
    }
    wait_copy_groups<0>();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows.sum[r] += __shfl_xor_sync(0xFFFFFFFFu, rows.sum[r], 1);
        rows.sum[r] += __shfl_xor_sync(0xFFFFFFFFu, rows.sum[r], 2);
        const int m = first + warp * 16 + g + 8 * r;
        if (m >= tokens) continue;
        if (splits > 1) {
            const u64 at = (u64(split) * tokens + m) * OP_Q_HEADS + head;
            Float2* to = reinterpret_cast<Float2*>(split_out + at * kDim) + t;
#pragma unroll
            for (int d = 0; d < kDim / 8; ++d) to[d * 4] = Float2{rows.out[d][2 * r], rows.out[d][2 * r + 1]};
            if (t == 0) split_sums[at] = Float2{rows.top[r], rows.sum[r]};
            continue;
        }
        const float inverse = m < count ? 1.f / rows.sum[r] : 0.f;  // tokens past the count: zeros
#pragma unroll
        for (int d = 0; d < kDim / 8; ++d)
            *reinterpret_cast<u32*>(out + place_of<kWidth>(head * kDim + d * 8 + 2 * t, m, tokens)) =
                m < count ? pack_bf16(rows.out[d][2 * r] * inverse, rows.out[d][2 * r + 1] * inverse) : 0u;
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = arrivals + blockIdx.x * gridDim.y + head;
        last_one = atomicAdd(counter, 1) == splits - 1;
        if (last_one) *counter = 0;  // ready for the next launch
    }
    __syncthreads();
    if (!last_one) return;
    __threadfence();
    Float2(*part)[kMostSplits] = reinterpret_cast<Float2(*)[kMostSplits]>(shared);  // of a token: maximum or weight, sum
    for (int i = threadIdx.x; i < kQueries * kMostSplits; i += kThreads)
        if (const int m = i / kMostSplits, n = i % kMostSplits; n < splits && first + m < count)
            part[m][n] = load_shared_state(split_sums + (u64(n) * tokens + first + m) * OP_Q_HEADS + head);
    __syncthreads();
    if (const int m = threadIdx.x; m < kQueries && first + m < count) {
        float best = minus_infinity(), sum = 0.f;
        for (int n = 0; n < splits; ++n) best = fmaxf(best, part[m][n].x);
        for (int n = 0; n < splits; ++n) part[m][n].x = exp2_of(part[m][n].x - best), sum += part[m][n].x * part[m][n].y;
        for (int n = 0; n < splits; ++n) part[m][n].x /= sum;
    }
    __syncthreads();
    constexpr int kQuads = kDim / 4, kTogether = 8;  // reads under way of a thread
    for (int i = threadIdx.x; i < kQueries * kQuads; i += kThreads * kTogether) {
        float all[kTogether][4] = {};
        for (int n = 0; n < splits; ++n) {
            Quad v[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int m = (i + j * kThreads) / kQuads, d = (i + j * kThreads) % kQuads * 4;
                if (m < kQueries && first + m < count)
                    v[j] = load_shared_state(static_cast<const void*>(split_out + ((u64(n) * tokens + first + m) * OP_Q_HEADS + head) * kDim + d));
            }
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int m = (i + j * kThreads) / kQuads;
                if (m < kQueries && first + m < count)
#pragma unroll
                    for (int c = 0; c < 4; ++c) all[j][c] += part[m][n].x * __uint_as_float(v[j].r[c]);
            }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int m = (i + j * kThreads) / kQuads, d = head * kDim + (i + j * kThreads) % kQuads * 4;
            if (m >= kQueries || first + m >= tokens) continue;
            *reinterpret_cast<u32*>(out + place_of<kWidth>(d, first + m, tokens)) = pack_bf16(all[j][0], all[j][1]);
            *reinterpret_cast<u32*>(out + place_of<kWidth>(d + 2, first + m, tokens)) = pack_bf16(all[j][2], all[j][3]);
        }
    }
}
