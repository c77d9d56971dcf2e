// A token's embedding laid out as the first layer wants it: the residual stream, its norm's product with the gain, and the
// sums of squares of each eight columns. By a whole block.
#pragma once
#include "common.cuh"

static_assert(OP_COLUMNS % 8 == 0, "columns");

template <int THREADS>
struct Gains {
    static constexpr int kEach = ceil_div(OP_COLUMNS, THREADS);
    float of[kEach];
    __device__ __forceinline__ explicit Gains(const float* gain) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int n = threadIdx.x + i * THREADS;
            of[i] = n < OP_COLUMNS ? gain[n] : 0.f;
        }
    }
};

// One value of the residual stream and what the next norm needs of it; by all threads, those past the last column too.
__device__ __forceinline__ void lay_out(float v, int n, float gain, float* residual, u16* normed, float* squares, int m) {
    float square = v * v;
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) square += __shfl_xor_sync(0xFFFFFFFFu, square, d);
    if (n < OP_COLUMNS) {
        residual[u64(m) * OP_COLUMNS + n] = v;
        normed[u64(m) * OP_COLUMNS + n] = to_bf16(v * gain);
        if (n % 8 == 0) squares[m * (OP_COLUMNS / 8) + n / 8] = square;
    }
}

// All of a thread's values are asked for before any is laid out: a load would wait for the stores before it.
template <int THREADS>
__device__ __forceinline__ void embed(const u16* table, int token, const Gains<THREADS>& gain, float* residual, u16* normed,
                                      float* squares, int m) {
    constexpr int kEach = Gains<THREADS>::kEach;
    u16 row[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int n = threadIdx.x + i * THREADS;
        row[i] = n < OP_COLUMNS ? table[u64(token) * OP_COLUMNS + n] : u16(0);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        lay_out(embedding_value(row[i]), threadIdx.x + i * THREADS, gain.of[i], residual, normed, squares, m);
}
