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
    __device__ __forceinline__ Exchange(const u64* boxes, u32* counts, int own, int words, int room, int channel = blockIdx.x)
        : count(counts + channel), rank(own), half(words) {
        if constexpr (OP_RANKS > 1)
#pragma unroll
            for (int i = 0; i < OP_RANKS; ++i)
                inboxes[i] = reinterpret_cast<u64*>(boxes[(own + i) % OP_RANKS]) + u64(channel) * room;
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

    // The words of a thread from the rank that is `from` ranks on: of those i for which has(i) is true, at slot(i). All
    // are asked for before any is looked at.
    template <int EACH, class Slot, class Has>
    __device__ __forceinline__ void receive(int from, Slot slot, Has has, u32 (&words)[EACH]) const {
        u64 both[EACH];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (has(i))
                    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both[i]) : "l"(word(0, from, slot(i))) : "memory");
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (has(i)) all = all && u32(both[i] >> 32) == number;
        } while (!all);
#pragma unroll
        for (int i = 0; i < EACH; ++i) words[i] = has(i) ? u32(both[i]) : 0u;
    }

    // What the ranks have for a thread, in their order, so that every rank makes the same bits of it: add(i, word).
    template <int EACH, class Slot, class Has, class Add>
    __device__ __forceinline__ void gather(Slot slot, Has has, const u32 (&own)[EACH], Add add) const {
        u32 theirs[OP_RANKS][EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) theirs[0][i] = own[i];
#pragma unroll
        for (int r = 1; r < OP_RANKS; ++r) receive(r, slot, has, theirs[r]);
#pragma unroll
        for (int from = 0; from < OP_RANKS; ++from)
#pragma unroll
            for (int r = 0; r < OP_RANKS; ++r)
                if ((rank + r) % OP_RANKS == from)
#pragma unroll
                    for (int i = 0; i < EACH; ++i) add(i, theirs[r][i]);
    }
    // Sums of float32, each of a word.
    template <int EACH, class Slot, class Has>
    __device__ __forceinline__ void sum(Slot slot, Has has, float (&v)[EACH]) const {
        u32 own[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) own[i] = __float_as_uint(v[i]), v[i] = 0.f;
        gather(slot, has, own, [&](int i, u32 word) { v[i] += __uint_as_float(word); });
    }
    // Sums of pairs of bf16, the rank's own rounded like the others.
    template <int EACH, class Slot, class Has>
    __device__ __forceinline__ void sum_pairs(Slot slot, Has has, const u32 (&own)[EACH], Float2 (&v)[EACH]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = Float2{0.f, 0.f};
        gather(slot, has, own, [&](int i, u32 word) {
            v[i].x += bf16_to_float(u16(word)), v[i].y += bf16_to_float(u16(word >> 16));
        });
    }

    // By one thread, behind a barrier that all which made an Exchange have passed.
    __device__ __forceinline__ void end() const { *count = number; }
};
