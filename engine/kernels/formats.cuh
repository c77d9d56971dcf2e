// Weight formats: what a lane loads of eight output rows, and how it becomes an operand of the tensor core.
//
// A chunk is 8 rows × kSpan columns of the weight matrix, 64 bytes of each row. Lane (g, t) = (lane / 4, lane % 4) holds
// 16 bytes of row g, that is kWords times eight columns. Eight columns w[0…7] fill a lane's four registers of operand A
// as they lie: w01 and w45 as row g, w23 and w67 as row g + 8. So that every product meets its own activation, batch row
// m takes two columns of operand B: 2m with x01 and x45, 2m + 1 with x23 and x67. The sum for output row g and batch row
// m is then d0 + d3 of lane (g, m): no register moves, no shuffle, four batch rows a product, and what a batch row gets
// does not depend on the others.
#pragma once
#include "common.cuh"

enum Format { kBf16 = 0, kInt8 = 1, kInt4 = 2, kInt8Tiles = 3 };

template <int FORMAT, int GROUP>
struct Chunk;

// Row-major as the checkpoint has it. Lane t has columns 8t … 8t + 7 of 32.
template <int GROUP>
struct Chunk<kBf16, GROUP> {
    static constexpr int kSpan = 32, kWords = 1, kScales = 0;
    static constexpr bool kPacked = false;
    Quad w;

    __device__ static constexpr int x_offset(int t, int) { return t * 8; }

    __device__ __forceinline__ Chunk(const Quad* weights, const u32*) : w(*weights) {}
    __device__ __forceinline__ u32 word() const { return w.r[3]; }  // depends on all that was read

    template <int SETS>
    __device__ __forceinline__ void multiply(float (&d)[SETS][4], const Pair (&x)[kWords][SETS]) const {
#pragma unroll
        for (int s = 0; s < SETS; ++s) mma(d[s], w.r, x[0][s].x, x[0][s].y);
    }
};

// Row-major int8; lane t has columns 16t … 16t + 15 of 64. A byte in the mantissa of 128 reads as 128 + low seven bits,
// and its sign as 128 or 256: the difference is the value, exact in bf16. The scale of a row multiplies the sum.
template <int GROUP>
struct Chunk<kInt8, GROUP> {
    static constexpr int kSpan = 64, kWords = 2, kScales = 0;
    static constexpr bool kPacked = false;
    Quad w;

    __device__ static constexpr int x_offset(int t, int word) { return t * 16 + word * 8; }

    __device__ __forceinline__ Chunk(const Quad* weights, const u32*) : w(*weights) {}
    __device__ __forceinline__ u32 word() const { return w.r[3]; }  // depends on all that was read

    __device__ static __forceinline__ u32 pair(u32 bytes, u32 selector) {
        const u32 h = __byte_perm(bytes, 0x43434343u, selector);
        return fma_bf16x2(h & 0xFF80FF80u, 0xBF80BF80u, (h & 0x007F007Fu) | 0x43004300u);
    }

    template <int SETS>
    __device__ __forceinline__ void multiply(float (&d)[SETS][4], const Pair (&x)[kWords][SETS]) const {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const u32 a[4] = {pair(w.r[2 * i], 0x4140u), pair(w.r[2 * i], 0x4342u), pair(w.r[2 * i + 1], 0x4140u),
                              pair(w.r[2 * i + 1], 0x4342u)};
#pragma unroll
            for (int s = 0; s < SETS; ++s) mma(d[s], a, x[i][s].x, x[i][s].y);
        }
    }
};

// The same, as a warp reads it: [rows / 8][columns / 64][lane][16 bytes].
template <int GROUP>
struct Chunk<kInt8Tiles, GROUP> : Chunk<kInt8, GROUP> {
    static constexpr bool kPacked = true;
    using Chunk<kInt8, GROUP>::Chunk;
};

// Nibble n of each half of a word, less its zero, as bf16: in the mantissa of 128 a nibble reads as 128 + q, and adding
// -(128 + zero) leaves q - zero, exact.
__device__ __forceinline__ u32 nibbles(u32 word, int n, u32 minus_zero) {
    return fma_bf16x2(((word >> (4 * n)) & 0x000F000Fu) | 0x43004300u, 0x3F803F80u, minus_zero);
}

// Four bits, with a scale and a zero point per GROUP columns, as [rows / 8][columns / 128][lane][4 words]. Word j of lane
// (g, t) has columns 32j + 8t + (0…7) of row g: even ones in its lower half, odd ones in its upper. The scale multiplies the
// group's float32 sum.
// Scale words: float16 scale below, bf16 -(128 + zero) above, as [rows / 8][columns / GROUP][8].
template <int GROUP>
struct Chunk<kInt4, GROUP> {
    static constexpr int kSpan = 128, kWords = 4, kScales = 128 / GROUP;
    static constexpr bool kPacked = true;
    static_assert(GROUP == 128 || GROUP == 64 || GROUP == 32, "group");
    Quad w;
    u32 scale[kScales];

    __device__ static constexpr int x_offset(int t, int word) { return word * 32 + t * 8; }

    __device__ __forceinline__ Chunk(const Quad* weights, const u32* scales) : w(*weights) {
#pragma unroll
        for (int q = 0; q < kScales; ++q) scale[q] = scales[q * 8];
    }
    __device__ __forceinline__ u32 word() const {
        u32 all = w.r[3];
#pragma unroll
        for (int q = 0; q < kScales; ++q) all ^= scale[q];
        return all;
    }

    template <int SETS>
    __device__ __forceinline__ void multiply(float (&d)[SETS][4], const Pair (&x)[kWords][SETS]) const {
        constexpr int kEach = kWords / kScales;
#pragma unroll
        for (int q = 0; q < kScales; ++q) {
            const u32 minus_zero = __byte_perm(scale[q], 0u, 0x3232u);
            float part[SETS][4] = {};
#pragma unroll
            for (int i = q * kEach; i < (q + 1) * kEach; ++i) {
                u32 a[4];
#pragma unroll
                for (int n = 0; n < 4; ++n) a[n] = nibbles(w.r[i], n, minus_zero);
#pragma unroll
                for (int s = 0; s < SETS; ++s) mma(part[s], a, x[i][s].x, x[i][s].y);
            }
            const float f = half_to_float(u16(scale[q]));
#pragma unroll
            for (int s = 0; s < SETS; ++s) d[s][0] += f * part[s][0], d[s][3] += f * part[s][3];
        }
    }
};
