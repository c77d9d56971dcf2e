// Of the last layer's tokens those are computed on whose hidden state somebody reads: the last of each chunk, whose
// residual and queries are copied side by side here. A block a chunk.
#include "common.cuh"

constexpr int kThreads = 256;
static_assert(OP_COLUMNS % 4 == 0 && OP_QUERIES % 8 == 0, "rows of 16 bytes");

// A row of BYTES bytes.
template <int BYTES>
__device__ __forceinline__ void copy_row(const u8* from, u8* to) {
#pragma unroll
    for (int i = threadIdx.x * 16; i < BYTES; i += kThreads * 16)
        *reinterpret_cast<Quad*>(to + i) = load_shared_state(static_cast<const void*>(from + i));
}

// chunks [blocks][4]: first token, count, and what does not matter here. A chunk of no tokens is left alone.
extern "C" __global__ void __launch_bounds__(kThreads)
    keep_ends(const int* chunks, const u8* residual, const u8* queries, u8* kept_residual, u8* kept_queries, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int m = blockIdx.x, count = load_shared_state(chunks + 4 * m + 1);
    if (count == 0) return;
    const u64 token = load_shared_state(chunks + 4 * m) + count - 1;
    copy_row<OP_COLUMNS * 4>(residual + token * OP_COLUMNS * 4, kept_residual + u64(m) * OP_COLUMNS * 4);
    copy_row<OP_QUERIES * 2>(queries + token * OP_QUERIES * 2, kept_queries + u64(m) * OP_QUERIES * 2);
}
