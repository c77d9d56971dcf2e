// The end of a verifying step. Of each sequence OP_GROUP rows were fed: its newest token and a draft of those after it.
// Row i has chosen what follows it; as long as that is what row i + 1 was fed, the next row's choice counts too. All
// choices that count are told to the host and added to the sequence's history.
//
// An entry of the ring is (count << 32) | (proposed << 28) | (flags << 24) | token, as `advance` has them; each step ends
// with one without kMore, and that alone says how many were proposed. A sequence without pages for its newest token was
// not fed: it tells an entry without a token, and stays.
#include "chosen.cuh"
#include "exchange.cuh"

constexpr u32 kMore = 8;  // a flag: the step tells another entry
static_assert(OP_GROUP >= 1 && OP_GROUP <= 8 && OP_LAID >= OP_GROUP, "rows");

// One warp a sequence, one lane a row.
extern "C" __global__ void __launch_bounds__(32)
    accept(u64* best, u32* assured, const int* token, const int* position, const int* last_position, const int* stops,
           int* newest, u32* count, int* history, int most_tokens, u64* ring, int ring_size,
           const u64* inboxes, u32* counts, int rank, int half, int room, int trigger) {
    const int s = blockIdx.x, i = threadIdx.x, fed = s * OP_LAID + i, chosen = s * OP_GROUP + i;
    const bool row = i < OP_GROUP;
    if (trigger == 0) let_next_start();
    int stop[kMaxStops];  // host's, between launches only
#pragma unroll
    for (int j = 0; j < kMaxStops; ++j) stop[j] = stops[s * kMaxStops + j];
    const int last = last_position[s];
    Exchange exchange(inboxes, counts, rank, half, room);
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int pos = row ? load_shared_state(position + fed) : -1;
    const int given = row ? load_shared_state(token + fed) : -1;
    u64 key = row ? load_shared_state(best + chosen) : 0;
    if constexpr (OP_RANKS > 1) {  // each has looked in its part of the vocabulary
        exchange.begin();
        if (row) key = exchange.largest(kKeyWords * i, key);
        __syncwarp();
        if (i == 0) exchange.end();
    }
    const int stands = load_shared_state(newest + s);
    const u32 before = load_shared_state(reinterpret_cast<const int*>(count + s));
    if (row) best[chosen] = 0;
    if (row && assured != nullptr) assured[chosen] = 0;
    if (stands < 0) return;  // nobody's, or at its end

    const bool none = !is_finite_score(u32(key >> 32));
    const int id = none ? 0 : int(~u32(key));
    u32 flags = end_flags(none, id, stop, pos + 1 >= last);
    const int expected = __shfl_down_sync(0xFFFFFFFFu, given, 1), place = __shfl_down_sync(0xFFFFFFFFu, pos, 1);
    const bool goes_on = i + 1 < OP_GROUP && place >= 0 && flags == 0 && expected == id;
    const u32 fits = __ballot_sync(0xFFFFFFFFu, goes_on), live = __ballot_sync(0xFFFFFFFFu, pos >= 0);
    const int end = __ffs(int(~fits)) - 1;  // the last row whose choice counts
    if (i > end) return;
    const bool parked = live == 0;
    const u32 proposed = parked ? 0u : u32(__popc(live) - 1);
    if (parked) flags = kNoToken | kMore;  // together: nothing was fed
    else if (i < end) flags |= kMore;
    const u32 n = before + u32(i) + 1;
    if (!parked && !none) history[u64(s) * most_tokens + pos + 1] = id;
    if (i == end) {
        count[s] = n;
        if (!parked) newest[s] = flags != 0 ? -1 : pos + 1;
    }
    const u64 entry = (u64(n) << 32) | ((i == end ? proposed : 0u) << 28) | (flags << 24) | u32(parked ? 0 : id);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ring + u64(s) * ring_size + (n - 1) % ring_size), "l"(entry)
                 : "memory");
}
