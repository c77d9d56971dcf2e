// What `attention.cu` is made of: its layout, and the three things a block holds of a head: a vector of the new token, a
// warp's part of the sums over the context, a block's part of them.
#pragma once
#define KEPT_AS_F16
#include "stored.cuh"

constexpr int kPage = 16;
constexpr int kShared = OP_Q_HEADS / OP_KV_HEADS;            // query heads on a key-value head
constexpr int kHeads = ceil_div(kShared, OP_SUBGROUPS);   // of which this block has at most
constexpr int kThreads = OP_WARPS * 32;
constexpr int kHalf = OP_HEAD_DIM / 2;
constexpr int kQueryStride = OP_HEAD_DIM + 32;            // values: eight heads' rows fall into different banks
constexpr int kSpans = OP_HEAD_DIM / 32;
constexpr int kBlock = OP_HEAD_DIM % 64 == 0 ? 64 : 32;   // dimensions a V load of a warp spans
constexpr int kBlocks = OP_HEAD_DIM / kBlock;
constexpr int kDims = kBlock / 8;                      // of which a lane has so many of a token
constexpr int kWords = kDims * kKvBytes / 4;           // in words
constexpr int kRows = (OP_Q_HEADS + 2 * OP_KV_HEADS) * OP_HEAD_DIM;
constexpr int kRotated = ceil_div(kHalf, 32);
static_assert(OP_HEAD_DIM % 32 == 0 && kHeads <= 8 && OP_Q_HEADS % OP_KV_HEADS == 0, "head layout");

struct VTile {
    u32 w[4][kWords];  // the tokens of tensor-core rows 2t, 2t+1, 2t+8, 2t+9
};

// Which token of a page a row of the tensor-core product holds. Any order serves; this one lets the lanes that read shared
// memory together meet all its banks: a page comes in four runs of four tokens, kRunPad bytes apart, and such lanes read
// rows of different runs.
constexpr int kRunPad = 32;
constexpr int kPageRuns = 4;
constexpr int kLower = 2;  // tokens from row r's to row r + 8's
__device__ __forceinline__ int token_at(int row) {
    const int pair = (row >> 1) & 3, odd = row & 1;
    return 4 * (pair ^ (2 * odd)) + odd + 2 * (row >> 3);
}
__device__ __forceinline__ int tile_token(int t, int i) { return token_at(2 * t + (i & 1) + 4 * (i & 2)); }  // of a VTile

// `p`: the page's first token.
__device__ __forceinline__ void load_v(VTile& v, const Stored* p, int t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_words(v.w[i], static_cast<const void*>(p + tile_token(t, i) * OP_HEAD_DIM));
}

// The places of one warp in shared memory, a page's keys and then its values each, filled by the copy engine in turn.
struct PageRing {
    static constexpr int kRunBytes = kPage / kPageRuns * OP_HEAD_DIM * kKvBytes;
    static constexpr int kBytes = kPageRuns * (kRunBytes + kRunPad);  // of keys, and of values
    static constexpr int kRuns = 2 * kPageRuns;                       // of a page
    static constexpr int kSlots = OP_SLOTS > 0 ? OP_SLOTS : 1;
    u8* const here;
    u64* const full;
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ PageRing(u8* places, u64* barriers, int warp)
        : here(places + warp * kSlots * 2 * kBytes), full(barriers) {}

