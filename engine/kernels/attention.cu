// Decode attention over paged keys and values, for every batch row one new token.
// Norms of queries and keys (optional), rotary embedding, append of the new key and value to their page, attention with
// the context split over blocks, and the merge of the splits by the block of the newest tokens.
//
// A warp takes a page of 16 tokens at a time: scores = K·qᵀ with the tokens as rows of the tensor-core product and up to
// eight query heads as its columns, then out = Vᵀ·p with the dimensions as rows. Pages of earlier steps are requested
// before the kernel waits for its predecessor; the new token never passes through memory on its way into the sums.
// The split depends on the row's own length alone.
#include "common.cuh"

constexpr int kPage = 16;
constexpr int kShared = OP_Q_HEADS / OP_KV_HEADS;            // query heads on a key-value head
constexpr int kHeads = ceil_div(kShared, OP_SUBGROUPS);   // of which this block has at most
constexpr int kThreads = OP_WARPS * 32;
constexpr int kHalf = OP_HEAD_DIM / 2;
constexpr int kQueryStride = OP_HEAD_DIM + 32;            // bf16 values: eight heads' rows fall into different banks
constexpr int kSpans = OP_HEAD_DIM / 32;
constexpr int kBlock = OP_HEAD_DIM % 64 == 0 ? 64 : 32;   // dimensions a V load of a warp spans
constexpr int kBlocks = OP_HEAD_DIM / kBlock;
constexpr int kPairs = kBlock / 16;                    // words of two dimensions a lane has of a token and block
constexpr int kRows = (OP_Q_HEADS + 2 * OP_KV_HEADS) * OP_HEAD_DIM;
constexpr int kRotated = ceil_div(kHalf, 32);
static_assert(OP_HEAD_DIM % 32 == 0 && kHeads <= 8 && OP_Q_HEADS % OP_KV_HEADS == 0, "head layout");

struct VTile {
    u32 w[4][kPairs];  // tokens 2t, 2t+1, 2t+8, 2t+9
};

__device__ __forceinline__ void load_v(VTile& v, const u16* p) {
    if constexpr (kPairs == 4) {
        const u16* at[4] = {p, p + OP_HEAD_DIM, p + 8 * OP_HEAD_DIM, p + 9 * OP_HEAD_DIM};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Quad q = load_shared_state(static_cast<const void*>(at[i]));
#pragma unroll
            for (int c = 0; c < 4; ++c) v.w[i][c] = q.r[c];
        }
    } else {
        const u16* at[4] = {p, p + OP_HEAD_DIM, p + 8 * OP_HEAD_DIM, p + 9 * OP_HEAD_DIM};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.w[i][0]), "=r"(v.w[i][1]) : "l"(at[i]) : "memory");
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
    __device__ __forceinline__ void rotate(const Float2 (&turn)[kRotated]) {
#pragma unroll
        for (int i = 0; i < kRotated; ++i) {
            const float l = low[i] * turn[i].x - high[i] * turn[i].y, h = high[i] * turn[i].x + low[i] * turn[i].y;
            low[i] = l, high[i] = h;
        }
    }
    __device__ __forceinline__ void store(u16* p, int lane) const {
#pragma unroll
        for (int i = 0; i < kRotated; ++i) {
            const int d = lane + 32 * i;
            if (d < kHalf) p[d] = to_bf16(low[i]), p[kHalf + d] = to_bf16(high[i]);
        }
    }
};

// What a warp holds of softmax(scores)·V: columns 2t and 2t + 1 of the heads.
struct Partial {
    float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f};  // sum: of this lane's tokens
    float out[kBlocks][kPairs][4] = {};                      // dims (2p, 2p + 1) × heads (2t, 2t + 1): c = 2·dim + head

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
                for (int p = 0; p < kPairs; ++p) out[b][p][c] *= keep, out[b][p][c + 2] *= keep;
        }
        const u32 p0 = transpose8x8(pack_bf16(s[0], s[1])), p1 = transpose8x8(pack_bf16(s[2], s[3]));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                const u32 a[4] = {__byte_perm(v[b].w[0][p], v[b].w[1][p], 0x5410u),
                                  __byte_perm(v[b].w[0][p], v[b].w[1][p], 0x7632u),
                                  __byte_perm(v[b].w[2][p], v[b].w[3][p], 0x5410u),
                                  __byte_perm(v[b].w[2][p], v[b].w[3][p], 0x7632u)};
                mma(out[b][p], a, p0, p1);
            }
    }
};

