// The end of a step and the start of the next: reads the chosen token, moves the row's state on, tells the host through
// a pinned ring, and lays out the token's embedding as the first layer wants it. `take` lays out a chunk's last token as
// the head wants it. Where the ranks of a split model have looked for a token each in its part of the vocabulary, the best
// of all ranks is the chosen one.
//
// An entry of the ring is (count << 32) | (flags << 24) | token, one 64-bit store; `count` starts at 1, so that an entry
// the host waits for is told from the one that was there before.
#include "chosen.cuh"
#include "embedding.cuh"
#include "exchange.cuh"

constexpr int kThreads = 256;

// Tokens the host put into the state: once before the first step.
extern "C" __global__ void __launch_bounds__(kThreads)
    start(const int* token, const int* position, const u16* table, const float* gain, float* residual, u16* normed,
          float* squares) {
    const int m = blockIdx.x;
    if (position[m] >= 0) embed(table, token[m], Gains<kThreads>(gain), residual, normed, squares, m);
}

// The last of place[0] tokens, float32 [tokens, columns].
extern "C" __global__ void __launch_bounds__(kThreads)
    take(const float* chunk, const int* place, const float* gain, float* residual, u16* normed, float* squares) {
    constexpr int kEach = Gains<kThreads>::kEach;
    const Gains<kThreads> gains(gain);
    const int last = place[0] - 1;
    float row[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int n = threadIdx.x + i * kThreads;
        row[i] = n < OP_COLUMNS && last >= 0 ? chunk[u64(last) * OP_COLUMNS + n] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) lay_out(row[i], threadIdx.x + i * kThreads, gains.of[i], residual, normed, squares, 0);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    advance(u64* best, u32* assured, int* token, int* position, const int* last_position, const int* stops, u32* count, u64* ring,
            int ring_size, const u16* table, const float* gain, float* residual, u16* normed, float* squares,
            const u64* inboxes, u32* counts, int rank, int half, int room, int trigger) {
    __shared__ u64 chosen;
    const int m = blockIdx.x;
    if (trigger == 0) let_next_start();
    const Gains<kThreads> gains(gain);
    int stop[kMaxStops];  // host's, between launches only
#pragma unroll
    for (int i = 0; i < kMaxStops; ++i) stop[i] = stops[m * kMaxStops + i];
    const int last = last_position[m];
    Exchange exchange(inboxes, counts, rank, half, room);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    u64 key = load_shared_state(best + m);
    if constexpr (OP_RANKS > 1) {
        if (threadIdx.x == 0) {
            exchange.begin();
            chosen = exchange.largest(0, key);
            exchange.end();
        }
        __syncthreads();
        key = chosen;
    }
    const int pos = load_shared_state(position + m);
    const u32 n = load_shared_state(count + m) + 1;
    const bool none = !is_finite_score(u32(key >> 32));
    const int id = none ? 0 : int(~u32(key));
    const u32 flags = end_flags(none, id, stop, pos + 1 >= last);
    __syncthreads();  // every thread has read the state
    if (threadIdx.x == 0) {
        best[m] = 0;
        if (assured != nullptr) assured[m] = 0;
        if (pos >= 0) {
            count[m] = n;
            token[m] = id;
            position[m] = flags != 0 ? -1 : pos + 1;
            const u64 entry = (u64(n) << 32) | (flags << 24) | u32(id);
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ring + u64(m) * ring_size + (n - 1) % ring_size),
                         "l"(entry)
                         : "memory");
        }
    }
    if (pos >= 0 && flags == 0) embed(table, id, gains, residual, normed, squares, m);
}
