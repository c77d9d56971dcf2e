// A draft model's steps in a round: where it takes a sequence up, and how it gets from one guess to the next.
//
// It has computed a sequence but for its newest token, or its two newest: of a draft that was right to its end the last
// guess was never fed. So the first step feeds the last two, as rows of one sequence, and may write one of them again.
// Each further step feeds a guess. Rows are two a sequence in the first step, and one in the others. A sequence that may
// have no draft, since its pages end, is fed them all the same: the round moves it on, and what it lacked would be three.
#include "embedding.cuh"
#include "place.cuh"

constexpr int kThreads = 256;

// Lays out the two newest tokens of each sequence.
extern "C" __global__ void __launch_bounds__(kThreads)
    follow(const int* newest, const int* held, const int* last_position, const int* most_drafts, const int* history,
           int most_tokens, u64* best, u32* assured, int* position, const u16* table, const float* gain, float* residual,
           u16* normed, float* squares, int trigger) {
    const int m = blockIdx.x, s = m / 2;
    if (trigger == 0) let_next_start();
    const Gains<kThreads> gains(gain);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Place place(newest, held, last_position, most_drafts, s);
    const bool live = place.newest > 0 && place.rows > 0;
    const int at = place.newest - 1 + m % 2;
    if (threadIdx.x == 0) {
        best[m] = 0;
        if (assured != nullptr) assured[m] = 0;
        position[m] = live ? at : -1;
    }
    if (live)
        embed(table, load_shared_state(history + u64(s) * most_tokens + at), gains, residual, normed, squares, m);
}

// Takes guess `number` over and lays it out for the next step. `rows`: of a sequence in the step that made it.
extern "C" __global__ void __launch_bounds__(kThreads)
    guess(const int* newest, const int* held, const int* last_position, const int* most_drafts, u64* best, u32* assured,
          int* guesses, int rows, int number, int* position, const u16* table, const float* gain, float* residual,
          u16* normed, float* squares, int trigger) {
    __shared__ int next;
    const int s = blockIdx.x;
    if (trigger == 0) let_next_start();
    const Gains<kThreads> gains(gain);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (threadIdx.x == 0) {
        const Place place(newest, held, last_position, most_drafts, s);
        int* own = guesses + s * (OP_LAID - 1);
        const int id = place.guesses(number, own) ? guessed(load_shared_state(best + s * rows + rows - 1)) : -1;
        own[number - 1] = id;
        next = number + 1 < place.rows ? id : -1;
        position[s] = next >= 0 ? place.newest + number : -1;
        for (int i = 0; i < rows; ++i) {
            best[s * rows + i] = 0;
            if (assured != nullptr) assured[s * rows + i] = 0;
        }
    }
    __syncthreads();
    if (next >= 0) embed(table, next, gains, residual, normed, squares, s);
}
