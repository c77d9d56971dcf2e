// `prefill_attention` for GPUs of compute capability 9.0, by products of warpgroups: 128 tokens of one head a block.
//
// Two warpgroups have 64 tokens each; a third copies pages into a ring of three tiles of keys and three of values. The two
// start their products by turns, a tile's values with the scores of the next, so that one weighs while the other's products
// run. A block takes one part of a context for one head after the other, and the third warpgroup goes on to the next while
// the others end theirs.
#include "chunk_tiles.cuh"
#include "warpgroup.cuh"

constexpr int kReaders = 2, kQueries = kReaders * 64, kThreads = kReaders * 128;  // threads that compute
constexpr int kKeys = 128, kStages = 3;
constexpr int kPanel = kKeys * 128, kTile = kDim / 64 * kPanel;  // bytes of 64 columns of a tile; of a tile
constexpr int kSegments = kDim / 8, kAtOnce = 128 / kSegments;  // of a row; rows that the copying threads copy at once
static_assert(kDim == 64 || kDim == 128, "head");

using Place = RingPlace<kStages>;

struct Barriers {
    u64 full[2][kStages], empty[2][kStages];  // of keys, of values

    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0)
            for (int i = 0; i < 2; ++i)
                for (int s = 0; s < kStages; ++s) init_barrier(full[i][s], 128), init_barrier(empty[i][s], kThreads / 32);
        publish_barriers();
        __syncthreads();
    }
};

// What the copying threads do.
struct Pool {
    const Stored* of[2];  // keys, values
    const int* pages;
    int kv, known;  // positions written

    // One tile of keys or of values, of which `full` is told; `id`: a lane's page of the tile.
    __device__ __forceinline__ void copy(int what, u8* to, int tile, int id, u64& full) const {
        const int i = threadIdx.x % 128, segment = i % kSegments, row0 = i / kSegments;
        u8* target = to + segment / 8 * kPanel;
        auto place = [&](int row) { return target + row * 128 + ((segment ^ row) & 7) * 16; };
        auto there = [&](int row) { return tile * kKeys + row < known; };  // what lies past it may be anything, even NaN
        auto source = [&](int n) {
            const u64 page = u64(__shfl_sync(0xFFFFFFFFu, id, n * kAtOnce / kPage));
            return of[what] + ((page * OP_KV_HEADS + kv) * kPage + (n * kAtOnce + row0) % kPage) * kDim + segment * 8;
        };
        if constexpr (kKvBytes == 2) {
#pragma unroll
            for (int n = 0; n < kKeys / kAtOnce; ++n)
                copy_async(place(n * kAtOnce + row0), source(n), there(n * kAtOnce + row0));
            arrive_when_copied(full);
        } else {
            constexpr int kTogether = 8;  // reads under way of a thread
#pragma unroll
            for (int n = 0; n < kKeys / kAtOnce; n += kTogether) {
                Eight v[kTogether];
#pragma unroll
                for (int j = 0; j < kTogether; ++j) {
                    const Stored* from = source(n + j);
                    v[j] = Eight{};
                    if (there((n + j) * kAtOnce + row0)) load_words(v[j].w, static_cast<const void*>(from));
                }
#pragma unroll
                for (int j = 0; j < kTogether; ++j)
                    *reinterpret_cast<Quad*>(place((n + j) * kAtOnce + row0)) = widen(v[j]);
            }
            arrive(full);
        }
    }

    // `copied`: tiles of keys and of values so far.
    __device__ __forceinline__ void bring(const Keys& keys, u8* ring, Barriers& barriers, int& copied) const {
        const int lane = threadIdx.x % 32;
        const int last = (known - 1) / kPage;
        auto page_of = [&](int tile) {
            const int n = tile * (kKeys / kPage) + lane;
            return lane < kKeys / kPage && n <= last ? pages[n] : 0;
        };
        int id = page_of(keys.tile);
        for (int tile = keys.tile; tile <= keys.end; ++tile) {
            const int next = tile < keys.end ? page_of(tile + 1) : 0;
#pragma unroll
            for (int what = 0; what < 2; ++what) {
                const int round = copied / 2 / kStages, stage = copied / 2 % kStages;
                wait_barrier(barriers.empty[what][stage], (round & 1) ^ 1);
                copy(what, ring + (what * kStages + stage) * kTile, tile, id, barriers.full[what][stage]);
                ++copied;
            }
            id = next;
        }
    }
};

