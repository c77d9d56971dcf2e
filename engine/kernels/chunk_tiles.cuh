// What the kernels of attention over chunks share: which tokens a block has, and how the parts of a long context that
// several blocks had are put together. Of the includer: kQueries tokens of a block, kThreads that put together.
//
// A pass has chunks of {first token in the pass, count, position of the first, row of the page table}; a count of 0 is none.
#pragma once
#include "copies.cuh"
#include "order.cuh"
#include "stored.cuh"

constexpr int kPage = 16, kDim = OP_HEAD_DIM, kWidth = OP_Q_HEADS * kDim;
constexpr int kMostSplits = 16, kLeastKeys = 512;  // parts of a context; keys of one

__device__ __forceinline__ float exp2_of(float v) {
    float f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(v));
    return f;
}

struct Tokens {
    int offset, count, start;  // the chunk's first token in the pass, its tokens, the position of the first
    int first;                 // the tile's first, in the chunk
    const int* pages;
};

// A pass's chunks in tiles of kQueries tokens; every warp reads them for itself. A lane holds the chunk of its number.
template <int kQueries>
struct Table {
    const Quad* where;
    int chunks, tiles = 0;  // of the pass; tiles that have tokens
    Quad front = {};        // the lane's of the first 32

    __device__ __forceinline__ Table(const Quad* where, int chunks) : where(where), chunks(chunks) {
        front = chunk(0);
        for (int base = 0; base < chunks; base += 32)
            tiles += int(__reduce_add_sync(0xFFFFFFFFu, u32(ceil_div(int((base ? chunk(base) : front).r[1]), kQueries))));
    }

    __device__ __forceinline__ Quad chunk(int base) const {
        const int n = base + threadIdx.x % 32;
        return n < chunks ? load_shared_state(static_cast<const void*>(where + n)) : Quad{};
    }

    // The tokens of one of the tiles.
    __device__ __forceinline__ Tokens find(const int* page_table, int table_stride, int tile) const {
        const int lane = threadIdx.x % 32;
        Tokens found{0, 0, 0, 0, page_table};
        int before = 0;
        for (int base = 0; base < chunks; base += 32) {
            const Quad own = base ? chunk(base) : front;
            const int mine = ceil_div(int(own.r[1]), kQueries);
            int upto = mine;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                const int other = __shfl_up_sync(0xFFFFFFFFu, upto, d);
                if (lane >= d) upto += other;
            }
            const int within = tile - before - (upto - mine);
            const u32 here = __ballot_sync(0xFFFFFFFFu, within >= 0 && within < mine);
            if (here != 0) {
                const int source = __ffs(int(here)) - 1;
                found.offset = __shfl_sync(0xFFFFFFFFu, int(own.r[0]), source);
                found.count = __shfl_sync(0xFFFFFFFFu, int(own.r[1]), source);
                found.start = __shfl_sync(0xFFFFFFFFu, int(own.r[2]), source);
                found.pages = page_table + u64(__shfl_sync(0xFFFFFFFFu, int(own.r[3]), source)) * table_stride;
                found.first = __shfl_sync(0xFFFFFFFFu, within, source) * kQueries;
                return found;
            }
            before += __shfl_sync(0xFFFFFFFFu, upto, 31);
        }
        return found;
    }
};

// The keys of a block, in tiles of kKeys: those of one part of what its tokens see.
struct Keys {
    int tile, end;  // the first, and the last
    int splits;     // parts

    // `most`: parts at most. False where the block has no part.
    template <int kQueries, int kKeys>
    __device__ __forceinline__ bool divide(const Tokens& own, int window, int most, int split) {
        const int newest = own.start + min(own.first + kQueries, own.count) - 1;
        const int oldest = window > 0 ? max(0, own.start + own.first - window + 1) : 0;
        tile = oldest / kKeys;
        const int last = newest / kKeys, tiles = last - tile + 1;
        const int each = ceil_div(tiles, min(most, ceil_div(tiles, kLeastKeys / kKeys)));
        splits = ceil_div(tiles, each);
        tile += split * each;
        end = min(tile + each - 1, last);
        return split < splits;
    }
};

// Into how many parts a context is divided at most, of `most`, so that the pass has no more than `most_blocks` of them.
__device__ __forceinline__ int most_parts(int tiles, int most, int most_blocks) {
    return min(most, max(1, most_blocks / max(1, tiles * OP_Q_HEADS)));
}

// Whether the caller is the last of the blocks that share a context; the counter is then ready for the next launch.
__device__ __forceinline__ bool is_last(int* counter, int splits) {
    if (atomicAdd(counter, 1) != splits - 1) return false;
    *counter = 0;
    return true;
}

// What a thread holds of softmax(scores)·V: rows g and g + 8 of a warp's sixteen tokens, columns 2t and 2t + 1 of every eight.
struct Rows {
    float out[kDim / 2] = {};  // eight columns: two of row g, two of row g + 8
    float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {};

