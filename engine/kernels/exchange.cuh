// Sums over the GPUs of a split model. A block has a channel to the block of the same number on every other rank: words
// of 32 bits beside the number of the exchange, stored straight into the other GPU's memory. A reader knows by the number
// that a word has come, so nothing is ever reset: the halves of a channel take turns, and one is free again once the next
// number has come from the other side. Every block sends all that it has before it waits, so a grid of many waves ends,
// too: blocks begin in order on both sides.
#pragma once
#include "common.cuh"

#ifndef OP_RANKS
#define OP_RANKS 1
#endif

struct Exchange {
    const u64* inboxes;  // where each rank's inbox lies for this one
    u32* count;          // exchanges that the block has had
    int rank;
    u64 half, at;        // words of all channels from one source; where the block's begin
    u32 number = 0;

    // After the wait for the kernels before.
    __device__ __forceinline__ Exchange(const u64* boxes, u32* counts, int own, int words, int room)
        : inboxes(boxes), count(counts + blockIdx.x), rank(own), half(words), at(u64(blockIdx.x) * room) {
        if constexpr (OP_RANKS > 1) number = load_shared_state(count) + 1;
    }

    // An inbox has a place for each of the other ranks, from the next one on.
    __device__ __forceinline__ u64* word(int to, int from, int slot) const {
        const int source = (from - to - 1 + OP_RANKS) % OP_RANKS;
        return reinterpret_cast<u64*>(inboxes[to]) + (2 * source + (number & 1)) * half + at + slot;
    }

    __device__ __forceinline__ void send(int slot, u32 value) const {
        const u64 both = u64(number) << 32 | value;
#pragma unroll
        for (int i = 1; i < OP_RANKS; ++i) {
            u64* to = word((rank + i) % OP_RANKS, rank, slot);
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
        }
    }

    __device__ __forceinline__ u32 receive(int from, int slot) const {
        const u64* here = word(rank, from, slot);
        u64 both;
        do {
            asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(here) : "memory");
        } while (u32(both >> 32) != number);
        return u32(both);
    }

    // In the order of the ranks, so that every rank has the same bits.
    __device__ __forceinline__ float sum(int slot, float own) const {
        float v = 0.f;
#pragma unroll
        for (int from = 0; from < OP_RANKS; ++from)
            v += from == rank ? own : __uint_as_float(receive(from, slot));
        return v;
    }
    // The same of pairs of bf16, the rank's own rounded like the others.
    __device__ __forceinline__ Float2 sum_pairs(int slot, u32 own) const {
        Float2 v{0.f, 0.f};
#pragma unroll
        for (int from = 0; from < OP_RANKS; ++from) {
            const u32 both = from == rank ? own : receive(from, slot);
            v.x += bf16_to_float(u16(both)), v.y += bf16_to_float(u16(both >> 16));
        }
        return v;
    }

    // By one thread, behind a barrier that all which made an Exchange have passed.
    __device__ __forceinline__ void end() const { *count = number; }
};