    __device__ __forceinline__ void prepare(int lane) {
        if (lane < kSlots) init_barrier(full[lane], 1);
        if (lane < kSlots) publish_barriers();
        __syncwarp();
    }
    // Run `run` of a page, by a lane each.
    __device__ __forceinline__ void copy(int to, const Stored* keys, const Stored* values, int run) {
        if (run == 0) expect_bytes(full[to], kRuns * kRunBytes);
        const int part = run % kPageRuns;
        const Stored* from = (run < kPageRuns ? keys : values) + part * (kRunBytes / kKvBytes);
        copy_run(full[to], here + to * 2 * kBytes + run * (kRunBytes + kRunPad), from, kRunBytes);
    }
    // Bytes from a place's beginning to a token's keys.
    __device__ static __forceinline__ int token_bytes(int token) {
        return token * OP_HEAD_DIM * kKvBytes + token / (kPage / kPageRuns) * kRunPad;
    }
    template <int WORDS>
    __device__ __forceinline__ void read(u32 (&w)[WORDS], int at) const {
        load_words(w, shared_address(here) + slot * 2 * kBytes + at);
    }
    // Of the page that is next, once it has come.
    __device__ __forceinline__ void keys(Eight (&k)[kSpans][2], int g, int t) {
        wait_barrier(full[slot], parity);
#pragma unroll
        for (int j = 0; j < kSpans; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) read(k[j][i].w, token_bytes(token_at(g + 8 * i)) + (8 * t + 32 * j) * kKvBytes);
    }
    // Returns what depends on all of them.
    __device__ __forceinline__ u32 values(VTile (&v)[kBlocks], int g, int t) const {
        u32 all = 0;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                read(v[b].w[i], kBytes + token_bytes(tile_token(t, i)) + (g * kDims + b * kBlock) * kKvBytes);
                all ^= v[b].w[i][0];
            }
        return all;
    }
    // The place just read, free once every lane's reads are done: the copy engine keeps no order with them. A lane comes
    // to the barrier once the last of its own is.
    __device__ __forceinline__ int leave(u32 read) {
        int freed = slot;
        asm volatile("{ .reg .u32 never; xor.b32 never, %1, %1; add.u32 %0, %0, never; }" : "+r"(freed) : "r"(read) : "memory");
        __syncwarp();
        if (++slot == kSlots) slot = 0, parity ^= 1;
        return freed;
    }
};

// (cos, sin) at a position, of the dimensions that a lane has.
__device__ __forceinline__ void load_turn(Float2 (&turn)[kRotated], const float* angles, int position, int lane) {
#pragma unroll
    for (int i = 0; i < kRotated; ++i) {
        const float* row = angles + u64(position) * 2 * OP_HEAD_DIM + (lane + 32 * i) % kHalf;
        turn[i] = Float2{row[0], row[OP_HEAD_DIM + kHalf]};
    }
}

// Read anew for every page: kept in registers it would push others out.
__device__ __forceinline__ Quad read_query(const u16* p) {
    Quad q;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(q.r[0]), "=r"(q.r[1]), "=r"(q.r[2]), "=r"(q.r[3])
                 : "r"(shared_address(p)));
    return q;
}

// One head's vector of the row, normed and rotated, as two halves: lane + 32·i and the same plus OP_HEAD_DIM / 2.
struct HeadVector {
    float low[kRotated], high[kRotated];

    __device__ __forceinline__ void load(const float* p, int lane) {
#pragma unroll
        for (int i = 0; i < kRotated; ++i) {
            const int d = lane + 32 * i;
            low[i] = d < kHalf ? load_shared_state(p + d) : 0.f;
            high[i] = d < kHalf ? load_shared_state(p + kHalf + d) : 0.f;
        }
    }
    __device__ __forceinline__ void norm(const HeadVector& gain, float eps) {
        float s = 0.f;
#pragma unroll
        for (int i = 0; i < kRotated; ++i) s += low[i] * low[i] + high[i] * high[i];
        const float f = rsqrtf(warp_sum(s) / float(OP_HEAD_DIM) + eps);
#pragma unroll
        for (int i = 0; i < kRotated; ++i) low[i] *= f * gain.low[i], high[i] *= f * gain.high[i];
    }
    // Fused as it says, whatever the compiler likes: keys that are made anew must be those that were stored, to the bit.
    __device__ __forceinline__ void rotate(const Float2 (&turn)[kRotated]) {
#pragma unroll
        for (int i = 0; i < kRotated; ++i) {
            const float l = __fmaf_rn(low[i], turn[i].x, -__fmul_rn(high[i], turn[i].y));
            const float h = __fmaf_rn(high[i], turn[i].x, __fmul_rn(low[i], turn[i].y));
            low[i] = l, high[i] = h;
        }
    }
    __device__ __forceinline__ void store(u16* p, int lane) const {
#pragma unroll
        for (int i = 0; i < kRotated; ++i) {
            const int d = lane + 32 * i;
            if (d < kHalf) p[d] = to_operand(low[i]), p[kHalf + d] = to_operand(high[i]);
        }
    }
    // As it lies in a page.
    __device__ __forceinline__ void keep(Stored* p, int lane) const {
#pragma unroll
        for (int i = 0; i < kRotated; ++i) {
            const int d = lane + 32 * i;
            if (d < kHalf) p[d] = to_stored(low[i]), p[kHalf + d] = to_stored(high[i]);
        }
    }
    // To `query` as operands, or to `kept` as it lies in a page; where both are of one type, by one store without a branch.
    template <class T>
    __device__ __forceinline__ void put(bool is_query, u16* query, T* kept, int lane) const {
        if constexpr (sizeof(T) == sizeof(u16))
            store(is_query ? query : kept, lane);
        else if (is_query)
            store(query, lane);
        else
            keep(kept, lane);
    }
};

