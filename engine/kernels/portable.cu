// What stands between the products of a step of many rows, for every family of models: norms before and behind attention
// and MLP, norms of heads or of all heads as one, any gate, any size of head, bf16 or f16 (OP_F16). Rows at position -1
// are idle: they write no page, and nobody reads what else becomes of them.
#include "stored.cuh"

constexpr int kJoinThreads = 512, kThreads = 256, kWarps = kThreads / 32, kPage = 16;
constexpr int kEach = ceil_div(OP_COLUMNS, 2 * kJoinThreads);  // pairs of a thread of `join`
constexpr int kDim = OP_HEAD_DIM, kHalf = kDim / 2, kHeads = OP_Q_HEADS + 2 * OP_KV_HEADS;
constexpr int kPairs = ceil_div(kHalf / 2, 32), kOwn = ceil_div(kHalf, 32);  // of half a head, of a whole one; a lane's
constexpr int kOfHeads = 1, kOfAll = 2;                                     // OP_NORM
static_assert(OP_COLUMNS % 2 == 0 && kDim % 8 == 0 && kDim <= 256 && OP_INNER % 2 == 0, "sizes");

__device__ __forceinline__ Float2 unpack(u32 both) {
    return Float2{operand_to_float(u16(both)), operand_to_float(u16(both >> 16))};
}
__device__ __forceinline__ Float2 load_two(const u16* p) { return unpack(load_shared_state(reinterpret_cast<const u32*>(p))); }

// ---- the residual stream -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float block_sum(float v) {
    __shared__ float of_warp[kJoinThreads / 32];
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kJoinThreads / 32; ++w) sum += of_warp[w];
    __syncthreads();
    return sum;
}

__device__ __forceinline__ void scale_by_norm(Float2 (&v)[kEach], const float* gain, float eps) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += v[i].x * v[i].x + v[i].y * v[i].y;
    const float factor = rsqrtf(block_sum(squares) / OP_COLUMNS + eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (const int n = 2 * (threadIdx.x + i * kJoinThreads); n < OP_COLUMNS)
            v[i] = Float2{v[i].x * factor * gain[n], v[i].y * factor * gain[n + 1]};
}

