// Whether a row ends with its chosen token, for the kernels that take that over.
#pragma once
#include "common.cuh"

constexpr int kMaxStops = 8;
constexpr u32 kStopped = 1, kFull = 2, kNoToken = 4;  // stop token, last position, no finite score

// `none`: there is no token. `full`: it would stand at the row's last position.
__device__ __forceinline__ u32 end_flags(bool none, int id, const int (&stop)[kMaxStops], bool full) {
    u32 flags = none ? kNoToken : 0u;
#pragma unroll
    for (int i = 0; i < kMaxStops; ++i)
        if (!none && stop[i] == id) flags |= kStopped;
    if (full) flags |= kFull;
    return flags;
}
