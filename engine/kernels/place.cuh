// Where a sequence stands, and how many rows of it the next verifying step may have.
#pragma once
#include "common.cuh"

struct Place {
    int newest, rows;  // its position, -1: nobody's or at its end; rows that its pages, its end and the host allow

    __device__ __forceinline__ Place(const int* newest_of, const int* held, const int* last_position, const int* most_drafts,
                                     int s) {
        newest = load_shared_state(newest_of + s);
        const int end = min(load_shared_state(held + s), load_shared_state(last_position + s));
        rows = newest < 0 ? 0 : min(max(end - newest, 0), 1 + load_shared_state(most_drafts + s));
    }
    // Whether a draft model makes its guess `number`, from 1 on, given those before it (-1: it had none).
    __device__ __forceinline__ bool guesses(int number, const int* before) const {
        return newest > 0 && number < rows && (number == 1 || load_shared_state(before + number - 2) >= 0);
    }
};

// The token that a draft model's head has chosen, -1 where it has computed no number.
__device__ __forceinline__ int guessed(u64 key) { return is_finite_score(u32(key >> 32)) ? int(~u32(key)) : -1; }