struct Shared {
    u16 query[kHeads][kQueryStride];
    u16 key[OP_HEAD_DIM], value[OP_HEAD_DIM];
    float out[OP_WARPS][kHeads][OP_HEAD_DIM];
    float top[OP_WARPS + 1][kHeads], sum[OP_WARPS][kHeads];  // the last `top`: the new token's score
    int last;
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

extern "C" __global__ void __launch_bounds__(kThreads, OP_MIN_BLOCKS)
    attention(const float* qkv, const float* query_gain, const float* key_gain, const float* angles,
              const int* position, const int* page_table, int table_stride, u16* key_pool, u16* value_pool,
              u64* split_out, u64* split_sums, int* arrivals, u32* launches, u16* out, float scale, float eps, int window,
              int trigger) {
    __shared__ Shared sh;
    if (trigger == 0) let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int split = blockIdx.x, kv = blockIdx.y / OP_SUBGROUPS, sub = blockIdx.y % OP_SUBGROUPS, m = blockIdx.z;
    const int head0 = kv * kShared + sub * kHeads;
    const int heads = kShared - sub * kHeads < kHeads ? kShared - sub * kHeads : kHeads;
    const int pos = load_shared_state(position + m);  // tokens 0 … pos - 1 are cached; -1: an idle row
    const int oldest = window > 0 && pos + 1 > window ? pos + 1 - window : 0;
    const int page0 = oldest / kPage, pages = (pos + kPage - 1) / kPage - page0;
    const int even = ceil_div(pages, OP_SPLITS);
    const int per_split = pages <= OP_SINGLE_PAGES ? OP_SINGLE_PAGES
                          : even > OP_MIN_PAGES ? ceil_div(even, OP_WARPS) * OP_WARPS
                                                : OP_MIN_PAGES;
    const int splits = pages > OP_SINGLE_PAGES ? ceil_div(pages, per_split) : 1;
    if (splits > int(gridDim.x)) __trap();  // a row longer than the launch was prepared for
    if (pos < 0 || split >= splits) {
        if (split == 0) wait_for_previous();  // the others need not: the launch ends with its last block
        return;
    }
    const bool newest = split == splits - 1;
    const int first = page0 + split * per_split;
    const int end = page0 + (pages < (split + 1) * per_split ? pages : (split + 1) * per_split);
    const int* table = page_table + (long long)m * table_stride;

    Quad k[kSpans][2];
    VTile v[kBlocks];
    auto load_keys = [&](int page) {
        const u16* p = key_pool + ((u64(load_shared_state(table + page)) * OP_KV_HEADS + kv) * kPage + g) * OP_HEAD_DIM + 8 * t;
#pragma unroll
        for (int j = 0; j < kSpans; ++j) {
            k[j][0] = load_shared_state(static_cast<const void*>(p + 32 * j));
            k[j][1] = load_shared_state(static_cast<const void*>(p + 8 * OP_HEAD_DIM + 32 * j));
        }
    };
    auto load_values = [&](int page) {
        const u16* p =
            value_pool + ((u64(load_shared_state(table + page)) * OP_KV_HEADS + kv) * kPage + 2 * t) * OP_HEAD_DIM + g * (kBlock / 8);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) load_v(v[b], p + b * kBlock);
    };
    int page = first + warp;
    if (page < end) load_keys(page), load_values(page);
    // The warp's next pages on their way into L2, one a lane.
    if (const int later = page + lane * OP_WARPS; lane > 0 && lane <= OP_PAGES_AHEAD && later < end) {
        const u64 at = (u64(load_shared_state(table + later)) * OP_KV_HEADS + kv) * kPage * OP_HEAD_DIM;
        prefetch_run(key_pool + at, kPage * OP_HEAD_DIM * 2);
        prefetch_run(value_pool + at, kPage * OP_HEAD_DIM * 2);
    }
    const int own_page = newest ? load_shared_state(table + pos / kPage) : 0;
    Float2 turn[kRotated];  // (cos, sin)
#pragma unroll
    for (int i = 0; i < kRotated; ++i) {
        const float* row = angles + u64(pos) * 2 * OP_HEAD_DIM + (lane + 32 * i) % kHalf;
        turn[i] = Float2{row[0], row[OP_HEAD_DIM + kHalf]};
    }
    HeadVector gain = {};
    auto load_gain = [&](int task) {
        if (OP_QK_NORM && task <= heads) gain.load(task < heads ? query_gain : key_gain, lane);
    };
    load_gain(warp);

