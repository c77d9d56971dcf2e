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
        Float2 v[1] = {};
        pairs<1>(v, at, column, 0, column + 1);
        return v[0];
    }

    // Pairs at, at + step, …, those whose column is below `end`. A slice's are all asked for before any is used.
    template <int COUNT>
    __device__ __forceinline__ void pairs(Float2 (&v)[COUNT], u64 at, int column, int step, int end) const {
        if constexpr (OP_SLICES) {
            const float* from = reinterpret_cast<const float*>(data) + at;
            for (int s = 0; s < slices; ++s, from += size) {
                Float2 more[COUNT];
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
                    if (column + i * step < end) more[i] = load_shared_state(reinterpret_cast<const Float2*>(from + i * step));
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
                    if (column + i * step < end) v[i].x += more[i].x, v[i].y += more[i].y;
            }
            if (bias != nullptr)
#pragma unroll
                for (int i = 0; i < COUNT; ++i)
                    if (const int n = column + i * step; n < end) v[i].x += bias[n], v[i].y += bias[n + 1];
        } else {
            u32 both[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (column + i * step < end)
                    both[i] = load_shared_state(reinterpret_cast<const u32*>(data) + (at + i * step) / 2);
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (column + i * step < end)
                    v[i].x += bf16_to_float(u16(both[i])), v[i].y += bf16_to_float(u16(both[i] >> 16));
        }
    }
};
