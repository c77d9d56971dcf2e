// Chooses a token by all the parameters that the head alone cannot serve: penalties, bias, barred tokens, top_k, top_p,
// min_p. Rows that do not ask for it keep the head's choice. Four stages:
//
//   adjust  applies bias, penalties and barred tokens; each block's best and least
//   bins    filtered rows: how many tokens and how much weight each bin has; how the row is to be drawn from
//   sift    draws from the tokens that are surely kept; lists those that may be
//   draw    filtered rows: finds the last token to keep, exactly, and draws; all rows: counts the chosen token
//
// All sums are of whole numbers and all choices are maxima, so nothing depends on the order in which blocks run.
#include "sampling_whole.cuh"

namespace {

// The tokens of a row that are this thread's, where blocks share the row.
template <class Visit>
__device__ __forceinline__ void each_of_block(Visit&& visit) {
    const int first = blockIdx.x * kThreads * kEach + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int id = first + i * kThreads;
        if (id < kVocabulary) visit(i, id);
    }
}

__device__ __forceinline__ float adjusted_logit(const Row& row, float v, float bias, u32 mark, bool barred) {
    v += bias;
    if (mark & kSeen) v = v > 0.f ? v / row.repetition : v * row.repetition;
    const u32 count = mark & kCount;
    if (count != 0) v -= row.presence;
    v = __fsub_rn(v, __fmul_rn(row.frequency, float(count)));  // rounded twice, as the specification has it
    return barred && (mark & kBarred) ? minus_infinity() : v;
}

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The largest of the block, in every thread. Once a kernel.
__device__ __forceinline__ u64 block_best(u64 mine) {
    __shared__ u64 best[kThreads / 32];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) mine = larger(mine, __shfl_xor_sync(0xFFFFFFFFu, mine, d));
    if ((threadIdx.x & 31) == 0) best[threadIdx.x >> 5] = mine;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) mine = larger(mine, best[w]);
    return mine;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    adjust(const Row* rows, const int* position, const float* logits, const float* bias, const u32* marks, float* adjusted,
           Part* parts, u64* counts, u64* masses, u32* listed, u32* arrived, u64* best, int trigger) {
    __shared__ float highs[kThreads / 32], lows[kThreads / 32];
    const int m = blockIdx.y;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (!(row.uses & kOn)) return;
    const u64 start = u64(m) * kVocabulary;
    const int place = load_shared_state(position + m);
    float values[kEach];
    each_of_block([&](int i, int id) { values[i] = load_shared_state(logits + start + id); });
    if (place < 0) return;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += kBlocks * kThreads)
        counts[m * kBins + i] = masses[m * kBins + i] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        listed[m] = arrived[m] = 0;
        best[m] = 0;  // not the head's choice
    }
    const bool barred = place + 1 < row.free_from;
    float high = minus_infinity(), low = -minus_infinity();
    bool sound = true;
    each_of_block([&](int i, int id) {
        float v = values[i];
        sound = sound && is_finite(v);
        const float more = (row.uses & kBiased) ? bias[start + id] : 0.f;
        const u32 mark = (row.uses & kMarked) ? load_shared_state(marks + start + id) : 0u;
        if (row.uses & (kBiased | kMarked)) v = adjusted_logit(row, v, more, mark, barred);
        adjusted[start + id] = v;
        high = fmaxf(high, v);
        if (is_finite(v)) low = fminf(low, v);
    });
    high = warp_max(high);
    low = -warp_max(-low);
    if ((threadIdx.x & 31) == 0) {
        highs[threadIdx.x >> 5] = high;
        lows[threadIdx.x >> 5] = low;
    }
    const bool all_sound = __syncthreads_and(sound) != 0;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int w = 0; w < kThreads / 32; ++w) {
            high = fmaxf(high, highs[w]);
            low = fminf(low, lows[w]);
        }
        parts[m * kBlocks + blockIdx.x] = {high, low, all_sound ? 1u : 0u, 0u};
    }
}

namespace {

__device__ __forceinline__ void report(u64* row_bins, const u64 (&own)[kOwnBins], int last) {
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
        const int bin = threadIdx.x * kOwnBins + i;
        if (own[i] != 0 && bin <= last) atomicAdd(row_bins + bin, own[i]);
    }
}