// Whose products are next, of the two warpgroups that compute; both have equally many tiles. A warpgroup has a barrier at
// which the other lets it pass.
struct Turns {
    static constexpr int kFirst = 2;  // barrier; 1 is for `put_together`
    int own;

    __device__ __forceinline__ explicit Turns(int group) : own(group) {
        if (own == 1) pass();
    }
    __device__ __forceinline__ void await() const { asm volatile("bar.sync %0, %1;" ::"r"(kFirst + own), "n"(kThreads) : "memory"); }
    __device__ __forceinline__ void pass() const {
        asm volatile("bar.arrive %0, %1;" ::"r"(kFirst + 1 - own), "n"(kThreads) : "memory");
    }
};

// A warpgroup's tokens.
struct Reader {
    u32 query[kDim / 16][4];
    Rows rows;

    // What a lane has of sixteen tokens: rows g and g + 8.
    __device__ __forceinline__ void load(const u16* queries, const Tokens& own, int m, int head) {
        const int t = threadIdx.x % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool there = m + 8 * r < own.count;
            const u64 row = own.offset + (there ? m + 8 * r : 0);
            const u32* from = reinterpret_cast<const u32*>(queries + (row * OP_Q_HEADS + head) * kDim) + t;
#pragma unroll
            for (int k = 0; k < kDim / 16; ++k)
                query[k][r] = there ? from[k * 8] : 0u, query[k][r + 2] = there ? from[k * 8 + 4] : 0u;
        }
    }

    __device__ __forceinline__ void start_scores(float (&s)[kKeys / 2], const u8* keys) const {
        before_products();
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k)
            multiply<false>(s, query[k], operand(keys + k / 4 * kPanel + k % 4 * 32, 16), k > 0);
        end_products();
    }

    __device__ __forceinline__ void start_values(const u32 (&weights)[kKeys / 16][4], const u8* values) {
        before_products();
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) multiply<true>(rows.out, weights[k], operand(values + k * 2048, kPanel), true);
        end_products();
    }
};

