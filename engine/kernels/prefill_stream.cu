// The residual stream of a chunk of tokens: embedded, or moved on by a product, and normed for the product that follows.
// A block a token.
#include "exchange.cuh"
#include "order.cuh"
#include "parts.cuh"

constexpr int kThreads = 256;
constexpr int kEach = ceil_div(OP_COLUMNS, 2 * kThreads);  // pairs of a thread
constexpr int kFours = ceil_div(kEach, 4);
static_assert(OP_COLUMNS % 8 == 0, "columns");

// A thread's of the norm: weights, so they are asked for before the launch waits.
struct Gains {
    Float2 of[kEach] = {};

    __device__ __forceinline__ explicit Gains(const float* gain) {
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int n = 2 * (threadIdx.x + i * kThreads); n < OP_COLUMNS)
                of[i] = *reinterpret_cast<const Float2*>(gain + n);
    }
};

__device__ __forceinline__ void norm(const Float2 (&v)[kEach], const Gains& gains, float eps, u16* x) {
    __shared__ float of_warp[kThreads / 32];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares += v[i].x * v[i].x + v[i].y * v[i].y;
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) sum += of_warp[w];
    const float factor = rsqrtf(sum / OP_COLUMNS + eps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int n = 2 * (threadIdx.x + i * kThreads);
        if (n < OP_COLUMNS)
            *reinterpret_cast<u32*>(x + place_of<OP_COLUMNS>(n, blockIdx.x, gridDim.x)) =
                pack_bf16(v[i].x * factor * gains.of[i].x, v[i].y * factor * gains.of[i].y);
    }
}

// Tokens past the count are fed as token 0: nobody reads what becomes of them.
extern "C" __global__ void __launch_bounds__(kThreads)
    embed(const int* place, const int* tokens, const u16* table, const float* gain, float* residual, u16* x, float eps,
          int trigger) {
    if (trigger == 0) let_next_start();
    const Gains gains(gain);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int m = blockIdx.x, token = m < place[0] ? tokens[m] : 0;
    u32 row[kEach];  // all of it is asked for before any is stored: a load would wait for the stores before it
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int n = 2 * (threadIdx.x + i * kThreads);
        row[i] = n < OP_COLUMNS ? *reinterpret_cast<const u32*>(table + u64(token) * OP_COLUMNS + n) : 0u;
    }
    Float2 v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int n = 2 * (threadIdx.x + i * kThreads);
        v[i] = Float2{embedding_value(u16(row[i])), embedding_value(u16(row[i] >> 16))};
        if (n < OP_COLUMNS) *reinterpret_cast<Float2*>(residual + u64(m) * OP_COLUMNS + n) = v[i];
    }
    norm(v, gains, eps, x);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm(const u8* product, const float* bias, int slices, const float* gain, float* residual, u16* x, float eps,
             const u64* inboxes, u32* counts, int rank, int half, int room, int trigger) {
    if (trigger == 0) let_next_start();
    const Gains gains(gain);
    Exchange exchange(inboxes, counts, rank, half, room);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int m = blockIdx.x;
    const Parts parts{product, bias, slices, u64(gridDim.x) * OP_COLUMNS};
    const int column = 2 * threadIdx.x;
    const u64 row = u64(m) * OP_COLUMNS;
    Float2* kept = reinterpret_cast<Float2*>(residual + row) + threadIdx.x;
    Float2 v[kEach] = {};
    auto has = [&](int i) { return column + i * 2 * kThreads < OP_COLUMNS; };
    exchange.begin();
    auto slot = [&](int i) { return 4 * (int(threadIdx.x) + i * kThreads); };
    u32 own[4 * kFours] = {};  // of a split model: this rank's part of the sum, which all ranks round alike
    if constexpr (OP_RANKS > 1) {
        parts.pairs<kEach>(v, row + column, column, 2 * kThreads, OP_COLUMNS);
#pragma unroll
        for (int i = 0; i < kEach; ++i) own[i] = pack_bf16(v[i].x, v[i].y);
#pragma unroll
        for (int i = 0; i < kFours; ++i) exchange.send_four(slot(i), own + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (has(i)) v[i] = load_shared_state(kept + i * kThreads);
    if constexpr (OP_RANKS > 1) {
        Float2 all[4 * kFours];
        exchange.sum_pairs<4>(slot, [](int) { return true; }, own, all);
#pragma unroll
        for (int i = 0; i < kEach; ++i) v[i].x += all[i].x, v[i].y += all[i].y;
    } else {
        parts.pairs<kEach>(v, row + column, column, 2 * kThreads, OP_COLUMNS);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (has(i)) kept[i * kThreads] = v[i];
    norm(v, gains, eps, x);
    if (OP_RANKS > 1 && threadIdx.x == 0) exchange.end();
}
