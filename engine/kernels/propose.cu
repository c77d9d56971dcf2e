// The start of a verifying step: lays out the newest token of each sequence, and after it a draft of what may follow. A
// block for each of the OP_LAID rows; all blocks of a sequence find the same. A step may verify fewer rows than are laid.
#include "embedding.cuh"
#include "place.cuh"

constexpr int kThreads = 1024;
constexpr int kLongest = 4, kShortest = 2;  // tokens that must have come before, one after the other
constexpr int kAtOnce = 4;

__device__ __forceinline__ void lay(int id, bool live, const Place& place, int i, int m, int* token, int* position,
                                    const u16* table, const Gains<kThreads>& gains, float* residual, u16* normed,
                                    float* squares) {
    live = live && i < place.rows;
    if (threadIdx.x == 0) token[m] = id, position[m] = live ? place.newest + i : -1;
    if (live) embed(table, id, gains, residual, normed, squares, m);
}

// The longest run of the newest tokens that came before, of those the most recent; the draft is what followed it, over
// and over where that reaches the end.
extern "C" __global__ void __launch_bounds__(kThreads)
    lookup(const int* newest, const int* held, const int* last_position, const int* most_drafts, const int* history,
           int most_tokens, int* token, int* position, const u16* table, const float* gain, float* residual, u16* normed,
           float* squares, int trigger) {
    __shared__ u32 found;
    const int s = blockIdx.x / OP_LAID, i = blockIdx.x % OP_LAID;
    if (trigger == 0) let_next_start();
    if (threadIdx.x == 0) found = 0;
    const Gains<kThreads> gains(gain);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Place place(newest, held, last_position, most_drafts, s);
    const int* ids = history + u64(s) * most_tokens;
    __syncthreads();
    if (i > 0 && i < place.rows) {
        int run[kLongest];  // the newest tokens, the last first
#pragma unroll
        for (int j = 0; j < kLongest; ++j) run[j] = j <= place.newest ? load_shared_state(ids + place.newest - j) : -1;
        u32 best = 0;
        for (int first = threadIdx.x; first < place.newest; first += kThreads * kAtOnce) {
            int seen[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int at = first + k * kThreads;
                seen[k] = at < place.newest ? load_shared_state(ids + at) : -1;
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int at = first + k * kThreads;
                if (seen[k] != run[0]) continue;
                int equal = 1;
                while (equal < kLongest && equal <= at && load_shared_state(ids + at - equal) == run[equal]) ++equal;
                if (equal >= kShortest) best = max(best, (u32(equal) << 28) | u32(at));
            }
        }
        best = __reduce_max_sync(0xFFFFFFFFu, best);
        if (threadIdx.x % 32 == 0 && best != 0) atomicMax(&found, best);
    }
    __syncthreads();
    int from = place.newest;
    bool live = place.rows > 0;
    if (i > 0) {
        const int at = int(found & 0x0FFFFFFFu);
        live = found != 0;
        from = live ? at + 1 + (i - 1) % (place.newest - at) : -1;
    }
    lay(live ? load_shared_state(ids + from) : 0, live, place, i, s * OP_LAID + i, token, position, table, gains, residual,
        normed, squares);
}

// The draft of a draft model: `count` guesses, the last of which is still where its head left it. `rows`: of a sequence in
// the draft's last step.
extern "C" __global__ void __launch_bounds__(kThreads)
    drafted(const int* newest, const int* held, const int* last_position, const int* most_drafts, const int* history,
            int most_tokens, const u64* best, const int* guesses, int rows, int count, int* token, int* position,
            const u16* table, const float* gain, float* residual, u16* normed, float* squares, int trigger) {
    const int s = blockIdx.x / OP_LAID, i = blockIdx.x % OP_LAID;
    if (trigger == 0) let_next_start();
    const Gains<kThreads> gains(gain);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Place place(newest, held, last_position, most_drafts, s);
    const int* own = guesses + s * (OP_LAID - 1);
    int id = -1;
    if (i == 0 && place.rows > 0) id = load_shared_state(history + u64(s) * most_tokens + place.newest);
    if (i > 0 && i <= count && place.guesses(i, own))
        id = i < count ? load_shared_state(own + i - 1) : guessed(load_shared_state(best + s * rows + rows - 1));
    lay(max(id, 0), id >= 0, place, i, s * OP_LAID + i, token, position, table, gains, residual, normed, squares);
}

// For measurements: a draft that knows the future and is right with a given chance (of 2^24), at each place anew.
extern "C" __global__ void __launch_bounds__(kThreads)
    replay(const int* newest, const int* held, const int* last_position, const int* most_drafts, const int* history,
           int most_tokens, const int* future, u32 chance, int* token, int* position, const u16* table, const float* gain,
           float* residual, u16* normed, float* squares, int trigger) {
    const int s = blockIdx.x / OP_LAID, i = blockIdx.x % OP_LAID;
    if (trigger == 0) let_next_start();
    const Gains<kThreads> gains(gain);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const Place place(newest, held, last_position, most_drafts, s);
    int id = 0;
    if (i < place.rows) {
        const u64 at = u64(s) * most_tokens + place.newest + i;
        id = load_shared_state((i > 0 ? future : history) + at);
        u64 z = (at + 1) * 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z ^= z >> 27;
        if (i > 0 && u32(z >> 40) >= chance) id ^= 1;
    }
    lay(id, i < place.rows, place, i, s * OP_LAID + i, token, position, table, gains, residual, normed, squares);
}