// What a warp holds of softmax(scores)·V: columns 2t and 2t + 1 of the heads.
struct Partial {
    float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f};  // sum: of this lane's tokens
    float out[kBlocks][kDims / 2][4] = {};                   // dims (2p, 2p + 1) × heads (2t, 2t + 1): c = 2·dim + head

    // scores: tokens g and g + 8, log2 units, masked ones at minus infinity
    __device__ __forceinline__ void add(float (&s)[4], const VTile (&v)[kBlocks]) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float best = fmaxf(s[c], s[c + 2]);
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, d));
            const float next = fmaxf(top[c], best);
            const float base = next == minus_infinity() ? 0.f : next;
            const float keep = exp2f(top[c] - base);
            s[c] = exp2f(s[c] - base), s[c + 2] = exp2f(s[c + 2] - base);
            sum[c] = sum[c] * keep + s[c] + s[c + 2];
            top[c] = next;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                for (int p = 0; p < kDims / 2; ++p) out[b][p][c] *= keep, out[b][p][c + 2] *= keep;
        }
        const u32 p0 = transpose8x8(pack_operands(s[0], s[1])), p1 = transpose8x8(pack_operands(s[2], s[3]));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int p = 0; p < kDims / 2; ++p) {
                const u32(&w)[4][kWords] = v[b].w;
                const u32 a[4] = {beside(w[0], w[1], 2 * p), beside(w[0], w[1], 2 * p + 1), beside(w[2], w[3], 2 * p),
                                  beside(w[2], w[3], 2 * p + 1)};
                multiply_add(out[b][p], a, p0, p1);
            }
    }
};

__device__ __forceinline__ float merge_weight(float top, float best) { return top == minus_infinity() ? 0.f : exp2f(top - best); }

// Part of the context's result for two dimensions of a head: sum of exp2(score - best), and of that times the values.
struct Merged {
    float best = minus_infinity(), sum = 0.f, x = 0.f, y = 0.f;
    u64 words[4];

    __device__ __forceinline__ void add(const Merged& other) {
        const float next = fmaxf(best, other.best);
        const float a = merge_weight(best, next), b = merge_weight(other.best, next);
        best = next;
        sum = a * sum + b * other.sum, x = a * x + b * other.x, y = a * y + b * other.y;
    }
    __device__ __forceinline__ u32 packed() const { return pack_bf16(x / sum, y / sum); }

    __device__ static __forceinline__ void put(u64* to, float v, u32 number) {
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64(number) << 32) | __float_as_uint(v)) : "memory");
    }
    __device__ static __forceinline__ u64 get(const u64* from) {
        u64 v;
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
        return v;
    }
    __device__ __forceinline__ void leave(u64* outs, u64* sums, u64 head, int d, u32 number) const {
        put(outs + head * OP_HEAD_DIM + d, x, number), put(outs + head * OP_HEAD_DIM + d + 1, y, number);
        if (d == 0) put(sums + head * 2, best, number), put(sums + head * 2 + 1, sum, number);
    }
    __device__ __forceinline__ void ask(const u64* outs, const u64* sums, u64 head, int d) {
        words[0] = get(sums + head * 2), words[1] = get(sums + head * 2 + 1);
        words[2] = get(outs + head * OP_HEAD_DIM + d), words[3] = get(outs + head * OP_HEAD_DIM + d + 1);
    }
    __device__ __forceinline__ bool came(u32 number) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) all = all && u32(words[i] >> 32) == number;
        best = __uint_as_float(u32(words[0])), sum = __uint_as_float(u32(words[1]));
        x = __uint_as_float(u32(words[2])), y = __uint_as_float(u32(words[3]));
        return all;
    }
};
