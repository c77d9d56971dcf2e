// `prefill_attention` for GPUs of compute capability 9.0, by products of warpgroups: 128 tokens of one head a block.
//
// Two warpgroups have 64 tokens each; a third copies pages into a ring of two tiles of keys and two of values. While the
// products with a tile's values run, the scores of the next are made and weighed.
#include "chunk_tiles.cuh"
#include "warpgroup.cuh"

constexpr int kReaders = 2, kQueries = kReaders * 64, kThreads = kReaders * 128;  // threads that compute
constexpr int kKeys = 128, kStages = 2;
constexpr int kPanel = kKeys * 128, kTile = kDim / 64 * kPanel;  // bytes of 64 columns of a tile; of a tile
constexpr int kSegments = kDim / 8, kAtOnce = 128 / kSegments;  // of a row; rows that the copying threads copy at once
static_assert(kDim == 64 || kDim == 128, "head");

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
    const u8* of[2];  // keys, values
    const int* pages;
    int kv, known;  // positions written

    // One tile of keys or of values; `id`: a lane's page of the tile.
    __device__ __forceinline__ void copy(int what, u8* to, int tile, int id) const {
        const int i = threadIdx.x % 128, segment = i % kSegments, row0 = i / kSegments;
        u8* target = to + segment / 8 * kPanel;
#pragma unroll
        for (int n = 0; n < kKeys / kAtOnce; ++n) {
            const int row = n * kAtOnce + row0;
            const bool there = tile * kKeys + row < known;  // what lies past it may be anything, even NaN
            const u64 page = u64(__shfl_sync(0xFFFFFFFFu, id, n * kAtOnce / kPage));
            const u64 from = ((page * OP_KV_HEADS + kv) * kPage + row % kPage) * (kDim * 2) + segment * 16;
            copy_async(target + row * 128 + ((segment ^ row) & 7) * 16, of[what] + from, there);
        }
    }

    __device__ __forceinline__ void bring(const Keys& keys, u8* ring, Barriers& barriers) const {
        constexpr int kBehind = 2;  // copies of a tile under way when the one before them is announced
        const int lane = threadIdx.x % 32;
        const int last = (known - 1) / kPage;
        auto page_of = [&](int tile) {
            const int n = tile * (kKeys / kPage) + lane;
            return lane < kKeys / kPage && n <= last ? pages[n] : 0;
        };
        int id = page_of(keys.tile), copied = 0, told = 0;
        auto tell = [&] {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            arrive(barriers.full[told % 2][told / 2 % kStages]);
            ++told;
        };
        for (int tile = keys.tile; tile <= keys.end; ++tile) {
            const int next = tile < keys.end ? page_of(tile + 1) : 0;
#pragma unroll
            for (int what = 0; what < 2; ++what) {
                const int round = copied / 2 / kStages, stage = copied / 2 % kStages;
                wait_barrier(barriers.empty[what][stage], (round & 1) ^ 1);
                copy(what, ring + (what * kStages + stage) * kTile, tile, id);
                end_copy_group();
                ++copied;
                if (copied > kBehind) wait_copy_groups<kBehind>(), tell();
            }
            id = next;
        }
        wait_copy_groups<0>();
        while (told < copied) tell();
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

// Grid: heads, tiles of tokens, parts of a context.
extern "C" __global__ void __launch_bounds__(kThreads + 128, 1)
    prefill_attention(const u16* queries, const u8* key_pool, const u8* value_pool, const Quad* where, int chunks,
                      const int* page_table, int table_stride, float* split_out, Float2* split_sums, int* arrivals,
                      u16* out, int tokens, float scale, int window, int most_blocks, int trigger) {
    extern __shared__ __align__(1024) u8 ring[];
    __shared__ Barriers barriers;
    __shared__ bool last_one;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const int head = blockIdx.x, block = gridDim.y - 1 - blockIdx.y;  // those that see most come first
    if (trigger == 0) let_next_start();
    barriers.init();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Tokens own = tokens_of<kQueries>(where, chunks, page_table, table_stride, block);
    if (!own.any()) return;
    Keys keys;
    if (!keys.divide<kQueries, kKeys>(own, window, most_splits(own, most_blocks), blockIdx.z)) return;
    const int splits = keys.splits;

    if (warp >= kThreads / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        const Pool pool{{key_pool, value_pool}, own.pages, head / (OP_Q_HEADS / OP_KV_HEADS), own.start + own.count};
        pool.bring(keys, ring, barriers);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int first = own.first + warp * 16, m = first + g;
    auto stage = [&](int what, int n) { return ring + (what * kStages + n % kStages) * kTile; };
    auto await = [&](int what, int n) { wait_barrier(barriers.full[what][n % kStages], n / kStages & 1); };
    auto leave = [&](int what, int n) {
        if (lane == 0) arrive(barriers.empty[what][n % kStages]);
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
    await(0, 0);
    reader.start_scores(s, stage(0, 0));
    wait_products<0>();
    settle(s);
    leave(0, 0);
    weigh(keys.tile);
    pack(weights, s);
    for (int n = 1; n < count; ++n) {
        await(0, n);
        reader.start_scores(s, stage(0, n));
        await(1, n - 1);
        reader.start_values(weights, stage(1, n - 1));
        wait_products<1>();
        settle(s);
        leave(0, n);
        weigh(keys.tile + n);
        wait_products<0>();
        settle(reader.rows.out), settle(weights);
        leave(1, n - 1);
        reader.rows.keep(kept);
        pack(weights, s);
    }
    await(1, count - 1);
    reader.start_values(weights, stage(1, count - 1));
    wait_products<0>();
    settle(reader.rows.out), settle(weights);
    reader.rows.leave(own, m, head, splits, blockIdx.z, tokens, scale, split_out, split_sums, out);
    if (splits == 1) return;
    auto sync = [] { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); };
    __threadfence();
    sync();
    if (threadIdx.x == 0) last_one = is_last(arrivals + block * gridDim.x + head, splits);
    sync();
    if (!last_one) return;
    __threadfence();
    merge_parts<kQueries, kThreads>(reinterpret_cast<Float2(*)[kMostSplits]>(ring), split_out, split_sums, own, splits, head,
                                    tokens, out, sync);
}
