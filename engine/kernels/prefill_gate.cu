// out[token] = silu(gate) · up, gate the first half of a product's row, up the second.
#include "gating.cuh"
#include "order.cuh"
#include "parts.cuh"

constexpr int kThreads = 256;
constexpr int kColumns = !OP_SLICES && OP_ORDER == kBf16 && OP_HALF % 8 == 0 ? 8 : 2;  // of a thread
static_assert(OP_HALF % 2 == 0, "columns");

__device__ __forceinline__ u32 gated(u32 gate, u32 up) {
    return pack_bf16(gated(bf16_to_float(u16(gate)), bf16_to_float(u16(up))),
                     gated(bf16_to_float(u16(gate >> 16)), bf16_to_float(u16(up >> 16))));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gate(const u8* product, const float* bias, int slices, u16* out, int tokens, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int n = kColumns * (blockIdx.x * kThreads + threadIdx.x);
    if (n >= OP_HALF) return;
    const u64 row = u64(blockIdx.y) * 2 * OP_HALF;
    if constexpr (kColumns == 8) {
        const u8* from = product + (row + n) * 2;
        const Quad g = load_shared_state(static_cast<const void*>(from));
        const Quad u = load_shared_state(static_cast<const void*>(from + OP_HALF * 2));
        Quad both;
#pragma unroll
        for (int i = 0; i < 4; ++i) both.r[i] = gated(g.r[i], u.r[i]);
        *reinterpret_cast<Quad*>(out + u64(blockIdx.y) * OP_HALF + n) = both;
    } else {
        const Parts parts{product, bias, slices, u64(tokens) * 2 * OP_HALF};
        const Float2 g = parts.pair(row + n, n), u = parts.pair(row + OP_HALF + n, OP_HALF + n);
        *reinterpret_cast<u32*>(out + place_of<OP_HALF>(n, blockIdx.y, tokens)) =
            pack_bf16(gated(g.x, u.x), gated(g.y, u.y));
    }
}
