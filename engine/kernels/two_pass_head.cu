// The best of logit, or of logit / temperature + noise, per batch row, as `head` finds it, key for key, at half the bytes.
//
// First every row of a coarse copy of the matrix is multiplied: int8 with a scale a row. `margins` bounds, for an
// activation of length 1, how far that product and the one that `head` makes of the matrix itself lie apart (see
// `two_pass.py`), so each logit is known between two numbers, and each score too, since scores rise with logits. The
// highest lower bound so far is shared by all blocks; whatever its moment, some row is sure to reach it. Then each block
// multiplies those of its rows again whose upper bound reaches it, from the matrix itself, in the tiles and the order of
// sums that `head` has. The true best is always among them; that the others may differ from run to run shows nowhere.
//
// Each rank of a split model does so for a part of the vocabulary, from `first_token` on. The kernel behind takes the best
// of all ranks.
#include "two_pass.cuh"

extern "C" __global__ void __launch_bounds__(Scan::kThreads, OP_MIN_BLOCKS)
    two_pass_head(const u16* x, const float* squares, const u8* weights, const u8* coarse, const u32* margins,
                  const float* temperature, const u64* noise_key, const int* position, const u32* masks, u32* assured,
                  u64* best, float eps, int first_token, int trigger) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ Scan::Shared shared;
    __shared__ Again::Shared shared_again;
    __shared__ float factor[OP_BATCH], squared[OP_BATCH];
    __shared__ u32 reached[OP_BATCH];  // the highest lower bound, as `ordered`
    __shared__ u64 block_best[OP_BATCH];
    __shared__ u16 list[kBlockRows];
    __shared__ int listed;
    float(*upper)[kBlockRows] = reinterpret_cast<float(*)[kBlockRows]>(ring + OP_RING_BYTES);
    if (trigger == 0) let_next_start();
    if (threadIdx.x < OP_BATCH) squared[threadIdx.x] = 0.f, reached[threadIdx.x] = kReached, block_best[threadIdx.x] = 0;
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
        Drawing drawing[kEach];
        u32 mine[kEach] = {};
        float length[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int m = (threadIdx.x + i * kConsumers) / Scan::kRows;
            if (m < OP_BATCH) drawing[i].load(temperature, noise_key, position, m);
        }
        add_squares(x, squared);
        u32 told = kReached, elsewhere = 0;  // of row threadIdx.x
        for (int first = g.first_tile; first < g.last_tile; first += OP_TILES) {
            u32 margin[kEach], mask[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int o = threadIdx.x + i * kConsumers, m = o / Scan::kRows, row = first * 8 + o % Scan::kRows;
                margin[i] = row < OP_ROWS ? load_constant(margins + row) : 0u;
                mask[i] = m < OP_BATCH && row < OP_ROWS ? mask_word(masks, m, first_token + row, OP_TOKENS) : 0u;
            }
            const bool last = first + OP_TILES >= g.last_tile;
            if (last && threadIdx.x < OP_BATCH) elsewhere = load_shared_state(assured + threadIdx.x);
            g.group();
            if (first == g.first_tile) {
                g.await();
#pragma unroll
                for (int i = 0; i < kEach; ++i)
                    if (const int m = (threadIdx.x + i * kConsumers) / Scan::kRows; m < OP_BATCH)
                        length[i] = sqrtf(squared[m]) * 1.001f + 1e-20f;
            }
            if (threadIdx.x < OP_BATCH) {  // of the groups before
                const u32 now = atomicMax(&reached[threadIdx.x], elsewhere);
                if (now > told) atomicMax(assured + threadIdx.x, now), told = now;
            }
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int o = threadIdx.x + i * kConsumers;
                const int m = o / Scan::kRows, n = o % Scan::kRows, row = first * 8 + n;
                if (m >= OP_BATCH) continue;
                const bool there = row < OP_ROWS && first + n / 8 < g.last_tile, open = allowed(mask[i], first_token + row);
                const Between logit(g.total(m, n), margin[i], length[i], factor[m]);
                const float noise = there ? drawing[i].noise(first_token + row) : 0.f;
                // Nobody asks for an idle row: no bound reaches it.
                const u32 low = drawing[i].place > 0 ? ordered(drawing[i].score(logit.low, noise)) : 0xFFFFFFFFu;
                upper[m][row - g.first_tile * 8] = open ? drawing[i].score(logit.high, noise) : minus_infinity();
                if (there && open && low > mine[i]) {
                    mine[i] = low;
                    atomicMax(&reached[m], low);
                }
            }
            g.next_group();
        }
        g.sync_consumers();
        const int rows = (g.last_tile - g.first_tile) * 8;
        for (int n = threadIdx.x; n < rows; n += kConsumers) {
            bool may_win = false;
#pragma unroll
            for (int m = 0; m < OP_BATCH; ++m) may_win = may_win || ordered(upper[m][n]) >= reached[m];
            if (may_win && g.first_tile * 8 + n < OP_ROWS) list[atomicAdd(&listed, 1)] = u16(n);
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
            if (at >= count) continue;
            Drawing drawing;
            drawing.load(temperature, noise_key, position, m);
            const int row = again.map.first + list[at], id = first_token + row;
            if (!allowed(mask_word(masks, m, id, OP_TOKENS), id)) continue;
            atomicMax(&block_best[m], candidate(drawing.score(again.total(m, n) * factor[m], drawing.noise(id)), id));
        }
        again.next_group();
    }
    again.sync_consumers();
    if (threadIdx.x < OP_BATCH) atomicMax(best + threadIdx.x, block_best[threadIdx.x]);
}
