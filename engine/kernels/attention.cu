// Decode attention over paged keys and values, for every batch row one new token. OP_GROUP rows side by side are
// successive tokens of one sequence, and share its line of the page table.
// Norms of queries and keys (optional), rotary embedding, append of the new key and value to their page, attention with
// the context split over blocks, and the merge of the splits by the block of the newest tokens.
//
// A warp takes a page of 16 tokens at a time: scores = K·qᵀ with the tokens as rows of the tensor-core product and up to
// eight query heads as its columns, then out = Vᵀ·p with the dimensions as rows. Pages of earlier steps are requested
// before the kernel waits for its predecessor; the new token never passes through memory on its way into the sums.
// The split depends on the row's own length alone. A warp's pages come into registers, one ahead, or, where OP_SLOTS is
// set, by bulk copies into that many places of its own in shared memory: more is under way where a warp has many pages.
#include "beside.cuh"

struct Shared : Beside<OP_GROUP - 1> {
    u16 query[kHeads][kQueryStride];
    Stored key[OP_HEAD_DIM], value[OP_HEAD_DIM];
    float out[OP_WARPS][kHeads][OP_HEAD_DIM];
    float top[OP_WARPS + 1][kHeads], sum[OP_WARPS][kHeads];  // the last `top`: the new token's score
    int last;
    u64 full[OP_WARPS][OP_SLOTS > 0 ? OP_SLOTS : 1];
};