    wait_for_previous();
    if (trigger == 1) let_next_start();

    const u32 number =
        splits == 1 ? 0u : load_shared_state(launches + m * OP_KV_HEADS * OP_SUBGROUPS + blockIdx.y) + 1;
    // The row's queries, and in the block of the newest tokens its key and value.
    const float* row = qkv + u64(m) * kRows;
    for (int task = warp; task < heads + (newest ? 2 : 0); task += OP_WARPS) {
        if (task != warp) load_gain(task);
        HeadVector x;
        const bool is_query = task < heads, is_key = task == heads;
        x.load(row + (is_query ? head0 + task : OP_Q_HEADS + (is_key ? 0 : OP_KV_HEADS) + kv) * OP_HEAD_DIM, lane);
        if (is_query || is_key) {
            if constexpr (OP_QK_NORM) x.norm(gain, eps);
            x.rotate(turn);
        }
        x.store(is_query ? sh.query[task] : is_key ? sh.key : sh.value, lane);
        if (!is_query && sub == 0) {
            u16* pool = is_key ? key_pool : value_pool;
            x.store(pool + ((u64(own_page) * OP_KV_HEADS + kv) * kPage + pos % kPage) * OP_HEAD_DIM,
                    lane);
        }
    }
    __syncthreads();

    Partial part;
    for (; page < end; page += OP_WARPS) {
        float s[4] = {}, s1[4] = {};
#pragma unroll
        for (int j = 0; j < kSpans; ++j) {
            const Quad q = read_query(&sh.query[g < kHeads ? g : 0][32 * j + 8 * t]);
            const u32 a0[4] = {k[j][0].r[0], k[j][1].r[0], k[j][0].r[1], k[j][1].r[1]};
            const u32 a1[4] = {k[j][0].r[2], k[j][1].r[2], k[j][0].r[3], k[j][1].r[3]};
            mma(s, a0, q.r[0], q.r[1]);
            mma(s1, a1, q.r[2], q.r[3]);
        }
        const bool more = page + OP_WARPS < end;
        if (more) load_keys(page + OP_WARPS);
        const int token = page * kPage + g;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = token + (c >= 2 ? 8 : 0);
            s[c] = at >= oldest && at < pos ? (s[c] + s1[c]) * scale : minus_infinity();
        }
        if (page * kPage + kPage > pos) {  // slots past the context may hold anything, even NaN
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (page * kPage + 2 * t + (i & 1) + (i >= 2 ? 8 : 0) >= pos)
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                        for (int p = 0; p < kPairs; ++p) v[b].w[i][p] = 0u;
        }
        part.add(s, v);
        if (more) load_values(page + OP_WARPS);
    }

