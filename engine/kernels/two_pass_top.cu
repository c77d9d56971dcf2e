// The logits of what top_k may keep, per batch row, as `head` finds them, bit for bit, at half the bytes; of all others
// that they were left out. For launches whose every row is idle or keeps a top_k and needs no logit beside.
//
// The first pass is that of `two_pass_head`. Each block's highest lower bound is shared with all blocks: where k blocks
// have one of at least v, k tokens are sure to reach v. Rows of the matrix whose upper bound reaches the largest such v
// are multiplied again: what top_k keeps, and whatever ties with its last, is among them. A block waits for the bounds of
// all others, so all must run at once: the grid has no more blocks than there are multiprocessors.
#include "two_pass.cuh"
#include "words.cuh"

constexpr int kRowWords = 16, kTopWord = 1;  // of `sampling.cuh`'s Row

extern "C" __global__ void __launch_bounds__(Scan::kThreads, OP_MIN_BLOCKS)
    two_pass_top(const u16* x, const float* squares, const u8* weights, const u8* coarse, const u32* margins,
                 const int* rows, const int* position, const u32* masks, u64* bounds, int bounds_stride, u32* launches,
                 float* logits, float eps, int trigger) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ Scan::Shared shared;
    __shared__ Again::Shared shared_again;
    __shared__ float factor[OP_BATCH], squared[OP_BATCH];
    __shared__ u32 highest[OP_BATCH], reached[OP_BATCH];  // lower bounds, as `ordered`: of the block, of top_k tokens
    __shared__ u32 others[OP_BATCH][OP_BLOCKS];
    __shared__ u32 number;
    __shared__ u16 list[kBlockRows];
    __shared__ int listed;
    float(*upper)[kBlockRows] = reinterpret_cast<float(*)[kBlockRows]>(ring + OP_RING_BYTES);
    if (trigger == 0) let_next_start();
    if (threadIdx.x < OP_BATCH) squared[threadIdx.x] = 0.f, highest[threadIdx.x] = 0, reached[threadIdx.x] = kReached;
    if (threadIdx.x == 0) listed = 0;
    Scan g(coarse, nullptr, x, shared, ring);
    g.fill();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (g.produces()) {
        for (int m = 0; m < OP_BATCH; ++m)
            factor[m] = inverse_rms<OP_SQUARES>(squares + m * OP_SQUARES, OP_COLUMNS, eps, g.lane);
        g.tell();
        g.produce();
    } else {
        g.start_x();
        if (threadIdx.x == 0) number = load_shared_state(launches) + 1;
        bool live[kEach];
        u32 mine[kEach] = {};
        float length[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int m = (threadIdx.x + i * kConsumers) / Scan::kRows;
            live[i] = m < OP_BATCH && load_shared_state(position + m) >= 0;
        }
        add_squares(x, squared);
        for (int first = g.first_tile; first < g.last_tile; first += OP_TILES) {
            u32 margin[kEach], mask[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int o = threadIdx.x + i * kConsumers, m = o / Scan::kRows, row = first * 8 + o % Scan::kRows;
                margin[i] = row < OP_ROWS ? load_constant(margins + row) : 0u;
                mask[i] = m < OP_BATCH && row < OP_ROWS ? mask_word(masks, m, row, OP_ROWS) : 0u;
            }
            g.group();
            if (first == g.first_tile) {
                g.await();
#pragma unroll
                for (int i = 0; i < kEach; ++i)
                    if (const int m = (threadIdx.x + i * kConsumers) / Scan::kRows; m < OP_BATCH)
                        length[i] = sqrtf(squared[m]) * 1.001f + 1e-20f;
            }
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int o = threadIdx.x + i * kConsumers;
                const int m = o / Scan::kRows, n = o % Scan::kRows, row = first * 8 + n;
                if (m >= OP_BATCH) continue;
                const bool there = row < OP_ROWS && first + n / 8 < g.last_tile, open = live[i] && allowed(mask[i], row);
                const Between logit(g.total(m, n), margin[i], length[i], factor[m]);
                upper[m][row - g.first_tile * 8] = open ? logit.high : minus_infinity();
                if (const u32 low = ordered(logit.low); there && open && low > mine[i]) mine[i] = low;
            }
            g.next_group();
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (const int m = (threadIdx.x + i * kConsumers) / Scan::kRows; m < OP_BATCH) atomicMax(&highest[m], mine[i]);
        g.sync_consumers();
        if (threadIdx.x < OP_BATCH) put_word(bounds + threadIdx.x * bounds_stride + blockIdx.x, highest[threadIdx.x], number);
        for (int at = threadIdx.x; at < OP_BATCH * OP_BLOCKS; at += kConsumers) {
            const u64* from = bounds + at / OP_BLOCKS * bounds_stride + at % OP_BLOCKS;
            u64 word = get_word(from);
            while (u32(word >> 32) != number) word = get_word(from);
            others[at / OP_BLOCKS][at % OP_BLOCKS] = u32(word);
        }
        g.sync_consumers();
        if (blockIdx.x == 0 && threadIdx.x == 0) *launches = number;  // all blocks have read it
        for (int at = threadIdx.x; at < OP_BATCH * OP_BLOCKS; at += kConsumers) {
            const int m = at / OP_BLOCKS;
            const u32 own = others[m][at % OP_BLOCKS];
            int as_high = 0;
            for (int i = 0; i < OP_BLOCKS; ++i) as_high += others[m][i] >= own ? 1 : 0;
            const int top = rows[m * kRowWords + kTopWord];
            if (top > 0 && as_high >= top) atomicMax(&reached[m], own);
        }
        g.sync_consumers();
        const int count = (g.last_tile - g.first_tile) * 8;
        for (int n = threadIdx.x; n < count; n += kConsumers) {
            const int row = g.first_tile * 8 + n;
            if (row >= OP_ROWS) continue;
            bool may_stay = false;
#pragma unroll
            for (int m = 0; m < OP_BATCH; ++m) may_stay = may_stay || ordered(upper[m][n]) >= reached[m];
            if (may_stay) {
                list[atomicAdd(&listed, 1)] = u16(n);
            } else {
#pragma unroll
                for (int m = 0; m < OP_BATCH; ++m) logits[u64(m) * OP_ROWS + row] = left_out();
            }
        }
    }
    __syncthreads();
    const int count = listed;
    if (count == 0) return;
    Again again(weights, nullptr, x, shared_again, ring, Listed{list, g.first_tile * 8, count});
    again.first_tile = 0;
    again.last_tile = again.groups = ceil_div(count, 8);
    again.fill();
    if (again.produces()) {
        again.produce();
        return;
    }
    again.start_x();
    for (int tile = 0; tile < again.last_tile; ++tile) {
        again.group();
        for (int o = threadIdx.x; o < OP_BATCH * 8; o += kConsumers) {
            const int m = o / 8, n = o % 8, at = tile * 8 + n;
            if (at < count) logits[u64(m) * OP_ROWS + again.map.first + list[at]] = again.total(m, n) * factor[m];
        }
        again.next_group();
    }
}
