// residual += x · Wᵀ, then what the next norm needs: bf16(residual · gain) and the sums of squares of every eight values.
// The attention output and the MLP's down projection. Of a split model, each rank multiplies its columns, and the sums of
// all ranks are added.
#include "exchange.cuh"
#include "gemv.cuh"

static_assert(OP_ROWS % 8 == 0, "rows");
using Map = RowsInOrder<OP_ROWS>;
using G = Gemv<OP_FORMAT, OP_GROUP, OP_COLUMNS, OP_WARPS, OP_DEPTH, OP_TILES, OP_BLOCK_TILES, OP_RING, OP_WINDOW, OP_BATCH, Map>;
// Where ranks wait for each other, weights that the next kernel asks for too early delay the words: 3 µs a layer.
constexpr bool kLate = OP_RANKS > 1;
constexpr int kConsumers = OP_WARPS * 32;
constexpr int kEach = ceil_div(OP_BATCH * G::kRows, kConsumers);  // outputs a thread has in a group

extern "C" __global__ void __launch_bounds__(G::kThreads, OP_MIN_BLOCKS)
    linear_residual(const u16* x, const u8* weights, const u32* scales, const float* row_scale, const float* bias,
                    const float* gain, float* residual, u16* normed, float* squares, const u64* inboxes, u32* counts, int rank,
                    int half, int room, int trigger) {
    extern __shared__ __align__(128) u8 ring[];
    __shared__ G::Shared shared;
    if (trigger == 0 && !kLate) let_next_start();
    G g(weights, scales, x, shared, ring);
    g.fill();
    float scale[kEach], offset[kEach], next_gain[kEach], before[kEach];
    auto row_of = [&](int first, int i) {
        const int row = first * 8 + (threadIdx.x + i * kConsumers) % G::kRows;
        return row < OP_ROWS ? row : OP_ROWS - 1;
    };
    auto constants = [&](int first) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int row = row_of(first, i);
            scale[i] = OP_FORMAT == kInt8 ? load_constant(row_scale + row) : 1.f;
            offset[i] = bias != nullptr ? load_constant(bias + row) : 0.f;
            next_gain[i] = load_constant(gain + row);
        }
    };
    auto residuals = [&](int first) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int m = (threadIdx.x + i * kConsumers) / G::kRows;
            before[i] = m < OP_BATCH ? load_shared_state(residual + u64(m) * OP_ROWS + row_of(first, i)) : 0.f;
        }
    };
    constants(g.first_tile);
    Exchange exchange(inboxes, counts, rank, half, room);
    wait_for_previous();
    if (trigger == 1 || (trigger == 0 && kLate)) let_next_start();
    if (g.produces()) {
        g.produce();
        return;
    }
    g.start_x();
    residuals(g.first_tile);
    exchange.begin();
    for (int first = g.first_tile; first < g.last_tile; first += OP_TILES) {
        g.group();
        float v[kEach];
        auto mine = [&](int i) {
            const int o = threadIdx.x + i * kConsumers;
            return o / G::kRows < OP_BATCH && first + o % G::kRows / 8 < g.last_tile;
        };
        auto slot = [&](int i) { return (first - g.first_tile) * 8 * OP_BATCH + int(threadIdx.x) + i * kConsumers; };
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int o = threadIdx.x + i * kConsumers;
            v[i] = mine(i) ? g.total(o / G::kRows, o % G::kRows) * scale[i] + offset[i] : 0.f;
            if (OP_RANKS > 1 && mine(i)) exchange.send(slot(i), __float_as_uint(v[i]));
        }
        if constexpr (OP_RANKS > 1) exchange.sum(slot, mine, v);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int o = threadIdx.x + i * kConsumers;
            const int m = o / G::kRows, n = o % G::kRows, row = first * 8 + n;
            if (mine(i)) {
                v[i] += before[i];
                residual[u64(m) * OP_ROWS + row] = v[i];
                normed[u64(m) * OP_ROWS + row] = to_bf16(v[i] * next_gain[i]);
            }
            float square = v[i] * v[i];  // eight lanes in a row hold one tile of one batch row
#pragma unroll
            for (int d = 4; d > 0; d >>= 1) square += __shfl_xor_sync(0xFFFFFFFFu, square, d);
            if (mine(i) && n % 8 == 0) squares[m * Map::kTiles + row / 8] = square;
        }
        if constexpr (G::kGroups > 1) {
            if (first + OP_TILES < g.last_tile) constants(first + OP_TILES), residuals(first + OP_TILES);
        }
        g.next_group();
    }
    if (OP_RANKS > 1 && threadIdx.x == 0) exchange.end();
}