// stream += fresh, or its norm where there is a gain for it; x = the norm of the stream, or the stream itself where there
// is no gain. Without `fresh` nothing is added. A block a row.
extern "C" __global__ void __launch_bounds__(kJoinThreads)
    join(const u16* fresh, const float* fresh_gain, const float* gain, float* stream, u16* x, float eps, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const u64 row = u64(blockIdx.x) * OP_COLUMNS;
    Float2 v[kEach] = {}, more[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (const int n = 2 * (threadIdx.x + i * kJoinThreads); n < OP_COLUMNS) {
            v[i] = load_shared_state(reinterpret_cast<const Float2*>(stream + row + n));
            if (fresh != nullptr) more[i] = load_two(fresh + row + n);
        }
    if (fresh != nullptr) {
        if (fresh_gain != nullptr) scale_by_norm(more, fresh_gain, eps);
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int n = 2 * (threadIdx.x + i * kJoinThreads); n < OP_COLUMNS) {
                v[i] = Float2{v[i].x + more[i].x, v[i].y + more[i].y};
                *reinterpret_cast<Float2*>(stream + row + n) = v[i];
            }
    }
    if (gain != nullptr) scale_by_norm(v, gain, eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (const int n = 2 * (threadIdx.x + i * kJoinThreads); n < OP_COLUMNS)
            *reinterpret_cast<u32*>(x + row + n) = pack_operands(v[i].x, v[i].y);
}

// ---- heads -------------------------------------------------------------------------------------------------------------

// The factor of the norm over `count` values, by one warp.
__device__ __forceinline__ float norm_factor(const u16* from, int count, float eps) {
    float squares = 0.f;
    for (int d = 2 * (threadIdx.x % 32); d < count; d += 64) {
        const Float2 v = load_two(from + d);
        squares += v.x * v.x + v.y * v.y;
    }
    return rsqrtf(warp_sum(squares) / float(count) + eps);
}

// Norms (where the model does) and rotates queries and keys of qkv [rows, kHeads, kDim]; keys and values go to the pages,
// queries [rows, OP_Q_HEADS, kDim] to memory of their own. gains [queries and keys, kDim]. A warp a head.
extern "C" __global__ void __launch_bounds__(kThreads)
    heads(const u16* qkv, const float* gains, const float* angles, const int* positions, const int* page_table,
          int table_stride, u16* queries, Stored* key_pool, Stored* value_pool, float eps, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int head = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32, m = blockIdx.y;
    const int position = load_shared_state(positions + m);
    if (head >= kHeads || position < 0) return;
    const bool is_query = head < OP_Q_HEADS, is_value = head >= OP_Q_HEADS + OP_KV_HEADS;
    const u16 *row = qkv + u64(m) * kHeads * kDim, *from = row + head * kDim;
    Float2 low[kPairs] = {}, high[kPairs] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
        if (const int d = 2 * (lane + 32 * i); d < kHalf) low[i] = load_two(from + d), high[i] = load_two(from + kHalf + d);
    if (!is_value) {
        float factor = 1.f;
        if constexpr (OP_NORM == kOfHeads) factor = norm_factor(from, kDim, eps);
        if constexpr (OP_NORM == kOfAll)
            factor = is_query ? norm_factor(row, OP_Q_HEADS * kDim, eps)
                              : norm_factor(row + OP_Q_HEADS * kDim, OP_KV_HEADS * kDim, eps);
        const float *cos = angles + u64(position) * 2 * kDim, *sin = cos + kDim, *gain = gains + head * kDim;
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            if (const int d = 2 * (lane + 32 * i); d < kHalf) {
                Float2 a = low[i], b = high[i];
                if constexpr (OP_NORM != 0) {
                    a = Float2{a.x * factor * gain[d], a.y * factor * gain[d + 1]};
                    b = Float2{b.x * factor * gain[kHalf + d], b.y * factor * gain[kHalf + d + 1]};
                }
                low[i] = Float2{a.x * cos[d] + b.x * sin[d], a.y * cos[d + 1] + b.y * sin[d + 1]};
                high[i] = Float2{b.x * cos[kHalf + d] + a.x * sin[kHalf + d],
                                 b.y * cos[kHalf + d + 1] + a.y * sin[kHalf + d + 1]};
            }
    }
    const u64 page = u64(load_shared_state(page_table + u64(m) * table_stride + position / kPage));
    const int kv = (head - OP_Q_HEADS) % OP_KV_HEADS;
    Stored* kept = (is_value ? value_pool : key_pool) + ((page * OP_KV_HEADS + kv) * kPage + position % kPage) * kDim;
    u16* own = queries + (u64(m) * OP_Q_HEADS + head) * kDim;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
        if (const int d = 2 * (lane + 32 * i); d < kHalf) {
            if (is_query) {
                *reinterpret_cast<u32*>(own + d) = pack_operands(low[i].x, low[i].y);
                *reinterpret_cast<u32*>(own + kHalf + d) = pack_operands(high[i].x, high[i].y);
            } else {
                store_two(kept + d, low[i].x, low[i].y);
                store_two(kept + kHalf + d, high[i].x, high[i].y);
            }
        }
}

// ---- attention, for heads that `batch_attention` does not know -----------------------------------------------------------

// Value i of the four in these words.
__device__ __forceinline__ float value_of(const u32 (&w)[kKvBytes], int i) {
    if constexpr (kKvBytes == 2) return stored_to_float(Stored(w[i / 2] >> i % 2 * 16));
    return stored_to_float(Stored(w[0] >> i * 8));
}

// softmax(queries · keys) · values of one row's query head by a block, whose warps take pages in turn. lengths [rows]:
// tokens of the context; 0 is a row that is left alone.
extern "C" __global__ void __launch_bounds__(kThreads)
    attend(const u16* queries, const Stored* key_pool, const Stored* value_pool, const int* page_table, int table_stride,
           const int* lengths, u16* out, float scale, int window, int trigger) {
    __shared__ float query[kDim], outs[kWarps][kDim], tops[kWarps], sums[kWarps];
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int head = blockIdx.x, m = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int length = load_shared_state(lengths + m);
    if (length <= 0) return;
    const u64 at = (u64(m) * OP_Q_HEADS + head) * kDim;
    for (int d = threadIdx.x; d < kHalf; d += kThreads) {
        const Float2 v = load_two(queries + at + 2 * d);
        query[2 * d] = v.x * scale, query[2 * d + 1] = v.y * scale;
    }
    __syncthreads();
    const int oldest = window > 0 ? max(length - window, 0) : 0, kv = head / (OP_Q_HEADS / OP_KV_HEADS);
    const int* table = page_table + u64(m) * table_stride;
    float top = minus_infinity(), sum = 0.f;
    Float2 found[kOwn] = {};
    for (int page = oldest / kPage + warp; page < ceil_div(length, kPage); page += kWarps) {
        const u64 place = (u64(load_shared_state(table + page)) * OP_KV_HEADS + kv) * kPage * kDim;
        const int part = lane / 16 * kHalf, token = page * kPage + lane % 16;  // a lane has half a key
        const Stored* key = key_pool + place + lane % 16 * kDim + part;
        float score = 0.f;
#pragma unroll 8
        for (int d = 0; d < kHalf; d += 4) {
            u32 words[kKvBytes];
            load_words(words, key + d);
#pragma unroll
            for (int i = 0; i < 4; ++i) score += query[part + d + i] * value_of(words, i);
        }
        score += __shfl_xor_sync(0xFFFFFFFFu, score, 16);
        if (token < oldest || token >= length) score = minus_infinity();
        float best = score;
#pragma unroll
        for (int d = 8; d > 0; d >>= 1) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, d));
        best = fmaxf(top, best);  // some token of every page is seen
        const float kept = exp2f(top - best), share = exp2f(score - best);
        sum = sum * kept + share;
        top = best;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) found[i] = Float2{found[i].x * kept, found[i].y * kept};
        const int seen = min(kPage, length - page * kPage);  // what lies past the context may be anything, even NaN
        for (int t = 0; t < seen; ++t) {
            const float weight = __shfl_sync(0xFFFFFFFFu, share, t);
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (const int d = 2 * (lane + 32 * i); d < kDim) {
                    const Stored* value = value_pool + place + t * kDim + d;
                    found[i].x += weight * stored_to_float(value[0]);
                    found[i].y += weight * stored_to_float(value[1]);
                }
        }
    }
