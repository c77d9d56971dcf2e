// Words of 32 bits and the number of the launch that wrote them: a reader knows by the word itself whether it has come.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void put_word(u64* to, u32 value, u32 number) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(u64(number) << 32 | value) : "memory");
}
__device__ __forceinline__ u64 get_word(const u64* from) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