__device__ __forceinline__ void pack(u32 (&weights)[kKeys / 16][4], const float (&s)[kKeys / 2]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[k][i] = pack_bf16(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// The parts of contexts that a block has, one after the other; how many parts a context has at most. Those that see most
// come first, and every other round goes backwards, so that blocks end together.
template <class Each>
__device__ __forceinline__ int each_part(const Quad* where, int chunks, const int* page_table, int table_stride, int window,
                                         int most_splits, int most_blocks, Each&& each) {
    Table<kQueries> table(where, chunks);
    const int parts = most_parts(table.tiles, most_splits, most_blocks), items = table.tiles * parts * OP_Q_HEADS;
    for (int base = 0; base < items; base += gridDim.x) {
        const int item = base + (base / int(gridDim.x) % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
        if (item >= items) continue;
        if (base > 0) table.front = table.chunk(0);  // rather than kept
        const int nth = item / OP_Q_HEADS;
        const Tokens own = table.find(page_table, table_stride, table.tiles - 1 - nth / parts);
        Keys keys;
        if (keys.divide<kQueries, kKeys>(own, window, parts, nth % parts)) each(own, keys, item % OP_Q_HEADS, nth % parts);
    }
    return parts;
}

// Where contexts are divided a block has no more than one part, and whoever ends last puts those of its tokens together.
__device__ __forceinline__ void put_together(const Quad* where, int chunks, const int* page_table, int table_stride, int window,
                                             int most_splits, int most_blocks, Float2 (*sums)[kMostSplits],
                                             const float* split_out, const Float2* split_sums, int* arrivals, u16* out,
                                             int tokens) {
    __shared__ bool last_one;
    const Table<kQueries> table(where, chunks);
    const int parts = most_parts(table.tiles, most_splits, most_blocks), head = blockIdx.x % OP_Q_HEADS;
    const int nth = blockIdx.x / OP_Q_HEADS, tile = table.tiles - 1 - nth / parts;
    if (tile < 0) return;
    const Tokens own = table.find(page_table, table_stride, tile);
    Keys keys;
    if (!keys.divide<kQueries, kKeys>(own, window, parts, nth % parts) || keys.splits == 1) return;
    auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); };
    __threadfence();
    sync();
    if (threadIdx.x == 0) last_one = is_last(arrivals + tile * OP_Q_HEADS + head, keys.splits);
    sync();
    if (!last_one) return;
    __threadfence();
    merge_parts<kQueries, kThreads>(sums, split_out, split_sums, own, keys.splits, head, tokens, out, sync);
}

extern "C" __global__ void __launch_bounds__(kThreads + 128, 1)
    prefill_attention(const u16* queries, const Stored* key_pool, const Stored* value_pool, const Quad* where, int chunks,
                      const int* page_table, int table_stride, float* split_out, Float2* split_sums, int* arrivals,
                      u16* out, int tokens, float scale, int window, int most_splits, int most_blocks, int trigger) {
    extern __shared__ __align__(1024) u8 ring[];
    __shared__ Barriers barriers;
    __shared__ Float2 sums[kQueries][kMostSplits];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    if (trigger == 0) let_next_start();
    barriers.init();
    wait_for_previous();
    if (trigger == 1) let_next_start();

    if (warp >= kThreads / 32) {
        fewer_registers<56>();
        int copied = 0;
        each_part(where, chunks, page_table, table_stride, window, most_splits, most_blocks,
                  [&](const Tokens& own, const Keys& keys, int head, int) {
                      const int kv = head / (OP_Q_HEADS / OP_KV_HEADS);
                      const Pool pool{{key_pool, value_pool}, own.pages, kv, own.start + own.count};
                      pool.bring(keys, ring, barriers, copied);
                  });
        end_copy_group(), wait_copy_groups<0>();
        return;
    }
    more_registers<224>();
    const Turns turns(warp / 4);
    Place at[2];  // of the next tile of keys, of values
    auto attend = [&](const Tokens& own, const Keys& keys, int head, int split) {
        const int first = own.first + warp * 16, m = first + g, splits = keys.splits;
        auto await = [&](int what) {
            wait_barrier(barriers.full[what][at[what].stage], at[what].round);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // copies of threads, which products read
        };
        auto stage = [&](int what) { return ring + (what * kStages + at[what].stage) * kTile; };
        auto leave = [&](int what) {
            if (lane == 0) arrive(barriers.empty[what][at[what].stage]);
            at[what].next();
        };
        Reader reader;
        reader.load(queries, own, m, head);
        float s[kKeys / 2], kept[2];
        u32 weights[kKeys / 16][4];
        auto weigh = [&](int tile) {
            if (window > 0 || tile * kKeys + kKeys - 1 > own.start + first)
                mask<kKeys>(s, tile * kKeys, own.start + m, window);
            reader.rows.weigh<kKeys>(s, scale, kept);
        };
        const int count = keys.end - keys.tile + 1;
        await(0);
        reader.start_scores(s, stage(0));
        wait_products<0>();
        settle(s);
        leave(0);
        weigh(keys.tile);
        pack(weights, s);
        for (int n = 1; n < count; ++n) {
            await(0);
            turns.await();
            reader.start_scores(s, stage(0));
            await(1);
            reader.start_values(weights, stage(1));
            turns.pass();
            wait_products<1>();
            settle(s);
            leave(0);
            weigh(keys.tile + n);
            wait_products<0>();
            settle(reader.rows.out), settle(weights);
            leave(1);
            reader.rows.keep(kept);
            pack(weights, s);
        }
        await(1);
        reader.start_values(weights, stage(1));
        wait_products<0>();
        settle(reader.rows.out), settle(weights);
        leave(1);
        reader.rows.leave(own, m, head, splits, split, tokens, scale, split_out, split_sums, out);
    };
    if (each_part(where, chunks, page_table, table_stride, window, most_splits, most_blocks, attend) == 1) return;
    put_together(where, chunks, page_table, table_stride, window, most_splits, most_blocks, sums, split_out, split_sums, arrivals,
                 out, tokens);
}