extern "C" __global__ void __launch_bounds__(kThreads, OP_MIN_BLOCKS)
    attention(const float* qkv, const float* query_gain, const float* key_gain, const float* angles,
              const int* position, const int* page_table, int table_stride, Stored* key_pool, Stored* value_pool,
              u64* split_out, u64* split_sums, int* arrivals, u32* launches, u16* out, float scale, float eps, int window,
              int trigger) {
    extern __shared__ __align__(128) u8 places[];
    __shared__ Shared sh;
    if (trigger == 0) let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int split = blockIdx.x, kv = blockIdx.y / OP_SUBGROUPS, sub = blockIdx.y % OP_SUBGROUPS, m = blockIdx.z;
    const int head0 = kv * kShared + sub * kHeads;
    const int heads = kShared - sub * kHeads < kHeads ? kShared - sub * kHeads : kHeads;
    const int pos = load_shared_state(position + m);  // of the new token; -1: an idle row
    const int cached = pos - m % OP_GROUP;            // tokens before it are in the pages; from it on, in rows beside
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
    const int* table = page_table + (long long)(m / OP_GROUP) * table_stride;

    Eight k[kSpans][2];
    VTile v[kBlocks];
    auto load_keys = [&](int page) {
        const Stored* p =
            key_pool + ((u64(load_shared_state(table + page)) * OP_KV_HEADS + kv) * kPage + token_at(g)) * OP_HEAD_DIM + 8 * t;
#pragma unroll
        for (int j = 0; j < kSpans; ++j) {
            load_words(k[j][0].w, static_cast<const void*>(p + 32 * j));
            load_words(k[j][1].w, static_cast<const void*>(p + kLower * OP_HEAD_DIM + 32 * j));
        }
    };
    auto load_values = [&](int page) {
        const Stored* p =
            value_pool + (u64(load_shared_state(table + page)) * OP_KV_HEADS + kv) * kPage * OP_HEAD_DIM + g * kDims;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) load_v(v[b], p + b * kBlock, t);
    };
    int page = first + warp;
    PageRing ring(places, sh.full[warp], warp);
    auto copy_page = [&](int which, int slot, int run) {
        const u64 at = (u64(load_shared_state(table + which)) * OP_KV_HEADS + kv) * kPage * OP_HEAD_DIM;
        ring.copy(slot, key_pool + at, value_pool + at, run);
    };
    if constexpr (OP_SLOTS > 0) {
        ring.prepare(lane);
        static_assert(OP_SLOTS * PageRing::kRuns <= 32, "a lane asks for a run");
        const int slot = lane / PageRing::kRuns, mine = page + slot * OP_WARPS;
        if (slot < OP_SLOTS && mine < end) copy_page(mine, slot, lane % PageRing::kRuns);
    } else if (page < end) {
        load_keys(page), load_values(page);
    }
    // The warp's next pages on their way into L2, one a lane.
    if (const int later = page + lane * OP_WARPS;
        OP_SLOTS == 0 && lane > 0 && lane <= OP_PAGES_AHEAD && later < end) {
        const u64 at = (u64(load_shared_state(table + later)) * OP_KV_HEADS + kv) * kPage * OP_HEAD_DIM;
        prefetch_run(key_pool + at, kPage * OP_HEAD_DIM * kKvBytes);
        prefetch_run(value_pool + at, kPage * OP_HEAD_DIM * kKvBytes);
    }
    const int own_page = newest ? load_shared_state(table + pos / kPage) : 0;
    Float2 turn[kRotated];
    load_turn(turn, angles, pos, lane);
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
        x.put(is_query, sh.query[task], is_key ? sh.key : sh.value, lane);
        if (!is_query && sub == 0) {
            Stored* pool = is_key ? key_pool : value_pool;
            x.keep(pool + ((u64(own_page) * OP_KV_HEADS + kv) * kPage + pos % kPage) * OP_HEAD_DIM, lane);
        }
    }
    if (end * kPage > cached)
        sh.make(row - u64(pos - cached) * kRows, pos - cached, cached, kv, angles, key_gain, eps, warp, lane);
    __syncthreads();

    Partial part;
    for (; page < end; page += OP_WARPS) {
        float s[4] = {}, s1[4] = {};
        if constexpr (OP_SLOTS > 0) ring.keys(k, g, t);
        sh.replace_keys(k, page, cached, pos, g, t);
#pragma unroll
        for (int j = 0; j < kSpans; ++j) {
            const Quad q = read_query(&sh.query[g < kHeads ? g : 0][32 * j + 8 * t]);
            const Quad above = widen(k[j][0]), below = widen(k[j][1]);
            const u32 a0[4] = {above.r[0], below.r[0], above.r[1], below.r[1]};
            const u32 a1[4] = {above.r[2], below.r[2], above.r[3], below.r[3]};
            multiply_add(s, a0, q.r[0], q.r[1]);
            multiply_add(s1, a1, q.r[2], q.r[3]);
        }
        const bool more = page + OP_WARPS < end;
        u32 read = 0;  // depends on all that this lane read of the page
        if constexpr (OP_SLOTS > 0)
            read = ring.values(v, g, t);
        else if (more)
            load_keys(page + OP_WARPS);
        const int token = page * kPage + token_at(g);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = token + (c >= 2 ? kLower : 0);
            s[c] = at >= oldest && at < pos ? (s[c] + s1[c]) * scale : minus_infinity();
        }
        sh.replace_values(v, page, cached, pos, g, t);
        if (page * kPage + kPage > pos) {  // slots past the context may hold anything, even NaN
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (page * kPage + tile_token(t, i) >= pos)
#pragma unroll
                    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                        for (int p = 0; p < kWords; ++p) v[b].w[i][p] = 0u;
        }
        part.add(s, v);
        if constexpr (OP_SLOTS > 0) {
            const int slot = ring.leave(read), next = page + OP_SLOTS * OP_WARPS;
            if (lane < PageRing::kRuns && next < end) copy_page(next, slot, lane);
        } else if (more) {
            load_values(page + OP_WARPS);
        }
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
                for (int p = 0; p < kDims / 2; ++p)
                    *reinterpret_cast<Float2*>(&sh.out[warp][h][b * kBlock + g * kDims + 2 * p]) =
                        Float2{part.out[b][p][c], part.out[b][p][c + 2]};
        }
    }
    for (int h = warp; h < heads; h += OP_WARPS) {
        float s = minus_infinity();
        if (newest) {
            float dot = 0.f;
            for (int d = lane; d < OP_HEAD_DIM; d += 32) dot += operand_to_float(sh.query[h][d]) * stored_to_float(sh.key[d]);
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
        own.x = newest ? own.sum * stored_to_float(sh.value[d]) : 0.f;
        own.y = newest ? own.sum * stored_to_float(sh.value[d + 1]) : 0.f;
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
            for (int i = 0; i < splits - 1; i += OP_ASKED) {
                Merged part[OP_ASKED];
#pragma unroll
                for (int j = 0; j < OP_ASKED; ++j)
                    if (i + j < splits - 1) part[j].ask(split_out, split_sums, at + u64(i + j) * OP_Q_HEADS, d);
#pragma unroll
                for (int j = 0; j < OP_ASKED; ++j)
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