    // Scores of kKeys keys, in units of which `scale` makes exponents of two; masked ones at minus infinity. They become
    // weights, and `kept` what the sums so far are to be multiplied by.
    template <int kKeys>
    __device__ __forceinline__ void weigh(float (&s)[kKeys / 2], float scale, float (&kept)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float best = top[r];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) best = fmaxf(best, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
            best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 1));
            best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, 2));
            const float base = best == minus_infinity() ? 0.f : best * scale;
            kept[r] = exp2_of(top[r] * scale - base);
            top[r] = best;
            sum[r] *= kept[r];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int c = 4 * n + 2 * r; c < 4 * n + 2 * r + 2; ++c) s[c] = exp2_of(fmaf(s[c], scale, -base)), sum[r] += s[c];
        }
    }
    __device__ __forceinline__ void keep(const float (&kept)[2]) {
#pragma unroll
        for (int n = 0; n < kDim / 2; ++n) out[n] *= kept[n / 2 % 2];
    }

    // Of tokens m and m + 8 of the chunk: the result, or a part of it.
    __device__ __forceinline__ void leave(const Tokens& own, int first, int head, int splits, int split, int tokens, float scale,
                                          float* split_out, Float2* split_sums, u16* result) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
            sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
            const int m = first + 8 * r;
            if (m >= own.count) continue;
            if (splits > 1) {
                const u64 at = (u64(split) * tokens + own.offset + m) * OP_Q_HEADS + head;
                Float2* to = reinterpret_cast<Float2*>(split_out + at * kDim) + t;
#pragma unroll
                for (int d = 0; d < kDim / 8; ++d) to[d * 4] = Float2{out[4 * d + 2 * r], out[4 * d + 2 * r + 1]};
                if (t == 0) split_sums[at] = Float2{top[r] * scale, sum[r]};
                continue;
            }
            const float inverse = 1.f / sum[r];
#pragma unroll
            for (int d = 0; d < kDim / 8; ++d)
                *reinterpret_cast<u32*>(result + place_of<kWidth>(head * kDim + d * 8 + 2 * t, own.offset + m, tokens)) =
                    pack_bf16(out[4 * d + 2 * r] * inverse, out[4 * d + 2 * r + 1] * inverse);
        }
    }
};

// Masks the scores of keys from `key0` on, for tokens at `position` and 8 after: what is newer, or older than the window.
template <int kKeys>
__device__ __forceinline__ void mask(float (&s)[kKeys / 2], int key0, int position, int window) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n) {
        const int at = key0 + n / 4 * 8 + 2 * t + n % 2, own = position + n / 2 % 2 * 8;
        if (at > own || (window > 0 && at <= own - window)) s[n] = minus_infinity();
    }
}

// Puts together what `splits` blocks have left of the block's tokens. `part` in shared memory, `sync` for kThreads.
template <int kQueries, int kThreads, class Sync>
__device__ __forceinline__ void merge_parts(Float2 (*part)[kMostSplits], const float* split_out, const Float2* split_sums,
                                            const Tokens& own, int splits, int head, int tokens, u16* out, Sync&& sync) {
    const u64 row0 = own.offset + own.first;
    for (int i = threadIdx.x; i < kQueries * kMostSplits; i += kThreads)
        if (const int m = i / kMostSplits, n = i % kMostSplits; n < splits && own.first + m < own.count)
            part[m][n] = load_shared_state(split_sums + (u64(n) * tokens + row0 + m) * OP_Q_HEADS + head);
    sync();
    if (const int m = threadIdx.x; m < kQueries && own.first + m < own.count) {
        float best = minus_infinity(), sum = 0.f;
        for (int n = 0; n < splits; ++n) best = fmaxf(best, part[m][n].x);
        for (int n = 0; n < splits; ++n) part[m][n].x = exp2_of(part[m][n].x - best), sum += part[m][n].x * part[m][n].y;
        for (int n = 0; n < splits; ++n) part[m][n].x /= sum;
    }
    sync();
    constexpr int kQuads = kDim / 4, kTogether = 8;  // reads under way of a thread
    for (int i = threadIdx.x; i < kQueries * kQuads; i += kThreads * kTogether) {
        float all[kTogether][4] = {};
        for (int n = 0; n < splits; ++n) {
            Quad v[kTogether];
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int m = (i + j * kThreads) / kQuads, d = (i + j * kThreads) % kQuads * 4;
                if (m < kQueries && own.first + m < own.count)
                    v[j] = load_shared_state(
                        static_cast<const void*>(split_out + ((u64(n) * tokens + row0 + m) * OP_Q_HEADS + head) * kDim + d));
            }
#pragma unroll
            for (int j = 0; j < kTogether; ++j) {
                const int m = (i + j * kThreads) / kQuads;
                if (m < kQueries && own.first + m < own.count)
#pragma unroll
                    for (int c = 0; c < 4; ++c) all[j][c] += part[m][n].x * __uint_as_float(v[j].r[c]);
            }
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int m = (i + j * kThreads) / kQuads, d = head * kDim + (i + j * kThreads) % kQuads * 4;
            if (m >= kQueries || own.first + m >= own.count) continue;
            *reinterpret_cast<u32*>(out + place_of<kWidth>(d, int(row0) + m, tokens)) = pack_bf16(all[j][0], all[j][1]);
            *reinterpret_cast<u32*>(out + place_of<kWidth>(d + 2, int(row0) + m, tokens)) = pack_bf16(all[j][2], all[j][3]);
        }
    }
}
