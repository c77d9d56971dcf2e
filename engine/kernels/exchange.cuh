// Sums over the GPUs of a split model. A block has a channel to the block of the same number on every other rank: words
// of 32 bits, stored straight into the other GPU's memory. A place without a word holds kNone, which is never sent: a
// reader waits for another value, and leaves kNone behind. The halves of a channel take turns, and one is free again once
// words of the next exchange have come from the other side, which a later kernel sends. Every block sends all that it has
// before it waits, so a grid of many waves ends, too: blocks begin in order on both sides.
#pragma once
#include "common.cuh"

#ifndef OP_RANKS
#define OP_RANKS 1
#endif

constexpr u32 kNone = 0xFFFFFFFFu;  // as a float32 or as two bf16, one of many that are no number
constexpr u32 kNan = 0x7FFFFFFFu;   // stands for it
constexpr int kKeyWords = 3;        // of a key: 31 bits each, so that none is kNone

struct Exchange {
    u32* inboxes[OP_RANKS];  // where each rank's inbox lies for this one, from the block's channel on
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
                inboxes[i] = reinterpret_cast<u32*>(boxes[(own + i) % OP_RANKS]) + u64(blockIdx.x) * room;
    }

    // After the wait.
    __device__ __forceinline__ void begin() {
        if constexpr (OP_RANKS > 1) number = load_shared_state(count) + 1;
    }

    // In the inbox `next` ranks on: the word from the rank that is `from` ranks on from there.
    __device__ __forceinline__ u32* word(int next, int from, int slot) const {
        return inboxes[next] + (2 * (from - 1) + (number & 1)) * half + slot;
    }

    __device__ __forceinline__ static u32 sendable(u32 value) { return value == kNone ? kNan : value; }

    __device__ __forceinline__ void send(int slot, u32 value) const {
#pragma unroll
        for (int i = 1; i < OP_RANKS; ++i)
            asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word(i, OP_RANKS - i, slot)), "r"(sendable(value)) : "memory");
    }
    // `slot`: a multiple of four.
    __device__ __forceinline__ void send_four(int slot, const u32* values) const {
#pragma unroll
        for (int i = 1; i < OP_RANKS; ++i)
            asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(word(i, OP_RANKS - i, slot)),
                         "r"(sendable(values[0])), "r"(sendable(values[1])), "r"(sendable(values[2])), "r"(sendable(values[3]))
                         : "memory");
    }

    // WIDE words, one or four, as they have come to a place so far.
    template <int WIDE>
    __device__ __forceinline__ static void look(const u32* at, u32* words) {
        if constexpr (WIDE == 4)
            asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                         : "l"(at)
                         : "memory");
        else
            asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(words[0]) : "l"(at) : "memory");
    }

    // The words of a thread from the rank that is `from` ranks on: of those i for which has(i) is true, WIDE from slot(i) on.
    // All are asked for before any is looked at.
    template <int WIDE, int EACH, class Slot, class Has>
    __device__ __forceinline__ void receive(int from, Slot slot, Has has, u32 (&words)[EACH]) const {
        bool all;
        do {
            all = true;
#pragma unroll
            for (int i = 0; i < EACH / WIDE; ++i)
                if (has(i)) look<WIDE>(word(0, from, slot(i)), words + i * WIDE);
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (has(i / WIDE)) all = all && words[i] != kNone;
        } while (!all);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (has(i / WIDE)) word(0, from, slot(i / WIDE))[i % WIDE] = kNone;
    }

    // What the ranks have for a thread, in their order, so that every rank makes the same bits of it: add(i, word).
    template <int WIDE, int EACH, class Slot, class Has, class Add>
    __device__ __forceinline__ void gather(Slot slot, Has has, const u32 (&own)[EACH], Add add) const {
        u32 theirs[OP_RANKS][EACH] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i) theirs[0][i] = own[i];
#pragma unroll
        for (int r = 1; r < OP_RANKS; ++r) receive<WIDE>(r, slot, has, theirs[r]);
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
        gather<1>(slot, has, own, [&](int i, u32 word) { v[i] += __uint_as_float(word); });
    }
    // Sums of pairs of bf16, the rank's own rounded like the others.
    template <int WIDE, int EACH, class Slot, class Has>
    __device__ __forceinline__ void sum_pairs(Slot slot, Has has, const u32 (&own)[EACH], Float2 (&v)[EACH]) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = Float2{0.f, 0.f};
        gather<WIDE>(slot, has, own, [&](int i, u32 word) {
            v[i].x += bf16_to_float(u16(word)), v[i].y += bf16_to_float(u16(word >> 16));
        });
    }

    // The largest of all ranks' keys, by a thread that has kKeyWords words from `slot` on.
    __device__ __forceinline__ u64 largest(int slot, u64 key) const {
        auto place = [&](int i) { return slot + i; };
#pragma unroll
        for (int i = 0; i < kKeyWords; ++i) send(place(i), u32(key >> 31 * i) & 0x7FFFFFFFu);
#pragma unroll
        for (int r = 1; r < OP_RANKS; ++r) {
            u32 words[kKeyWords];
            receive<1>(r, place, [](int) { return true; }, words);
            const u64 theirs = u64(words[2]) << 62 | u64(words[1]) << 31 | words[0];
            key = theirs > key ? theirs : key;
        }
        return key;
    }

    // By one thread, behind a barrier that all which made an Exchange have passed.
    __device__ __forceinline__ void end() const { *count = number; }
};
