// The last token that top_k and top_p keep, looked for among all tokens of a row: for rows where too many are as likely
// as that one, or top_p comes after a top_k of thousands. Slow, and right whatever the logits are.
#pragma once
#include "sampling.cuh"

struct Threshold {
    u32 key;
    u64 left;  // of what was needed, before the tokens of this key
};

// A row's adjusted logits, as they lie.
struct RowLogits {
    const float* at;

    template <class Visit>
    __device__ __forceinline__ void each(Visit&& visit) const {
#pragma unroll 4
        for (int id = threadIdx.x; id < kVocabulary; id += kThreads) visit(load_shared_state(at + id), id);
    }
};

// All tokens of a row, by the whole block.
template <class Logits>
struct Whole {
    const Logits& logits;
    Scale scale;

    template <class Visit>
    __device__ __forceinline__ void each(Visit&& visit) const {
        logits.each([&](float logit, int id) {
            const float heat = scale.heat(logit);
            if (is_finite(heat)) visit(heat, id);
        });
    }

    // The highest key of a bin at which the running sum of `value` over falling keys reaches `need`.
    template <class Value>
    __device__ __forceinline__ Threshold find_key(int bin, u64 need, Value&& value) const {
        __shared__ Sums<kDigits> sums;
        u32 prefix = 0;
#pragma unroll 1
        for (int shift = 24; shift >= 0; shift -= 8) {
            const u32 mask = shift == 24 ? 0u : 0xFFFFFFFFu << (shift + 8);
            __syncthreads();
            sums.clear();
            __syncthreads();
            each([&](float heat, int) {
                const u32 key = ordered(heat);
                if (scale.bin(heat) == bin && (key & mask) == prefix)
                    sums.add(kDigits - 1 - (key >> shift & (kDigits - 1)), value(heat));
            });
            __syncthreads();
            const u64 own[1] = {threadIdx.x < kDigits ? sums.at(threadIdx.x) : 0};
            const Reached found = reach(need, own);
            prefix |= u32(kDigits - 1 - found.place) << shift;
            need -= found.before;
        }
        return {prefix, need};
    }

    // Of what top_k keeps: the weight of all bins before the last one, and of the tokens that it keeps in that.
    __device__ __forceinline__ u64 kept_mass(const u64 (&masses)[kOwnBins], int bin, const Threshold& last) const {
        __shared__ Sums<1> sum;
        u64 own[kOwnBins];
        __syncthreads();
        sum.clear();
        __syncthreads();
        each([&](float heat, int) {
            if (scale.bin(heat) == bin && ordered(heat) > last.key) sum.add(0, weight(heat));
        });
#pragma unroll
        for (int i = 0; i < kOwnBins; ++i) own[i] = int(threadIdx.x) * kOwnBins + i < bin ? masses[i] : 0;
        return reach(1, own).total + sum.at(0) + last.left * weight(heat_of(last.key));
    }

    // The least key that top_k and then top_p keep.
    __device__ __forceinline__ u32 least_key(const Row& row, const Cut& cut, const u64 (&counts)[kOwnBins],
                                             const u64 (&masses)[kOwnBins]) const {
        u64 need = cut.need;
        u32 least = 0;
        if (cut.by_count) {
            const u64 before = reach(row.top_k, counts).before;
            const Threshold last = find_key(cut.last, row.top_k - before, [](float) { return u64(1); });
            least = last.key;
            if (row.top_p < 1.0) need = share(row.top_p, kept_mass(masses, cut.last, last));
        }
        if (row.top_p >= 1.0) return least;
        const Reached at = reach(need, masses);
        const u32 of_p = find_key(at.place, need - at.before, [](float heat) { return weight(heat); }).key;
        return of_p > least ? of_p : least;
    }
};
