// Rows of one sequence in one launch: of each OP_GROUP rows, row i holds the token that follows row i - 1's. Its keys and
// values are on their way to the pages in this same launch, so whoever needs them makes them anew, bit for bit as they
// are stored, and puts them in place of what it has read of the page. All other arithmetic is that of a row alone.
#pragma once
#include "attention.cuh"

template <int MOST>  // rows of the sequence before the last one
struct Beside {
    alignas(16) Stored keys[MOST][OP_HEAD_DIM];
    alignas(16) Stored values[MOST][OP_HEAD_DIM];

    // Of the `count` rows before this one, which stand at [first, first + count). `rows`: the first one's queries, keys and
    // values. By all warps, the last one first: it has the fewest queries.
    __device__ __forceinline__ void make(const float* rows, int count, int first, int kv, const float* angles,
                                         const float* key_gain, float eps, int warp, int lane) {
        for (int task = OP_WARPS - 1 - warp; task < 2 * count; task += OP_WARPS) {
            const int i = task / 2;
            const bool is_key = task % 2 == 0;
            HeadVector x;
            x.load(rows + u64(i) * kRows + (OP_Q_HEADS + (is_key ? 0 : OP_KV_HEADS) + kv) * OP_HEAD_DIM, lane);
            if (is_key) {
                if constexpr (OP_QK_NORM) {
                    HeadVector gain;
                    gain.load(key_gain, lane);
                    x.norm(gain, eps);
                }
                Float2 turn[kRotated];
                load_turn(turn, angles, first + i, lane);
                x.rotate(turn);
            }
            x.keep(is_key ? keys[i] : values[i], lane);
        }
    }
    __device__ __forceinline__ bool holds(int at, int first, int pos) const { return at >= first && at < pos; }
    __device__ __forceinline__ void replace_keys(Eight (&k)[kSpans][2], int page, int first, int pos, int g, int t) const {
        if (page * kPage + kPage <= first) return;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (const int at = page * kPage + token_at(g + 8 * i); holds(at, first, pos))
#pragma unroll
                for (int j = 0; j < kSpans; ++j)
                    k[j][i] = *reinterpret_cast<const Eight*>(&keys[at - first][32 * j + 8 * t]);
    }
    __device__ __forceinline__ void replace_values(VTile (&v)[kBlocks], int page, int first, int pos, int g, int t) const {
        if (page * kPage + kPage <= first) return;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (const int at = page * kPage + tile_token(t, i); holds(at, first, pos))
#pragma unroll
                for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                    for (int p = 0; p < kWords; ++p)
                        v[b].w[i][p] = *reinterpret_cast<const u32*>(
                            &values[at - first][b * kBlock + g * kDims + 4 / kKvBytes * p]);
    }
};

template <>
struct Beside<0> {  // every row is a sequence of its own
    __device__ __forceinline__ void make(const float*, int, int, int, const float*, const float*, float, int, int) {}
    __device__ __forceinline__ void replace_keys(Eight (&)[kSpans][2], int, int, int, int, int) const {}
    __device__ __forceinline__ void replace_values(VTile (&)[kBlocks], int, int, int, int, int) const {}
};
