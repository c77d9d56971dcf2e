// x = its sum over all ranks: pairs of bf16, or float32, a word each. A block has `room` words of x.
#include "exchange.cuh"

constexpr int kThreads = 256;
constexpr int kEach = 4;  // words of a thread that are waited for together

extern "C" __global__ void __launch_bounds__(kThreads)
    exchange_sum(u32* x, int words, const u64* inboxes, u32* counts, int rank, int half, int room, int trigger) {
    if (trigger == 0) let_next_start();
    Exchange exchange(inboxes, counts, rank, half, room);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    exchange.begin();
    const int start = blockIdx.x * room, left = words - start < room ? words - start : room;
    u32* own = x + start;
    for (int i = threadIdx.x; i < left; i += kThreads) exchange.send(i, load_shared_state(own + i));
    for (int first = threadIdx.x; first < left; first += kThreads * kEach) {
        u32 word[kEach];
        auto slot = [&](int i) { return first + i * kThreads; };
        auto has = [&](int i) { return slot(i) < left; };
#pragma unroll
        for (int i = 0; i < kEach; ++i) word[i] = has(i) ? load_shared_state(own + slot(i)) : 0u;
        if constexpr (OP_PAIRS) {
            Float2 all[kEach];
            exchange.sum_pairs<1>(slot, has, word, all);
#pragma unroll
            for (int i = 0; i < kEach; ++i) word[i] = pack_bf16(all[i].x, all[i].y);
        } else {
            float all[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) all[i] = __uint_as_float(word[i]);
            exchange.sum(slot, has, all);
#pragma unroll
            for (int i = 0; i < kEach; ++i) word[i] = __float_as_uint(all[i]);
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (has(i)) own[slot(i)] = word[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) exchange.end();
}
