// Chooses a token by all the parameters that the head alone cannot serve: penalties, bias, barred tokens, top_k, top_p,
// min_p. Rows that do not ask for it keep the head's choice. Four stages:
//
//   adjust  applies bias, penalties and barred tokens; each block's best and least
//   bins    filtered rows: how many tokens and how much weight each bin has; how the row is to be drawn from
//   sift    draws from the tokens that are surely kept; lists those that may be
//   draw    filtered rows: finds the last token to keep, exactly, and draws; all rows: counts the chosen token
//
// All sums are of whole numbers and all choices are maxima, so nothing depends on the order in which blocks run.
#include "sampling_listed.cuh"
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

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    adjust(const Row* rows, const int* position, const float* logits, const float* bias, const u32* marks, const u32* masks,
           float* adjusted, Part* parts, u64* counts, u64* masses, u32* listed, u32* arrived, u64* best, int trigger) {
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
        if (is_left_out(v)) v = minus_infinity();
        else sound = sound && is_finite(v);
        const float more = (row.uses & kBiased) ? bias[start + id] : 0.f;
        const u32 mark = (row.uses & kMarked) ? load_shared_state(marks + start + id) : 0u;
        if (row.uses & (kBiased | kMarked)) v = adjusted_logit(row, v, more, mark, barred);
        if (!allowed(mask_word(masks, m, id, kVocabulary), id)) v = minus_infinity();
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
    const Scale scale = Scale::of(parts, row, m);
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
    load_bins(counts, own);
    const Cut cut = cut_of(row, own, [&](u64 (&of_bins)[kOwnBins]) { load_bins(masses, of_bins); });
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
    const Scale scale = Scale::of(parts, row, m);
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
    const Scale scale = Scale::of(parts, row, m);
    if (place < 0 || !scale.sound) return;
    if (row.filtered()) {
        u64 mine = 0;
        if (cut.mode == kWhole) {
            const RowLogits logits{adjusted + u64(m) * kVocabulary};
            const Whole<RowLogits> whole{logits, scale};
            u64 of_bins[kOwnBins], weights[kOwnBins];
            load_bins(counts + m * kBins, of_bins);
            load_bins(masses + m * kBins, weights);
            const u32 least = whole.least_key(row, cut, of_bins, weights);
            whole.each([&](float heat, int id) {
                if (ordered(heat) < least || heat < row.floor) return;
                mine = larger(mine, candidate(heat + gumbel(row.noise_key, place + 1, id), id));
            });
        } else if (count > 0) {
            __shared__ u64 keys[kListed];
            for (int i = threadIdx.x; i < count; i += kThreads) keys[i] = load_shared_state(list + m * kListed + i);
            mine = draw_listed(row, cut, keys, count, place + 1);
        }
        chosen = larger(chosen, block_best(mine));
        if (threadIdx.x == 0) best[m] = chosen;
    }
    if (threadIdx.x == 0 && (row.uses & kMarked)) {
        u32* mark = marks + u64(m) * kVocabulary + int(~u32(chosen));
        *mark = (load_shared_state(mark) | kSeen) + 1;
    }
}
