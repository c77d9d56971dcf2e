// How keys and values lie in their pages: bf16, or e4m3 without a scale, as OP_KV_BYTES says. Products are of bf16 either
// way, which holds every e4m3 exactly.
#pragma once
#include "common.cuh"

constexpr int kKvBytes = OP_KV_BYTES;  // of a value
static_assert(kKvBytes == 1 || kKvBytes == 2, "e4m3 or bf16");

#if OP_KV_BYTES == 1
using Stored = u8;
#else
using Stored = u16;
#endif

struct alignas(8 * kKvBytes) Eight {  // values of a head that lie side by side
    u32 w[2 * kKvBytes];
};

// ---- what lies in a page, as bf16 --------------------------------------------------------------------------------------

// bf16 of the two e4m3 in the second and the fourth byte; NaN becomes 480.
__device__ __forceinline__ u32 widen_two(u32 v) {
    // Exponents that are 120 too low, those of denormals too.
    const u32 small = ((v & 0x7F007F00u) >> 4) | (v & 0x80008000u);
    return fma_bf16x2(small, 0x7B807B80u, 0x80008000u);  // · 2^120 + -0
}

__device__ __forceinline__ Quad widen(const Eight& v) {
    Quad q;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        q.r[i] = kKvBytes == 2 ? v.w[i % (2 * kKvBytes)] : widen_two(__byte_perm(v.w[i / 2], 0u, i % 2 ? 0x3020 : 0x1000));
    return q;
}

// Value d of two tokens side by side.
template <int WORDS>
__device__ __forceinline__ u32 beside(const u32 (&a)[WORDS], const u32 (&b)[WORDS], int d) {
    if constexpr (kKvBytes == 2) return __byte_perm(a[d / 2], b[d / 2], d % 2 ? 0x7632u : 0x5410u);
    const u32 at = d % 4;
    return widen_two(__byte_perm(a[d / 4], b[d / 4], 0x4400u + at * 0x1111u));
}

__device__ __forceinline__ float stored_to_float(Stored v) {
    return bf16_to_float(kKvBytes == 2 ? u16(v) : u16(widen_two(u32(v) << 8)));
}

// ---- what is put there -------------------------------------------------------------------------------------------------

// Rounded to nearest even; beyond 448, and of NaN, it is 448. Not by the instruction that newer GPUs have: few values are
// written, and so all of them write the same.
__device__ __forceinline__ u32 to_e4m3(float v) {
    const u32 sign = __float_as_uint(v) >> 24 & 0x80u, bits = __float_as_uint(fminf(fabsf(v), 448.f));
    const u32 normal = ((bits + 0x7FFFFu + (bits >> 20 & 1u)) >> 20) - 0x3C0u;
    const u32 denormal = u32(__float2int_rn(__uint_as_float(bits) * 512.f));
    return sign | (bits < 0x3C800000u ? denormal : normal);  // 2^-6
}

__device__ __forceinline__ Stored to_stored(float v) { return Stored(kKvBytes == 2 ? u32(to_bf16(v)) : to_e4m3(v)); }
__device__ __forceinline__ void store_two(Stored* to, float low, float high) {
    if constexpr (kKvBytes == 2)
        *reinterpret_cast<u32*>(to) = pack_bf16(low, high);
    else
        *reinterpret_cast<u16*>(to) = u16(to_e4m3(low) | to_e4m3(high) << 8);
}

// ---- memory ------------------------------------------------------------------------------------------------------------

// As `load_shared_state`.
template <int WORDS>
__device__ __forceinline__ void load_words(u32 (&w)[WORDS], const void* p) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a load of 4, 8 or 16 bytes");
    if constexpr (WORDS == 4)
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
    else if constexpr (WORDS == 2)
        asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
    else
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(w[0]) : "l"(p) : "memory");
}
// Out of shared memory.
template <int WORDS>
__device__ __forceinline__ void load_words(u32 (&w)[WORDS], u32 address) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a load of 4, 8 or 16 bytes");
    if constexpr (WORDS == 4)
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"(address) : "memory");
    else if constexpr (WORDS == 2)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address) : "memory");
}
