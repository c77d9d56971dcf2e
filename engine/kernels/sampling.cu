// Chooses a token by all the parameters that the head alone cannot serve: penalties, bias, barred tokens, top_k, top_p,
// min_p. Rows that do not ask for it keep the head's choice. Four stages:
//
//   adjust  applies bias, penalties and barred tokens, in place; each block's best and least
//   bins    how many tokens and how much weight each bin of a filtered row has
//   sift    filtered rows: lists what can still be drawn; the others: draws
//   draw    filtered rows: finds the last token to keep, exactly, and draws; all rows: counts the chosen token
//
// All sums are of whole numbers and all choices are maxima, so nothing depends on the order in which blocks run.
#include "sampling.cuh"

namespace {

// The tokens of a row that are this thread's, where blocks share the row.
template <class Visit>
__device__ __forceinline__ void each_of_block(Visit&& visit) {
    const int first = blockIdx.x * kThreads * kEach + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int id = first + i * kThreads;
        if (id < kVocabulary) visit(id);
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

// The bin of the last token that top_k and top_p may keep.
__device__ __forceinline__ int last_bin(const Row& row, const u64* counts, const u64* masses) {
    int last = kBins;
    if (row.top_k > 0) last = reach<kBins, kThreads>(row.top_k, [&](int i) { return load_shared_state(counts + i); }).place;
    if (last < kBins || row.top_p >= 1.0) return last;
    const auto mass_of = [&](int i) { return load_shared_state(masses + i); };
    const u64 mass = reach<kBins, kThreads>(1, mass_of).total;
    return reach<kBins, kThreads>(share(row.top_p, mass), mass_of).place;
}

template <int WARPS>
__device__ __forceinline__ u64 block_best(u64 mine) {
    __shared__ u64 best[WARPS];
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(0xFFFFFFFFu, mine, d);
        mine = other > mine ? other : mine;
    }
    if ((threadIdx.x & 31) == 0) best[threadIdx.x >> 5] = mine;
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) mine = best[w] > mine ? best[w] : mine;
    return mine;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    adjust(const Row* rows, const int* position, const float* bias, const u32* marks, float* logits, Part* parts, u64* counts,
           u64* masses, u32* listed, u64* best, int trigger) {
    __shared__ float highs[kThreads / 32], lows[kThreads / 32];
    const int m = blockIdx.y;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int place = load_shared_state(position + m);
    if (!(row.uses & kOn) || place < 0) return;
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < kBins; i += kBlocks * kThreads)
        counts[m * kBins + i] = masses[m * kBins + i] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        listed[m] = 0;
        best[m] = 0;  // not the head's choice
    }
    const u64 start = u64(m) * kVocabulary;
    const bool barred = place + 1 < row.free_from;
    float high = minus_infinity(), low = -minus_infinity();
    bool sound = true;
    each_of_block([&](int id) {
        float v = load_shared_state(logits + start + id);
        sound = sound && is_finite(v);
        const float more = (row.uses & kBiased) ? bias[start + id] : 0.f;
        const u32 mark = (row.uses & kMarked) ? load_shared_state(marks + start + id) : 0u;
        if (row.uses & (kBiased | kMarked)) v = adjusted_logit(row, v, more, mark, barred);
        logits[start + id] = v;
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
        for (int w = 0; w < kThreads / 32; ++w) {
            high = fmaxf(high, highs[w]);
            low = fminf(low, lows[w]);
        }
        parts[m * kBlocks + blockIdx.x] = {high, low, all_sound ? 1u : 0u, 0u};
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    bins(const Row* rows, const int* position, const float* logits, const Part* parts, u64* counts, u64* masses,
         int trigger) {
    __shared__ u32 count[kBins];
    __shared__ Sums<kBins> mass;
    const int m = blockIdx.y;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    for (int i = threadIdx.x; i < kBins; i += kThreads) count[i] = 0;
    mass.clear();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    if (!row.filtered() || load_shared_state(position + m) < 0) return;
    const Scale scale(parts, row, m);
    if (!scale.sound) return;
    __syncthreads();
    const bool weighs = row.top_p < 1.0;
    each_of_block([&](int id) {
        const float heat = scale.heat(load_shared_state(logits + u64(m) * kVocabulary + id));
        if (!is_finite(heat)) return;
        const int bin = scale.bin(heat);
        atomicAdd(&count[bin], 1u);
        if (!weighs) return;
        const u64 w = weight(heat);
        if (w != 0) mass.add(bin, w);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
        if (count[i] == 0) continue;
        atomicAdd(counts + m * kBins + i, u64(count[i]));
        if (weighs) atomicAdd(masses + m * kBins + i, mass.at(i));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    sift(const Row* rows, const int* position, const float* logits, const Part* parts, const u64* counts,
         const u64* masses, u32* listed, Candidate* list, u64* best, int trigger) {
    const int m = blockIdx.y;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int place = load_shared_state(position + m);
    if (!(row.uses & kOn) || place < 0) return;
    const Scale scale(parts, row, m);
    if (!scale.sound) return;
    logits += u64(m) * kVocabulary;
    if (!row.filtered()) {
        u64 mine = 0;
        each_of_block([&](int id) {
            const float v = load_shared_state(logits + id);
            const float heat = row.greedy() ? v : scale.heat(v);
            if (!is_finite(heat) || (!row.greedy() && heat < row.floor)) return;
            const u64 c = candidate(row.greedy() ? v : heat + gumbel(row.noise_key, place + 1, id), id);
            mine = c > mine ? c : mine;
        });
        mine = block_best<kThreads / 32>(mine);
        if (threadIdx.x == 0 && mine != 0) atomicMax(best + m, mine);
        return;
    }
    counts += m * kBins;
    masses += m * kBins;
    const int last = last_bin(row, counts, masses);
    const auto count_of = [&](int i) { return i <= last ? load_shared_state(counts + i) : u64(0); };
    if (reach<kBins, kThreads>(1, count_of).total > kListed) {
        if (blockIdx.x == 0 && threadIdx.x == 0) listed[m] = kListed + 1;
        return;
    }
    each_of_block([&](int id) {
        const float heat = scale.heat(load_shared_state(logits + id));
        if (is_finite(heat) && scale.bin(heat) <= last) list[m * kListed + atomicAdd(listed + m, 1u)] = {heat, id};
    });
}

namespace {

constexpr int kDrawThreads = 1024;

// The candidates of one row: from the list, or where that is too short, from all tokens.
struct Candidates {
    const Candidate* list;  // in shared memory
    int count;
    const float* logits;  // adjusted
    Scale scale;

    template <class Visit>
    __device__ __forceinline__ void each(Visit&& visit) const {
        if (count <= kListed) {
            for (int i = threadIdx.x; i < count; i += kDrawThreads) visit(list[i].heat, list[i].id);
            return;
        }
#pragma unroll 4
        for (int id = threadIdx.x; id < kVocabulary; id += kDrawThreads) {
            const float heat = scale.heat(load_shared_state(logits + id));
            if (is_finite(heat)) visit(heat, id);
        }
    }
};

struct Threshold {
    u32 key;
    u64 left;  // of what was needed, before the tokens of this key
};

// The highest key of a bin at which the running sum of `value` over falling keys reaches `need`.
template <class Value>
__device__ __forceinline__ Threshold find_key(const Candidates& from, int bin, u64 need, Sums<kDigits>& sums, Value&& value) {
    u32 prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        const u32 mask = shift == 24 ? 0u : 0xFFFFFFFFu << (shift + 8);
        __syncthreads();
        sums.clear();
        __syncthreads();
        from.each([&](float heat, int) {
            const u32 key = ordered(heat);
            if (from.scale.bin(heat) == bin && (key & mask) == prefix)
                sums.add(kDigits - 1 - (key >> shift & (kDigits - 1)), value(heat));
        });
        __syncthreads();
        const Reached found = reach<kDrawThreads, kDrawThreads>(need, [&](int i) { return i < kDigits ? sums.at(i) : u64(0); });
        prefix |= u32(kDigits - 1 - found.place) << shift;
        need -= found.before;
    }
    return {prefix, need};
}

// Of what top_k keeps: the weight of all bins before the last one, and of the tokens that it keeps in that.
__device__ __forceinline__ u64 kept_mass(const Candidates& from, const u64* masses, int bin, const Threshold& last) {
    __shared__ Sums<1> sum;
    __syncthreads();
    sum.clear();
    __syncthreads();
    from.each([&](float heat, int) {
        if (from.scale.bin(heat) == bin && ordered(heat) > last.key) sum.add(0, weight(heat));
    });
    const auto get = [&](int i) { return i < bin ? load_shared_state(masses + i) : u64(0); };
    return reach<kBins, kDrawThreads>(1, get).total + sum.at(0) + last.left * weight(heat_of(last.key));
}

// The least key that top_k and then top_p keep.
__device__ __forceinline__ u32 least_key(const Row& row, const Candidates& from, const u64* counts, const u64* masses) {
    __shared__ Sums<kDigits> sums;
    const auto mass_of = [&](int i) { return load_shared_state(masses + i); };
    u32 least = 0;
    u64 mass = 0;
    bool some = false;  // whether top_k leaves any out
    if (row.top_k > 0) {
        const Reached at = reach<kBins, kDrawThreads>(row.top_k, [&](int i) { return load_shared_state(counts + i); });
        some = at.place < kBins;
        if (some) {
            const Threshold last = find_key(from, at.place, row.top_k - at.before, sums, [](float) { return u64(1); });
            least = last.key;
            if (row.top_p < 1.0) mass = kept_mass(from, masses, at.place, last);
        }
    }
    if (row.top_p >= 1.0) return least;
    if (!some) mass = reach<kBins, kDrawThreads>(1, mass_of).total;
    const u64 need = share(row.top_p, mass);
    const Reached at = reach<kBins, kDrawThreads>(need, mass_of);
    const u32 of_p = find_key(from, at.place, need - at.before, sums, [](float heat) { return weight(heat); }).key;
    return of_p > least ? of_p : least;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kDrawThreads)
    draw(const Row* rows, const int* position, const float* logits, const Part* parts, const u64* counts,
         const u64* masses, const u32* listed, const Candidate* list, u32* marks, u64* best, int trigger) {
    __shared__ Candidate held[kListed];
    const int m = blockIdx.x;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int place = load_shared_state(position + m);
    if (!(row.uses & kOn) || place < 0) return;
    const Scale scale(parts, row, m);
    if (!scale.sound) return;
    u64 chosen = load_shared_state(best + m);
    if (row.filtered()) {
        const Candidates from{held, int(load_shared_state(listed + m)), logits + u64(m) * kVocabulary, scale};
        if (from.count <= kListed)
            for (int i = threadIdx.x; i < from.count; i += kDrawThreads) {
                const Float2 c = load_shared_state(reinterpret_cast<const Float2*>(list + m * kListed + i));
                held[i] = {c.x, __float_as_int(c.y)};
            }
        const u32 least = least_key(row, from, counts + m * kBins, masses + m * kBins);
        __syncthreads();
        u64 mine = 0;
        from.each([&](float heat, int id) {
            if (ordered(heat) < least || heat < row.floor) return;
            const u64 c = candidate(heat + gumbel(row.noise_key, place + 1, id), id);
            mine = c > mine ? c : mine;
        });
        chosen = block_best<kDrawThreads / 32>(mine);
        if (threadIdx.x == 0) best[m] = chosen;
    }
    if (threadIdx.x == 0 && (row.uses & kMarked)) {
        u32* mark = marks + u64(m) * kVocabulary + int(~u32(chosen));
        *mark = (load_shared_state(mark) | kSeen) + 1;
    }
}
