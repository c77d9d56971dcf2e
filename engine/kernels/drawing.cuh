// How a row of the batch makes a score of a logit: the logit itself, or logit / temperature + noise. Every kernel that
// draws takes it from here, so that equal logits get equal scores, and a larger logit never the lower one.
#pragma once
#include "common.cuh"

// A row's mask has a bit for each token, set where it may be chosen, from the lowest bit of the first word on.
__host__ __device__ constexpr int mask_words(int vocabulary) { return ceil_div(vocabulary, 32); }

// The word of a token, to be asked for ahead. masks [batch, words]; null: every token may be chosen.
__device__ __forceinline__ u32 mask_word(const u32* masks, int m, int id, int vocabulary) {
    return masks == nullptr ? 0xFFFFFFFFu : load_shared_state(masks + u64(m) * mask_words(vocabulary) + id / 32);
}
__device__ __forceinline__ bool allowed(u32 word, int id) { return (word >> (id & 31) & 1u) != 0; }

// Stands for the logit of a token that top_k is sure to drop: no product gives these bits.
__device__ __forceinline__ float left_out() { return __uint_as_float(0x7FC1D0FFu); }
__device__ __forceinline__ bool is_left_out(float v) { return __float_as_uint(v) == 0x7FC1D0FFu; }

struct Drawing {
    float heat;  // 0 is greedy
    int place;   // where the chosen token will stand; 0: an idle row
    u64 key;

    __device__ __forceinline__ void load(const float* temperature, const u64* noise_key, const int* position, int m) {
        const float h = load_shared_state(temperature + m);
        heat = h > 0.f ? fmaxf(h, 1e-30f) : 0.f;  // a quotient must stay finite
        key = load_shared_state(noise_key + m);
        place = load_shared_state(position + m) + 1;
    }
    __device__ __forceinline__ float noise(int id) const { return heat > 0.f ? gumbel(key, place, id) : 0.f; }
    __device__ __forceinline__ float score(float logit, float noise) const {
        return heat > 0.f ? __fadd_rn(__fdiv_rn(logit, heat), noise) : logit;
    }
};
