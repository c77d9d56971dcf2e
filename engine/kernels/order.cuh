// Where an activation's columns go, so that those which a lane of the matrix kernel has of a row of weights meet them in
// one product: of 16 places, 2t, 2t + 1 and 8 + 2t, 9 + 2t belong to lane t. A pair of columns stays a pair. Runs of 64
// columns lie apart, [run][token][128 bytes], with the segments of 16 bytes permuted as `wgmma` reads them without
// conflicts: what a block of the kernel needs of many tokens is then as many bytes in a row.
#pragma once
#include "formats.cuh"

// n even.
__device__ __forceinline__ int ordered_column(int n) {
    if constexpr (OP_ORDER == kInt4) return n / 32 * 32 + n / 4 % 2 * 16 + n / 2 % 2 * 8 + n / 8 % 4 * 2;
    if constexpr (OP_ORDER == kInt8) return n / 64 * 64 + n / 4 % 4 * 16 + n / 2 % 2 * 8 + n / 16 % 4 * 2;
    return n;
}

// Of column n, even, of token m of a chunk of `tokens`.
template <int COLUMNS>
__device__ __forceinline__ u64 place_of(int n, int m, int tokens) {
    if constexpr (OP_ORDER == kBf16) return u64(m) * COLUMNS + n;
    const int c = ordered_column(n);
    return (u64(c / 64) * tokens + m) * 64 + ((c / 8 ^ m) & 7) * 8 + c % 8;
}
