// Queries, keys and values of tokens that each say where they stand and whose pages they have: heads normed (where the
// model does) and rotated; keys and values go to their pages. A warp has OP_TOGETHER heads.
#include "parts.cuh"
#include "stored.cuh"

constexpr int kThreads = 256, kPage = 16;
constexpr int kHeads = OP_Q_HEADS + 2 * OP_KV_HEADS, kHalf = OP_HEAD_DIM / 2;
constexpr int kEach = ceil_div(kHalf / 2, 32);  // a lane's pairs of each half
static_assert(OP_HEAD_DIM % 4 == 0, "head");

// What a lane has of one head.
struct Head {
    Float2 low[kEach] = {}, high[kEach] = {};

    __device__ __forceinline__ void load(const Parts& parts, u64 row, int head, int lane) {
        const int column = head * OP_HEAD_DIM;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int d = 2 * (lane + 32 * i); d < kHalf) {
                low[i] = parts.pair(row + column + d, column + d);
                high[i] = parts.pair(row + column + kHalf + d, column + kHalf + d);
            }
    }

    __device__ __forceinline__ void norm_and_rotate(const float* gain, const float* cos, float eps, int lane) {
        const float* sin = cos + OP_HEAD_DIM;
        float factor = 1.f;
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
                low[i] = Float2{a.x * cos[d] + b.x * sin[d], a.y * cos[d + 1] + b.y * sin[d + 1]};
                high[i] = Float2{b.x * cos[kHalf + d] + a.x * sin[kHalf + d],
                                 b.y * cos[kHalf + d + 1] + a.y * sin[kHalf + d + 1]};
            }
    }

    __device__ __forceinline__ void store(u16* to, int lane) const {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int d = 2 * (lane + 32 * i); d < kHalf) {
                *reinterpret_cast<u32*>(to + d) = pack_bf16(low[i].x, low[i].y);
                *reinterpret_cast<u32*>(to + kHalf + d) = pack_bf16(high[i].x, high[i].y);
            }
    }

    // As it lies in a page.
    __device__ __forceinline__ void keep(Stored* to, int lane) const {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int d = 2 * (lane + 32 * i); d < kHalf) {
                store_two(to + d, low[i].x, low[i].y);
                store_two(to + kHalf + d, high[i].x, high[i].y);
            }
    }
};

// positions[m] below 0: no token. Its pages are row rows[m] of the page table, row m where `rows` is null.
extern "C" __global__ void __launch_bounds__(kThreads)
    row_heads(const u8* product, const float* bias, int slices, const float* query_gain, const float* key_gain,
              const float* angles, const int* positions, const int* rows, const int* page_table, int table_stride,
              u16* queries, Stored* key_pool, Stored* value_pool, int tokens, float eps, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int first = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * OP_TOGETHER, lane = threadIdx.x % 32, m = blockIdx.y;
    const int position = load_shared_state(positions + m);
    if (first >= kHeads || position < 0) return;
    const Parts parts{product, bias, slices, u64(tokens) * kHeads * OP_HEAD_DIM};
    Head held[OP_TOGETHER];
#pragma unroll
    for (int i = 0; i < OP_TOGETHER; ++i)
        if (first + i < kHeads) held[i].load(parts, u64(m) * kHeads * OP_HEAD_DIM, first + i, lane);
    const int* table = page_table + u64(rows == nullptr ? m : rows[m]) * table_stride;
    const u64 page = u64(load_shared_state(table + position / kPage));
    const float* cos = angles + u64(position) * 2 * OP_HEAD_DIM;
#pragma unroll
    for (int i = 0; i < OP_TOGETHER; ++i) {
        const int head = first + i, kv = (head - OP_Q_HEADS) % OP_KV_HEADS;
        if (head >= kHeads) return;
        const bool is_query = head < OP_Q_HEADS, is_value = head >= OP_Q_HEADS + OP_KV_HEADS;
        if (!is_value) held[i].norm_and_rotate(is_query ? query_gain : key_gain, cos, eps, lane);
        const u64 place = ((page * OP_KV_HEADS + kv) * kPage + position % kPage) * OP_HEAD_DIM;
        if (is_query)
            held[i].store(queries + (u64(m) * OP_Q_HEADS + head) * OP_HEAD_DIM, lane);
        else
            held[i].keep((is_value ? value_pool : key_pool) + place, lane);
    }
}