// How the row is to be drawn from, once all blocks have reported.
__device__ __forceinline__ Cut cut_of(const Row& row, const u64* counts_of_row, const u64* masses_of_row) {
    __shared__ u64 in_last;
    u64 counts[kOwnBins], masses[kOwnBins];
    load_bins(counts_of_row, counts);
    if (row.top_p < 1.0) load_bins(masses_of_row, masses);
    Cut cut{kAll, kBins, 0, 0, 0, 0};
    Reached at{kBins, 0, 0};
    if (row.top_k > 0) at = reach(row.top_k, counts);
    cut.by_count = at.place < kBins;
    if (!cut.by_count) {
        if (row.top_p >= 1.0) return cut;
        cut.need = share(row.top_p, reach(1, masses).total);
        at = reach(cut.need, masses);
    }
    cut.last = at.place;
    u64 upto[kOwnBins];
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
        const int bin = threadIdx.x * kOwnBins + i;
        upto[i] = bin <= cut.last ? counts[i] : 0;
        if (bin == cut.last) in_last = counts[i];
    }
    const u64 held = reach(1, upto).total;
    const bool one_filter = !cut.by_count || row.top_p >= 1.0;
    cut.mode = held <= kListed ? kList : one_filter && in_last <= kListed ? kSplit : kWhole;
    if (cut.mode == kSplit) cut.before = at.before;
    return cut;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    bins(const Row* rows, const int* position, const float* adjusted, const Part* parts, u64* counts, u64* masses,
         u32* arrived, Cut* cuts, int trigger) {
    __shared__ u32 count[kBins];
    __shared__ Sums<kBins> mass;
    __shared__ bool is_last;
    const int m = blockIdx.y;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    for (int i = threadIdx.x; i < kBins; i += kThreads) count[i] = 0;
    mass.clear();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (!row.filtered()) return;
    const int place = load_shared_state(position + m);
    float heats[kEach];
    each_of_block([&](int i, int id) { heats[i] = load_shared_state(adjusted + u64(m) * kVocabulary + id); });
    const Scale scale(parts, row, m);
    if (place < 0 || !scale.sound) return;
    __syncthreads();
    each_of_block([&](int i, int) {
        heats[i] = scale.heat(heats[i]);
        if (is_finite(heats[i])) atomicAdd(&count[scale.bin(heats[i])], 1u);
    });
    __syncthreads();
    u64 own[kOwnBins];
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) own[i] = count[threadIdx.x * kOwnBins + i];
    // What comes after top_k of this block's own tokens is not among the row's.
    const int last = row.top_k > 0 ? reach(row.top_k, own).place : kBins;
    counts += m * kBins;
    masses += m * kBins;
    report(counts, own, last);
    if (row.top_p < 1.0) {
        each_of_block([&](int i, int) {
            if (!is_finite(heats[i])) return;
            const int bin = scale.bin(heats[i]);
            const u64 w = bin <= last ? weight(heats[i]) : 0;
            if (w != 0) mass.add(bin, w);
        });
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOwnBins; ++i) own[i] = mass.at(threadIdx.x * kOwnBins + i);
        report(masses, own, last);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(arrived + m, 1u) == kBlocks - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const Cut cut = cut_of(row, counts, masses);
    if (threadIdx.x == 0) cuts[m] = cut;
}

namespace {

__device__ __forceinline__ Cut load_cut(const Cut* at) {
    const Quad low = load_shared_state(at), high = load_shared_state(reinterpret_cast<const Quad*>(at) + 1);
    return {int(low.r[0]), int(low.r[1]), low.r[2], 0, u64(high.r[1]) << 32 | high.r[0], u64(high.r[3]) << 32 | high.r[2]};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    sift(const Row* rows, const int* position, const float* adjusted, const Part* parts, const Cut* cuts, u32* listed,
         u64* list, u64* best, int trigger) {
    const int m = blockIdx.y;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (!(row.uses & kOn)) return;
    const int place = load_shared_state(position + m);
    float values[kEach];
    each_of_block([&](int i, int id) { values[i] = load_shared_state(adjusted + u64(m) * kVocabulary + id); });
    const Cut cut = row.filtered() ? load_cut(cuts + m) : Cut{kAll, kBins, 0, 0, 0, 0};
    const Scale scale(parts, row, m);
    if (place < 0 || !scale.sound || cut.mode == kWhole) return;
    u64 mine = 0;
    each_of_block([&](int i, int id) {
        const float heat = row.greedy() ? values[i] : scale.heat(values[i]);
        if (!is_finite(heat)) return;
        if (cut.mode != kAll) {
            const int bin = scale.bin(heat);
            if (bin > cut.last) return;
            if (cut.mode == kList || bin == cut.last) {
                list[m * kListed + atomicAdd(listed + m, 1u)] = candidate(heat, id);
                return;
            }
        }
        if (!row.greedy() && heat < row.floor) return;
        mine = larger(mine, candidate(row.greedy() ? heat : heat + gumbel(row.noise_key, place + 1, id), id));
    });
    if (cut.mode == kList) return;
    mine = block_best(mine);
    if (threadIdx.x == 0 && mine != 0) atomicMax(best + m, mine);
}

namespace {

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

// The best of the tokens on the list that are kept.
__device__ __forceinline__ u64 draw_listed(const Row& row, const Cut& cut, const u64* list, int count, int place) {
    __shared__ u64 keys[kListed];
    for (int i = threadIdx.x; i < count; i += kThreads) keys[i] = load_shared_state(list + i);
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

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    draw(const Row* rows, const int* position, const float* adjusted, const Part* parts, const u64* counts,
         const u64* masses, const Cut* cuts, const u32* listed, const u64* list, u32* marks, u64* best, int trigger) {
    const int m = blockIdx.x;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (!(row.uses & kOn)) return;
    const int place = load_shared_state(position + m);
    const int count = int(load_shared_state(listed + m));
    const Cut cut = load_cut(cuts + m);
    u64 chosen = load_shared_state(best + m);
    const Scale scale(parts, row, m);
    if (place < 0 || !scale.sound) return;
    if (row.filtered()) {
        u64 mine = 0;
        if (cut.mode == kWhole) {
            const Whole whole{adjusted + u64(m) * kVocabulary, scale};
            const u32 least = whole.least_key(row, cut, counts + m * kBins, masses + m * kBins);
            whole.each([&](float heat, int id) {
                if (ordered(heat) < least || heat < row.floor) return;
                mine = larger(mine, candidate(heat + gumbel(row.noise_key, place + 1, id), id));
            });
        } else if (count > 0) {
            mine = draw_listed(row, cut, list + m * kListed, count, place + 1);
        }
        chosen = larger(chosen, block_best(mine));
        if (threadIdx.x == 0) best[m] = chosen;
    }
    if (threadIdx.x == 0 && (row.uses & kMarked)) {
        u32* mark = marks + u64(m) * kVocabulary + int(~u32(chosen));
        *mark = (load_shared_state(mark) | kSeen) + 1;
    }
}
