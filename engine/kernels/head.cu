// The vocabulary's logits of rms_norm(residual), and the best of logit (greedy) or logit / temperature + noise per batch
// row. The best is a maximum over 64-bit keys, so the order in which blocks report does not matter.
#include "drawing.cuh"
#include "gemv.cuh"

using Map = RowsInOrder<OP_ROWS>;
using G = Gemv<OP_FORMAT, OP_GROUP, OP_COLUMNS, OP_WARPS, OP_DEPTH, OP_TILES, OP_BLOCK_TILES, OP_RING, OP_WINDOW, OP_BATCH, Map>;
constexpr int kConsumers = OP_WARPS * 32;
constexpr int kEach = ceil_div(OP_BATCH * G::kRows, kConsumers);  // outputs a thread has in a group

extern "C" __global__ void __launch_bounds__(G::kThreads, OP_MIN_BLOCKS)
    head(const u16* x, const float* squares, const u8* weights, const u32* scales, const float* row_scale,
         const float* temperature, const u64* noise_key, const int* position, const u32* masks, float* logits,
         u64* best, float eps, int trigger) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ G::Shared shared;
    __shared__ float factor[OP_BATCH];
    __shared__ u64 block_best[OP_BATCH];
    if (trigger == 0) let_next_start();
    G g(weights, scales, x, shared, ring);
    g.fill();
    if (threadIdx.x < OP_BATCH) block_best[threadIdx.x] = 0;
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (g.produces()) {
        for (int m = 0; m < OP_BATCH; ++m)
            factor[m] = inverse_rms<OP_SQUARES>(squares + m * OP_SQUARES, OP_COLUMNS, eps, g.lane);
        g.tell();
        g.produce();
        return;
    }
    g.start_x();
    u64 mine[kEach] = {};
    Drawing drawing[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int m = (threadIdx.x + i * kConsumers) / G::kRows;
        if (m < OP_BATCH) drawing[i].load(temperature, noise_key, position, m);
    }
    for (int first = g.first_tile; first < g.last_tile; first += OP_TILES) {
        u32 mask[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int o = threadIdx.x + i * kConsumers, m = o / G::kRows, row = first * 8 + o % G::kRows;
            mask[i] = m < OP_BATCH && row < OP_ROWS ? mask_word(masks, m, row, OP_ROWS) : 0u;
        }
        g.group();
        if (first == g.first_tile) g.await();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int o = threadIdx.x + i * kConsumers;
            const int m = o / G::kRows, n = o % G::kRows, row = first * 8 + n;
            if (m < OP_BATCH && row < OP_ROWS && first + n / 8 < g.last_tile) {
                float v = g.total(m, n) * factor[m];
                if constexpr (OP_FORMAT == kInt8) v *= load_constant(row_scale + row);
                if (logits != nullptr) logits[u64(m) * OP_ROWS + row] = v;
                if (!allowed(mask[i], row)) continue;
                const u64 c = candidate(drawing[i].score(v, drawing[i].noise(row)), row);
                mine[i] = c > mine[i] ? c : mine[i];
            }
        }
        g.next_group();
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int m = (threadIdx.x + i * kConsumers) / G::kRows;
        if (m < OP_BATCH) atomicMax(&block_best[m], mine[i]);
    }
    g.sync_consumers();
    if (threadIdx.x < OP_BATCH) atomicMax(best + threadIdx.x, block_best[threadIdx.x]);
}
