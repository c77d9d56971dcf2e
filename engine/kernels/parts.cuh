// What a matrix product left for the kernel that reads it: bf16 [tokens, width] with its bias, or, where OP_SLICES is
// set, float32 [slices, tokens, width] to be added up, and a bias to be added still.
#pragma once
#include "common.cuh"

struct Parts {
    const u8* data;
    const float* bias;  // null: none, or already in
    int slices;
    u64 size;  // values of a slice

    // Two neighbours at an even place; `column` is where the first stands in its row.
    __device__ __forceinline__ Float2 pair(u64 at, int column) const {
        Float2 v;
        if constexpr (OP_SLICES) {
            const float* from = reinterpret_cast<const float*>(data) + at;
            v = load_shared_state(reinterpret_cast<const Float2*>(from));
            for (int s = 1; s < slices; ++s) {
                const Float2 more = load_shared_state(reinterpret_cast<const Float2*>(from + s * size));
                v.x += more.x, v.y += more.y;
            }
            if (bias != nullptr) v.x += bias[column], v.y += bias[column + 1];
        } else {
            const u32 both = load_shared_state(reinterpret_cast<const u32*>(data) + at / 2);
            v = Float2{bf16_to_float(u16(both)), bf16_to_float(u16(both >> 16))};
        }
        return v;
    }
};
