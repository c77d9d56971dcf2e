// How keys and values lie in their pages: bf16, or e4m3 without a scale, as OP_KV_BYTES says. Products are of bf16 either
// way, or with e4m3 of f16 where the includer defines KEPT_AS_F16; both hold every e4m3 exactly. Newer GPUs have an
// instruction that makes f16 of e4m3, where bf16 takes five; f16 it is where one waits for each instruction. Where OP_F16
// is set, all that is bf16 otherwise is f16, in pages too.
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

#ifndef OP_F16
#define OP_F16 0
#endif
#if OP_F16 || (OP_KV_BYTES == 1 && defined(KEPT_AS_F16))
constexpr bool kOfF16 = true;
#else
constexpr bool kOfF16 = false;
#endif

// ---- operands of products ----------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 pack_operands(float low, float high) {
    if constexpr (!kOfF16) return pack_bf16(low, high);
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ u16 to_operand(float v) {  // without an infinity
    if constexpr (!kOfF16) return to_bf16(v);
    return u16(pack_operands(fminf(fmaxf(v, -65504.f), 65504.f), 0.f) & 0xFFFFu);
}
__device__ __forceinline__ float operand_to_float(u16 v) { return kOfF16 ? half_to_float(v) : bf16_to_float(v); }

// As `mma`.
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (!kOfF16)
        mma(d, a, b0, b1);
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- what lies in a page, as operands ----------------------------------------------------------------------------------

// Two e4m3, of the eight in x and y those numbered a and b; NaN may become 480.
__device__ __forceinline__ u32 widen_two(u32 x, u32 y, u32 a, u32 b) {
#if __CUDA_ARCH__ >= 890
    if constexpr (kOfF16) {
        u32 d;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(u16(__byte_perm(x, y, a | b << 4))));
        return d;
    }
#endif
    const u32 v = __byte_perm(x, y, a * 0x11u | b * 0x1100u);  // in the upper bytes
    // Exponents that are too low, by 120 or by 8, those of denormals too; then · 2^120 or · 2^8, + -0.
    const u32 small = ((v & 0x7F007F00u) >> (kOfF16 ? 1 : 4)) | (v & 0x80008000u);
    if constexpr (!kOfF16) return fma_bf16x2(small, 0x7B807B80u, 0x80008000u);
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(small), "r"(0x5C005C00u), "r"(0x80008000u));
    return d;
}

__device__ __forceinline__ Quad widen(const Eight& v) {
    Quad q;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        q.r[i] = kKvBytes == 2 ? v.w[i % (2 * kKvBytes)] : widen_two(v.w[i / 2], 0u, i % 2 * 2, i % 2 * 2 + 1);
    return q;
}

// Value d of two tokens side by side.
template <int WORDS>
__device__ __forceinline__ u32 beside(const u32 (&a)[WORDS], const u32 (&b)[WORDS], int d) {
    if constexpr (kKvBytes == 2) return __byte_perm(a[d / 2], b[d / 2], d % 2 ? 0x7632u : 0x5410u);
    return widen_two(a[d / 4], b[d / 4], d % 4, 4 + d % 4);
}

__device__ __forceinline__ float stored_to_float(Stored v) {
    return operand_to_float(kKvBytes == 2 ? u16(v) : u16(widen_two(v, 0u, 0, 4)));
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

__device__ __forceinline__ Stored to_stored(float v) { return Stored(kKvBytes == 2 ? pack_operands(v, 0.f) : to_e4m3(v)); }
__device__ __forceinline__ void store_two(Stored* to, float low, float high) {
    if constexpr (kKvBytes == 2)
        *reinterpret_cast<u32*>(to) = pack_operands(low, high);
    else
        *reinterpret_cast<u16*>(to) = u16(to_e4m3(low) | to_e4m3(high) << 8);
}

// ---- memory ------------------------------------------------------------------------------------------------------------

// As `load_shared_state`.
template <int WORDS>
__device__ __forceinline__ void load_words(u32 (&w)[WORDS], const void* p) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a load of 4, 8 or 16 bytes");
    if constexpr (WORDS == 4)
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "l"(p)
                     : "memory");
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
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "r"(address)
                     : "memory");
    else if constexpr (WORDS == 2)
        asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address) : "memory");
    else
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address) : "memory");
}
