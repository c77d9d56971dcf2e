// x = its sum over all ranks: pairs of bf16, or float32, a word each. A block has `room` words of x.
#include "exchange.cuh"

extern "C" __global__ void __launch_bounds__(256)
    exchange_sum(u32* x, int words, const u64* inboxes, u32* counts, int rank, int half, int room, int trigger) {
    if (trigger == 0) let_next_start();
    Exchange exchange(inboxes, counts, rank, half, room);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    exchange.begin();
    const int first = blockIdx.x * room, left = words - first < room ? words - first : room;
    for (int i = threadIdx.x; i < left; i += blockDim.x) exchange.send(i, load_shared_state(x + first + i));
    for (int i = threadIdx.x; i < left; i += blockDim.x) {
        const u32 own = load_shared_state(x + first + i);
        if constexpr (OP_PAIRS) {
            const Float2 all = exchange.sum_pairs(i, own);
            x[first + i] = pack_bf16(all.x, all.y);
        } else {
            x[first + i] = __float_as_uint(exchange.sum(i, __uint_as_float(own)));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) exchange.end();
}