#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) part.sum[c] += __shfl_xor_sync(0xFFFFFFFFu, part.sum[c], d);
        const int h = 2 * t + c;
        if (h < heads) {
            if (g == 0) sh.top[warp][h] = part.top[c], sh.sum[warp][h] = part.sum[c];
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                for (int p = 0; p < kPairs; ++p)
                    *reinterpret_cast<Float2*>(&sh.out[warp][h][b * kBlock + g * (kBlock / 8) + 2 * p]) =
                        Float2{part.out[b][p][c], part.out[b][p][c + 2]};
        }
    }
    for (int h = warp; h < heads; h += OP_WARPS) {
        float s = minus_infinity();
        if (newest) {
            float dot = 0.f;
            for (int d = lane; d < OP_HEAD_DIM; d += 32) dot += bf16_to_float(sh.query[h][d]) * bf16_to_float(sh.key[d]);
            s = warp_sum(dot) * scale;
        }
        if (lane == 0) sh.top[OP_WARPS][h] = s;
    }
    __syncthreads();

    // What the blocks of a row and head leave for the one that merges them: words of a value and the launch's number, so
    // that a reader knows by the word itself whether it has come.
    const u64 row_words = u64(m) * OP_SPLITS * OP_Q_HEADS;
    for (int o = threadIdx.x; o < heads * kHalf; o += kThreads) {
        const int h = o / kHalf, d = 2 * (o % kHalf);
        Merged own = {};
        own.best = sh.top[OP_WARPS][h];
#pragma unroll
        for (int w = 0; w < OP_WARPS; ++w) own.best = fmaxf(own.best, sh.top[w][h]);
        own.sum = merge_weight(sh.top[OP_WARPS][h], own.best);
        own.x = newest ? own.sum * bf16_to_float(sh.value[d]) : 0.f;
        own.y = newest ? own.sum * bf16_to_float(sh.value[d + 1]) : 0.f;
#pragma unroll
        for (int w = 0; w < OP_WARPS; ++w) {
            const float f = merge_weight(sh.top[w][h], own.best);
            own.sum += f * sh.sum[w][h], own.x += f * sh.out[w][h][d], own.y += f * sh.out[w][h][d + 1];
        }
        u32* to = reinterpret_cast<u32*>(out + (u64(m) * OP_Q_HEADS + head0 + h) * OP_HEAD_DIM + d);
        const u64 at = row_words + head0 + h;
        if (splits == 1) {
            *to = own.packed();
        } else if (OP_POLL && newest) {
            Merged all = {};
            for (int i = 0; i < splits - 1; i += 4) {
                Merged part[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (i + j < splits - 1) part[j].ask(split_out, split_sums, at + u64(i + j) * OP_Q_HEADS, d);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (i + j < splits - 1) {
                        while (!part[j].came(number)) part[j].ask(split_out, split_sums, at + u64(i + j) * OP_Q_HEADS, d);
                        all.add(part[j]);
                    }
            }
            all.add(own);
            *to = all.packed();
        } else {
            own.leave(split_out, split_sums, at + u64(split) * OP_Q_HEADS, d, number);
        }
    }
    if (splits == 1) return;
    u32* launches_here = launches + m * OP_KV_HEADS * OP_SUBGROUPS + blockIdx.y;
    if constexpr (OP_POLL) {
        if (newest && threadIdx.x == 0) *launches_here = number;
        return;
    }

    // Too many blocks to be sure that all run at once: whichever comes last merges.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int* counter = arrivals + m * OP_KV_HEADS * OP_SUBGROUPS + blockIdx.y;
        sh.last = atomicAdd(counter, 1) == splits - 1;
        if (sh.last) *counter = 0, *launches_here = number;  // ready for the next launch
    }
    __syncthreads();
    if (!sh.last) return;
    __threadfence();
    for (int o = threadIdx.x; o < heads * kHalf; o += kThreads) {
        const int h = head0 + o / kHalf, d = 2 * (o % kHalf);
        Merged all = {};
        for (int i = 0; i < splits; ++i) {
            Merged part;
            part.ask(split_out, split_sums, row_words + h + u64(i) * OP_Q_HEADS, d);
            part.came(number);
            all.add(part);
        }
        *reinterpret_cast<u32*>(out + (u64(m) * OP_Q_HEADS + h) * OP_HEAD_DIM + d) = all.packed();
    }
}
