// Results of a block of a product of many tokens, from shared memory to where they are read.
#pragma once
#include "formats.cuh"

// tile: float32 [TOKENS][pitch], of which ROWS a token count. One slice: bf16 [tokens, rows], scaled (eight bits) and with
// its bias; several: float32 [slices, tokens, rows].
template <int TOKENS, int ROWS>
__device__ __forceinline__ void store_tile(const float* tile, int pitch, int row0, int token0, const float* row_scale,
                                           const float* bias, u8* out, int rows, int tokens) {
    for (int i = threadIdx.x; i < TOKENS * ROWS / 2; i += blockDim.x) {
        const int token = i / (ROWS / 2), r = i % (ROWS / 2) * 2, row = row0 + r;
        if (token0 + token >= tokens || row >= rows) continue;
        float v[2] = {tile[token * pitch + r], tile[token * pitch + r + 1]};
        const bool both = row + 1 < rows;
        if constexpr (OP_FORMAT == kInt8) v[0] *= row_scale[row], v[1] *= both ? row_scale[row + 1] : 0.f;
        const u64 to = (u64(blockIdx.z) * tokens + token0 + token) * rows + row;
        if constexpr (OP_SPLIT) {
            float* target = reinterpret_cast<float*>(out) + to;
            if (both && rows % 2 == 0)
                *reinterpret_cast<Float2*>(target) = Float2{v[0], v[1]};
            else
                for (int c = 0; c <= int(both); ++c) target[c] = v[c];
        } else {
            if (bias != nullptr) v[0] += bias[row], v[1] += both ? bias[row + 1] : 0.f;
            u16* target = reinterpret_cast<u16*>(out) + to;
            if (both && rows % 2 == 0) {
                *reinterpret_cast<u32*>(target) = pack_bf16(v[0], v[1]);
            } else {
                target[0] = to_bf16(v[0]);
                if (both) target[1] = to_bf16(v[1]);
            }
        }
    }
}
