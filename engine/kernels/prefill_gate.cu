// out[token] = silu(gate) · up, gate the first half of a product's row, up the second.
#include "order.cuh"
#include "parts.cuh"

constexpr int kThreads = 256;
static_assert(OP_HALF % 2 == 0, "columns");

extern "C" __global__ void __launch_bounds__(kThreads)
    gate(const u8* product, const float* bias, int slices, u16* out, int tokens, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Parts parts{product, bias, slices, u64(tokens) * 2 * OP_HALF};
    const int n = 2 * (blockIdx.x * kThreads + threadIdx.x);
    if (n >= OP_HALF) return;
    const u64 row = u64(blockIdx.y) * 2 * OP_HALF;
    const Float2 g = parts.pair(row + n, n), u = parts.pair(row + OP_HALF + n, OP_HALF + n);
    const float x = g.x / (1.f + __expf(-g.x)) * u.x, y = g.y / (1.f + __expf(-g.y)) * u.y;
    *reinterpret_cast<u32*>(out + place_of<OP_HALF>(n, blockIdx.y, tokens)) = pack_bf16(x, y);
}
