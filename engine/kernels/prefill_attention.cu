// Attention of chunks of sequences over their pages, where the chunks' own keys and values already are.
//
// A block has 64 tokens of one head, a warp 16 of them. Keys and values come by tiles of kKeys, the next on its way while
// one is worked on; the maximum and the sum of the exponents run along. A long context is divided among the blocks of the
// grid's third dimension; whichever of them comes last puts the parts together.
#include "chunk_tiles.cuh"

constexpr int kWarps = 4, kThreads = kWarps * 32, kQueries = kWarps * 16;
constexpr int kKeys = kDim > 128 ? 16 : 64;
constexpr int kRow = kDim + 8;  // values of a row in shared memory: eight rows of a matrix never share a bank
constexpr int kSegments = kDim / 8, kSteps = kDim / 16;
constexpr int kTile = kKeys * kRow;
static_assert(kDim % 16 == 0 && kDim <= 256, "head");

struct Pool {
    const Stored *keys, *values;
    const int* pages;
    int kv, known;  // positions written

    __device__ __forceinline__ void load(u16* to, int tile) const {
        for (int i = threadIdx.x; i < kKeys * kSegments; i += kThreads) {
            const int k = i / kSegments, s = i % kSegments, at = tile * kKeys + k;
            const bool there = at < known;  // what lies past it may be anything, even NaN
            const u64 page = there ? u64(pages[at / kPage]) : 0;
            const u64 from = ((page * OP_KV_HEADS + kv) * kPage + at % kPage) * kDim + s * 8;
            if constexpr (kKvBytes == 2) {
                copy_async(to + k * kRow + s * 8, keys + from, there);
                copy_async(to + kTile + k * kRow + s * 8, values + from, there);
            } else {
                Eight key = {}, value = {};
                if (there) load_words(key.w, static_cast<const void*>(keys + from));
                if (there) load_words(value.w, static_cast<const void*>(values + from));
                *reinterpret_cast<Quad*>(to + k * kRow + s * 8) = widen(key);
                *reinterpret_cast<Quad*>(to + kTile + k * kRow + s * 8) = widen(value);
            }
        }
    }
};

// rows.out += weights · values, weights [16 tokens, kKeys] as the tensor core leaves scores.
__device__ __forceinline__ void add_values(Rows& rows, const float (&s)[kKeys / 2], const u16* values, int lane) {
    const u16* row = values + (lane % 16) * kRow + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
        const u32 a[4] = {pack_bf16(s[8 * j], s[8 * j + 1]), pack_bf16(s[8 * j + 2], s[8 * j + 3]),
                          pack_bf16(s[8 * j + 4], s[8 * j + 5]), pack_bf16(s[8 * j + 6], s[8 * j + 7])};
#pragma unroll
        for (int d = 0; d < kSteps; ++d) {
            const Quad v = load_matrices_transposed(row + j * 16 * kRow + d * 16);
            mma(*reinterpret_cast<float(*)[4]>(rows.out + 8 * d), a, v.r[0], v.r[1]);
            mma(*reinterpret_cast<float(*)[4]>(rows.out + 8 * d + 4), a, v.r[2], v.r[3]);
        }
    }
}

// Grid: heads, tiles of tokens, parts of a context.
extern "C" __global__ void __launch_bounds__(kThreads)
    prefill_attention(const u16* queries, const Stored* key_pool, const Stored* value_pool, const Quad* where, int chunks,
                      const int* page_table, int table_stride, float* split_out, Float2* split_sums, int* arrivals,
                      u16* out, int tokens, float scale, int window, int most_splits, int most_blocks, int trigger) {
    extern __shared__ __align__(128) u16 shared[];
    __shared__ bool last_one;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
    const int head = blockIdx.x, block = gridDim.y - 1 - blockIdx.y;  // those that see most come first
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Table<kQueries> table(where, chunks);
    if (block >= table.tiles) return;
    const Tokens own = table.find(page_table, table_stride, block);
    Keys keys;
    if (!keys.divide<kQueries, kKeys>(own, window, most_parts(table.tiles, most_splits, most_blocks), blockIdx.z)) return;
    const int splits = keys.splits, first = own.first, count = own.count;
    u16 *query = shared, *stages = shared + kQueries * kRow;
    const Pool pool{key_pool, value_pool, own.pages, head / (OP_Q_HEADS / OP_KV_HEADS), own.start + count};
    for (int i = threadIdx.x; i < kQueries * kSegments; i += kThreads) {
        const int m = i / kSegments, s = i % kSegments;
        const bool there = first + m < count;
        const u64 row = own.offset + (there ? first + m : 0);
        copy_async(query + m * kRow + s * 8, queries + (row * OP_Q_HEADS + head) * kDim + s * 8, there);
    }
    pool.load(stages, keys.tile);
    end_copy_group();

    Rows rows;
    const int position = own.start + first + warp * 16 + g;
    const u16* a_row = query + (warp * 16 + lane % 16) * kRow + lane / 16 * 8;
    int half = 0;
    for (int tile = keys.tile; tile <= keys.end; ++tile, half ^= 1) {
        if (tile < keys.end) pool.load(stages + (half ^ 1) * 2 * kTile, tile + 1);
        end_copy_group();
        wait_copy_groups<1>();
        __syncthreads();
        const u16* here = stages + half * 2 * kTile;
        const u16* b_row = here + (lane / 16 * 8 + lane % 8) * kRow + lane / 8 % 2 * 8;
        float s[kKeys / 2] = {}, kept[2];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const Quad q = load_matrices(a_row + k * 16);
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                const Quad b = load_matrices(b_row + n * 16 * kRow + k * 16);
                mma(*reinterpret_cast<float(*)[4]>(s + 8 * n), q.r, b.r[0], b.r[1]);
                mma(*reinterpret_cast<float(*)[4]>(s + 8 * n + 4), q.r, b.r[2], b.r[3]);
            }
        }
        if (window > 0 || tile * kKeys + kKeys - 1 > own.start + first + warp * 16)
            mask<kKeys>(s, tile * kKeys, position, window);
        rows.weigh<kKeys>(s, scale, kept);
        rows.keep(kept);
        add_values(rows, s, here + kTile, lane);
        __syncthreads();
    }
    wait_copy_groups<0>();
    rows.leave(own, first + warp * 16 + g, head, splits, blockIdx.z, tokens, scale, split_out, split_sums, out);
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_one = is_last(arrivals + block * gridDim.x + head, splits);
    __syncthreads();
    if (!last_one) return;
    __threadfence();
    merge_parts<kQueries, kThreads>(reinterpret_cast<Float2(*)[kMostSplits]>(shared), split_out, split_sums, own, splits,
                                    head, tokens, out, [] { __syncthreads(); });
}
