// Queries, keys and values of tokens that each say where they stand and whose pages they have: heads normed (where the
// model does) and rotated; keys and values go to their pages. A warp a head.
#include "parts.cuh"

constexpr int kThreads = 256, kPage = 16;
constexpr int kHeads = OP_Q_HEADS + 2 * OP_KV_HEADS, kHalf = OP_HEAD_DIM / 2;
constexpr int kEach = ceil_div(kHalf / 2, 32);  // a lane's pairs of each half
static_assert(OP_HEAD_DIM % 4 == 0, "head");

// Head `head` of token m, which stands at `position`; `page` is the page of that position.
__device__ __forceinline__ void place_head(const Parts& parts, const float* query_gain, const float* key_gain,
                                           const float* angles, int position, u64 page, u16* queries, u16* key_pool,
                                           u16* value_pool, float eps, int m, int head, int lane) {
    const bool is_query = head < OP_Q_HEADS, is_value = head >= OP_Q_HEADS + OP_KV_HEADS;
    const int column = head * OP_HEAD_DIM;
    const u64 row = u64(m) * kHeads * OP_HEAD_DIM;
    Float2 low[kEach] = {}, high[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (const int d = 2 * (lane + 32 * i); d < kHalf) {
            low[i] = parts.pair(row + column + d, column + d);
            high[i] = parts.pair(row + column + kHalf + d, column + kHalf + d);
        }
    if (!is_value) {
        float factor = 1.f;
        const float* gain = is_query ? query_gain : key_gain;
        if constexpr (OP_QK_NORM) {
            float squares = 0.f;
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                squares += low[i].x * low[i].x + low[i].y * low[i].y + high[i].x * high[i].x + high[i].y * high[i].y;
            factor = rsqrtf(warp_sum(squares) / OP_HEAD_DIM + eps);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int d = 2 * (lane + 32 * i); d < kHalf) {
                Float2 a = low[i], b = high[i];
                if constexpr (OP_QK_NORM) {
                    a = Float2{a.x * factor * gain[d], a.y * factor * gain[d + 1]};
                    b = Float2{b.x * factor * gain[kHalf + d], b.y * factor * gain[kHalf + d + 1]};
                }
                const float *cos = angles + u64(position) * 2 * OP_HEAD_DIM + d, *sin = cos + OP_HEAD_DIM;
                low[i] = Float2{a.x * cos[0] + b.x * sin[0], a.y * cos[1] + b.y * sin[1]};
                high[i] = Float2{b.x * cos[kHalf] + a.x * sin[kHalf], b.y * cos[kHalf + 1] + a.y * sin[kHalf + 1]};
            }
    }
    u16* to;
    if (is_query) {
        to = queries + (u64(m) * OP_Q_HEADS + head) * OP_HEAD_DIM;
    } else {
        const int kv = head - OP_Q_HEADS - (is_value ? OP_KV_HEADS : 0);
        to = (is_value ? value_pool : key_pool) + ((page * OP_KV_HEADS + kv) * kPage + position % kPage) * OP_HEAD_DIM;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (const int d = 2 * (lane + 32 * i); d < kHalf) {
            *reinterpret_cast<u32*>(to + d) = pack_bf16(low[i].x, low[i].y);
            *reinterpret_cast<u32*>(to + kHalf + d) = pack_bf16(high[i].x, high[i].y);
        }
}

// positions[m] below 0: no token. Its pages are row rows[m] of the page table, row m where `rows` is null.
extern "C" __global__ void __launch_bounds__(kThreads)
    row_heads(const u8* product, const float* bias, int slices, const float* query_gain, const float* key_gain,
              const float* angles, const int* positions, const int* rows, const int* page_table, int table_stride,
              u16* queries, u16* key_pool, u16* value_pool, int tokens, float eps, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int head = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, m = blockIdx.y;
    const int position = load_shared_state(positions + m);
    if (head >= kHeads || position < 0) return;
    const Parts parts{product, bias, slices, u64(tokens) * kHeads * OP_HEAD_DIM};
    const int* table = page_table + u64(rows == nullptr ? m : rows[m]) * table_stride;
    place_head(parts, query_gain, key_gain, angles, position, u64(load_shared_state(table + position / kPage)), queries,
               key_pool, value_pool, eps, m, head, lane);
}
