// A draw from the tokens of a row that may be kept, where they are few enough to be sorted.
#pragma once
#include "sampling.cuh"

// The least key that top_k and top_p keep, from the list: sorted, largest first.
template <int kOwn>
__device__ __forceinline__ u32 least_key(const Row& row, const Cut& cut, const u64* keys, int count) {
    int last = count - 1;
    if (cut.by_count) last = row.top_k - int(cut.before) - 1;
    if (row.top_p < 1.0) {
        u64 own[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int at = threadIdx.x * kOwn + i;
            own[i] = at <= last ? weight(heat_of(u32(keys[at] >> 32))) : 0;
        }
        const u64 need = cut.by_count ? share(row.top_p, reach(1, own).total) : cut.need - cut.before;
        last = min(last, reach(need, own).place);
    }
    return u32(keys[last] >> 32);
}

// The best of the tokens on the list that are kept. `keys` in shared memory; sorts them.
__device__ __forceinline__ u64 draw_listed(const Row& row, const Cut& cut, u64* keys, int count, int place) {
    sort_falling(keys, count);
    constexpr int kMost = kListed / kThreads;
    const u32 least = count <= kThreads ? least_key<1>(row, cut, keys, count) : least_key<kMost>(row, cut, keys, count);
    u64 mine = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const u32 key = u32(keys[i] >> 32);
        const int id = int(~u32(keys[i]));
        if (key < least || heat_of(key) < row.floor) break;
        mine = larger(mine, candidate(heat_of(key) + gumbel(row.noise_key, place, id), id));
    }
    return mine;
}
