// out = silu(gate) · up, bf16, where gate and up are rms_norm(residual) times the two halves of W.
#include "gemv.cuh"

using Map = GateAndUp<OP_HALF>;
using G = Gemv<OP_FORMAT, OP_GROUP, OP_COLUMNS, OP_WARPS, OP_DEPTH, OP_TILES, OP_BLOCK_TILES, OP_RING, OP_WINDOW, OP_BATCH, Map>;
static_assert(OP_TILES % 2 == 0 && OP_BLOCK_TILES % 2 == 0, "gate and up go together");
constexpr int kConsumers = OP_WARPS * 32;
constexpr int kWide = OP_TILES * 4;                             // outputs a batch row has in a group
constexpr int kEach = ceil_div(OP_BATCH * kWide, kConsumers);     // and a thread

extern "C" __global__ void __launch_bounds__(G::kThreads, OP_MIN_BLOCKS)
    gate_up(const u16* x, const float* squares, const u8* weights, const u32* scales, const float* row_scale,
            const float* bias, u16* out, float eps, int trigger) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ G::Shared shared;
    __shared__ float factor[OP_BATCH];
    if (trigger == 0) let_next_start();
    G g(weights, scales, x, shared, ring);
    g.fill();
    float gate_scale[kEach], up_scale[kEach], gate_offset[kEach], up_offset[kEach];
    auto constants = [&](int first) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int row = first * 4 + (threadIdx.x + i * kConsumers) % kWide;
            const bool scaled = OP_FORMAT == kInt8 && row < OP_HALF, moved = bias != nullptr && row < OP_HALF;
            gate_scale[i] = scaled ? load_constant(row_scale + row) : 1.f;
            up_scale[i] = scaled ? load_constant(row_scale + OP_HALF + row) : 1.f;
            gate_offset[i] = moved ? load_constant(bias + row) : 0.f;
            up_offset[i] = moved ? load_constant(bias + OP_HALF + row) : 0.f;
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
            const int m = o / kWide, j = o % kWide, n = (j / 8) * 16 + j % 8, row = first * 4 + j;
            if (m < OP_BATCH && first + j / 4 < g.last_tile) {
                const float gate = g.total(m, n) * factor[m] * gate_scale[i] + gate_offset[i];
                const float up = g.total(m, n + 8) * factor[m] * up_scale[i] + up_offset[i];
                out[u64(m) * OP_HALF + row] = to_bf16(gate / (1.f + expf(-gate)) * up);
            }
        }
        if constexpr (G::kGroups > 1) constants(first + OP_TILES);
        g.next_group();
    }
}
