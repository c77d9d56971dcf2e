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
    u64* inboxes[OP_RANKS];  // where each rank's inbox lies for this one, from the block's channel on
    u32* count;              // exchanges that the block has had
    int rank;
    u64 half;                // words of all channels from one source
    u32 number = 0;

    // Before the wait for the kernels before: a load after it would stand behind the weights that are under way.
    __device__ __forceinline__ Exchange(const u64* boxes, u32* counts, int own, int words, int room)
        : count(counts + blockIdx.x), rank(own), half(words) {
        if constexpr (OP_RANKS > 1)
#pragma unroll
            for (int i = 0; i < OP_RANKS; ++i)
                inboxes[i] = reinterpret_cast<u64*>(boxes[(own + i) % OP_RANKS]) + u64(blockIdx.x) * room;
    }

    // After the wait.
    __device__ __forceinline__ void begin() {
        if constexpr (OP_RANKS > 1) number = load_shared_state(count) + 1;
    }

    // In the inbox `next` ranks on: the word from the rank that is `from` ranks on from there.
    __device__ __forceinline__ u64* word(int next, int from, int slot) const {
        return inboxes[next] + (2 * (from - 1) + (number & 1)) * half + slot;
    }

    __device__ __forceinline__ void send(int slot, u32 value) const {
        const u64 both = u64(number) << 32 | value;
#pragma unroll
        for (int i = 1; i < OP_RANKS; ++i) {
            u64* to = word(i, OP_RANKS - i, slot);
            asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(both) : "memory");
        }
    }

    // `from`: how far the source is from this rank.
    __device__ __forceinline__ u32 receive(int from, int slot) const {
        const u64* here = word(0, from, slot);
        u64 both;
        do {
            asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(here) : "memory");
        } while (u32(both >> 32) != number);
        return u32(both);
    }

    // In the order of the ranks, so that every rank has the same bits.
    __device__ __forceinline__ float sum(int slot, float own) const {
        float all[OP_RANKS], v = 0.f;
        all[0] = own;
#pragma unroll
        for (int i = 1; i < OP_RANKS; ++i) all[i] = __uint_as_float(receive(i, slot));
#pragma unroll
        for (int from = 0; from < OP_RANKS; ++from)
#pragma unroll
            for (int i = 0; i < OP_RANKS; ++i)
                if ((rank + i) % OP_RANKS == from) v += all[i];
        return v;
    }
    // The same of pairs of bf16, the rank's own rounded like the others.
    __device__ __forceinline__ Float2 sum_pairs(int slot, u32 own) const {
        u32 all[OP_RANKS];
        all[0] = own;
#pragma unroll
        for (int i = 1; i < OP_RANKS; ++i) all[i] = receive(i, slot);
        Float2 v{0.f, 0.f};
#pragma unroll
        for (int from = 0; from < OP_RANKS; ++from)
#pragma unroll
            for (int i = 0; i < OP_RANKS; ++i)
                if ((rank + i) % OP_RANKS == from)
                    v.x += bf16_to_float(u16(all[i])), v.y += bf16_to_float(u16(all[i] >> 16));
        return v;
    }

    // By one thread, behind a barrier that all which made an Exchange have passed.
    __device__ __forceinline__ void end() const { *count = number; }
};