#pragma unroll
    for (int d = 8; d > 0; d >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, d);
    if (lane == 0) tops[warp] = top, sums[warp] = sum;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (const int d = 2 * (lane + 32 * i); d < kDim) outs[warp][d] = found[i].x, outs[warp][d + 1] = found[i].y;
    __syncthreads();
    float best = minus_infinity(), all = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) best = fmaxf(best, tops[w]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += sums[w] * exp2f(tops[w] - best);
    for (int d = 2 * threadIdx.x; d < kDim; d += 2 * kThreads) {
        Float2 v = {0.f, 0.f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float f = exp2f(tops[w] - best) / all;
            v.x += f * outs[w][d], v.y += f * outs[w][d + 1];
        }
        *reinterpret_cast<u32*>(out + at + d) = pack_operands(v.x, v.y);
    }
}

// ---- the MLP -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float gated(float gate, float up) {
    if constexpr (OP_GELU) {
        const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.f + tanhf(inner)) * up;
    }
    return __fdividef(gate, 1.f + __expf(-gate)) * up;
}

// out [rows, OP_INNER] = activation(gate) · up of product [rows, 2 · OP_INNER], gates then ups.
extern "C" __global__ void __launch_bounds__(kThreads) gate(const u16* product, u16* out, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int n = 2 * (blockIdx.x * kThreads + threadIdx.x);
    if (n >= OP_INNER) return;
    const u16* row = product + u64(blockIdx.y) * 2 * OP_INNER;
    const Float2 g = load_two(row + n), u = load_two(row + OP_INNER + n);
    *reinterpret_cast<u32*>(out + u64(blockIdx.y) * OP_INNER + n) = pack_operands(gated(g.x, u.x), gated(g.y, u.y));
}
