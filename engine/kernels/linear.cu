// out = rms_norm(residual) · Wᵀ (+ bias), float32: queries, keys and values of a layer.
// The kernel before left bf16(residual · gain) and the squares' sums, so the norm is one factor at the end.
#include "gemv.cuh"

using Map = RowsInOrder<OP_ROWS>;
using G = Gemv<OP_FORMAT, OP_GROUP, OP_COLUMNS, OP_WARPS, OP_DEPTH, OP_TILES, OP_BLOCK_TILES, OP_RING, OP_WINDOW, OP_BATCH, Map>;
constexpr int kConsumers = OP_WARPS * 32;
constexpr int kEach = ceil_div(OP_BATCH * G::kRows, kConsumers);  // outputs a thread has in a group

extern "C" __global__ void __launch_bounds__(G::kThreads, OP_MIN_BLOCKS)
    linear(const u16* x, const float* squares, const u8* weights, const u32* scales, const float* row_scale,
           const float* bias, float* out, float eps, int trigger) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ G::Shared shared;
    __shared__ float factor[OP_BATCH];
    if (trigger == 0) let_next_start();
    G g(weights, scales, x, shared, ring);
    g.fill();
    float scale[kEach], offset[kEach];
    auto constants = [&](int first) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int row = first * 8 + (threadIdx.x + i * kConsumers) % G::kRows;
            scale[i] = OP_FORMAT == kInt8 && row < OP_ROWS ? load_constant(row_scale + row) : 1.f;
            offset[i] = bias != nullptr && row < OP_ROWS ? load_constant(bias + row) : 0.f;
        }
    };
    constants(g.first_tile);
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
    for (int first = g.first_tile; first < g.last_tile; first += OP_TILES) {
        g.group();
        if (first == g.first_tile) g.await();
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int o = threadIdx.x + i * kConsumers;
            const int m = o / G::kRows, n = o % G::kRows, row = first * 8 + n;
            if (m < OP_BATCH && row < OP_ROWS && first + n / 8 < g.last_tile)
                out[u64(m) * OP_ROWS + row] = g.total(m, n) * factor[m] * scale[i] + offset[i];
        }
        if constexpr (G::kGroups > 1) constants(first + OP_TILES);
        g.next_group();
    }
}
