// What the stages of `sampling` share: a row's parameters, its weights as whole numbers, and bins of them.
//
// heat = (logit - best) / temperature; weight = exp(heat) in units of 2^-42, a whole number, so that sums do not depend on
// their order. A bin is a stretch of heat, 0 the hottest; tokens at -inf are in none. A key orders like the heat.
#pragma once
#include "drawing.cuh"

constexpr int kVocabulary = OP_VOCABULARY;
constexpr int kBins = 2048;
constexpr int kDigits = 256;
constexpr int kListed = 4096;                      // candidates that are kept as a list
constexpr int kThreads = 512;                      // of a block
constexpr int kEach = 4;                           // tokens of a thread where blocks share a row
constexpr int kBlocks = ceil_div(kVocabulary, kThreads * kEach);
constexpr u32 kSeen = 0x80000000u, kBarred = 0x40000000u, kCount = 0x3FFFFFFFu;  // of a mark
constexpr int kOn = 1, kBiased = 2, kMarked = 4, kFiltered = 8;                   // of `uses`
constexpr float kUnit = 4398046511104.f;           // 2^42

// As `sampling.Row.packed` writes it; the host's, between launches only.
struct alignas(64) Row {
    int uses, top_k;
    float temperature, floor;  // 0 is greedy; log(min_p)
    float repetition, presence, frequency;
    int free_from;  // the position from which barred tokens may stand
    double top_p;
    u64 noise_key;
    const float* bias;  // [kVocabulary] each: of the rows of `batch_sampling` that have any
    u32* marks;

    __device__ __forceinline__ bool greedy() const { return temperature == 0.f; }
    __device__ __forceinline__ bool filtered() const { return (uses & kFiltered) != 0; }
};

// What a block found in its share of a row's adjusted logits.
struct alignas(16) Part {
    float best, least;  // least: of the finite ones
    u32 sound;          // whether the model's own logits are finite
    u32 unused;
};

// How a filtered row is to be drawn from.
enum Mode : int {
    kAll,    // every token is kept
    kList,   // what may be kept is on the list
    kSplit,  // so is what may be kept of the last bin; what lies in hotter bins is kept
    kWhole,  // too many for a list
};

struct alignas(32) Cut {
    int mode, last;  // the last bin with tokens to keep
    u32 by_count;    // whether top_k leaves any token out
    u32 unused;
    u64 before;      // split: how many tokens, or what weight, the hotter bins have
    u64 need;        // where top_k leaves none out: the weight that top_p must keep
};

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= 3.402823466e38f; }

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, d));
    return v;
}

__device__ __forceinline__ u64 weight(float heat) {
    return heat < -30.f ? 0 : u64(__double2ull_rn(exp(double(heat)) * double(kUnit)));  // below that less than half a unit
}

__device__ __forceinline__ float heat_of(u32 key) {
    return __uint_as_float((key & 0x80000000u) ? key & 0x7FFFFFFFu : ~key);
}

// The same in every thread of all that work on a row.
struct Scale {
    float best, temperature, bins_a_degree;
    bool sound;  // something can be drawn

    // `good`: whether the model's own logits are finite.
    __device__ __forceinline__ Scale(float high, float low, bool good, const Row& row) : best(high), temperature(row.temperature) {
        sound = good && is_finite(best);
        const float span = fminf((best - low) / temperature, 1e30f);
        bins_a_degree = span > 1e-30f ? float(kBins - 1) / span : 0.f;
    }
    // From the parts of a row, by the same sums in every stage.
    __device__ static __forceinline__ Scale of(const Part* parts, const Row& row, int m) {
        const int lane = threadIdx.x & 31;
        float high = minus_infinity(), low = -minus_infinity();
        bool good = true;
        for (int i = lane; i < kBlocks; i += 32) {
            const Quad q = load_shared_state(parts + m * kBlocks + i);
            high = fmaxf(high, __uint_as_float(q.r[0]));
            low = fminf(low, __uint_as_float(q.r[1]));
            good = good && q.r[2] != 0;
        }
        return Scale(warp_max(high), -warp_max(-low), __all_sync(0xFFFFFFFFu, good), row);
    }
    __device__ __forceinline__ float heat(float logit) const { return (logit - best) / temperature; }
    // Falls as heat rises; never so for one of two equal heats only.
    __device__ __forceinline__ int bin(float heat) const { return min(int(fminf(-heat * bins_a_degree, 4e6f)), kBins - 1); }
};

// 64-bit sums in shared memory by 32-bit additions, which the hardware has.
template <int N>
struct Sums {
    u32 low[N], high[N];

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < N; i += blockDim.x) low[i] = high[i] = 0;
    }
    __device__ __forceinline__ void add(int i, u64 v) {
        const u32 v_low = u32(v), before = atomicAdd(&low[i], v_low);
        const u32 v_high = u32(v >> 32) + (before + v_low < before ? 1u : 0u);
        if (v_high != 0) atomicAdd(&high[i], v_high);
    }
    __device__ __forceinline__ u64 at(int i) const { return u64(high[i]) << 32 | low[i]; }
};

__device__ __forceinline__ u64 inclusive_sum(u64 v) {  // over the lanes
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u64 other = __shfl_up_sync(0xFFFFFFFFu, v, d);
        if (int(threadIdx.x & 31) >= d) v += other;
    }
    return v;
}

// Where a running sum first reaches what is needed.
struct Reached {
    int place;   // none: the number of places
    u64 before;  // the sum of all earlier places
    u64 total;
};

// Over the places of the whole block, kOwn neighbours a thread.
template <int kOwn>
__device__ __forceinline__ Reached reach(u64 need, const u64 (&own)[kOwn]) {
    constexpr int kWarps = kThreads / 32;
    __shared__ u64 sums[kWarps + 1];
    __shared__ Reached found;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += own[i];
    u64 upto = inclusive_sum(sum);
    __syncthreads();  // until the results of the call before are read
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        const u64 mine = lane < kWarps ? sums[lane] : 0, all = inclusive_sum(mine);
        if (lane < kWarps) sums[lane] = all - mine;
        if (lane == kWarps - 1) {
            sums[kWarps] = all;
            found = {kOwn * kThreads, all, all};
        }
    }
    __syncthreads();
    u64 before = sums[warp] + upto - sum;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        if (before < need && before + own[i] >= need) found = {int(threadIdx.x) * kOwn + i, before, sums[kWarps]};
        before += own[i];
    }
    __syncthreads();
    return found;
}

// The least share of `mass` that top_p must keep; at least one unit, or it would keep nothing.
__device__ __forceinline__ u64 share(double top_p, u64 mass) {
    const u64 wanted = __double2ull_ru(top_p * __ull2double_rn(mass));
    return wanted < 1 ? 1 : wanted < mass ? wanted : mass;
}

// The bins of a row in global memory, those of a thread as `reach` wants them.
constexpr int kOwnBins = kBins / kThreads;
__device__ __forceinline__ void load_bins(const u64* of_row, u64 (&own)[kOwnBins]) {
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) own[i] = load_shared_state(of_row + threadIdx.x * kOwnBins + i);
}

// How a row is to be drawn from, by how many tokens each bin has. `load_masses` fetches what weight each has.
template <class Masses>
__device__ __forceinline__ Cut cut_of(const Row& row, const u64 (&counts)[kOwnBins], Masses&& load_masses) {
    __shared__ u64 in_last;
    Cut cut{kAll, kBins, 0, 0, 0, 0};
    Reached at{kBins, 0, 0};
    if (row.top_k > 0) at = reach(row.top_k, counts);
    cut.by_count = at.place < kBins;
    if (!cut.by_count) {
        if (row.top_p >= 1.0) return cut;
        u64 masses[kOwnBins];
        load_masses(masses);
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

__device__ __forceinline__ float adjusted_logit(const Row& row, float v, float bias, u32 mark, bool barred) {
    v += bias;
    if (mark & kSeen) v = v > 0.f ? v / row.repetition : v * row.repetition;
    const u32 count = mark & kCount;
    if (count != 0) v -= row.presence;
    v = __fsub_rn(v, __fmul_rn(row.frequency, float(count)));  // rounded twice, as the specification has it
    return barred && (mark & kBarred) ? minus_infinity() : v;
}

// Largest first, by the whole block; `keys` has room for the next power of two, 64 at least.
__device__ __forceinline__ void sort_falling(u64* keys, int count) {
    int size = 64;
    while (size < count) size <<= 1;
    for (int i = count + threadIdx.x; i < size; i += kThreads) keys[i] = 0;
    __syncthreads();
    for (int run = 2; run <= size; run <<= 1)
        for (int step = run >> 1; step > 0; step >>= 1) {
            for (int p = threadIdx.x; p < size / 2; p += kThreads) {
                const int i = 2 * p - (p & (step - 1));
                const u64 a = keys[i], b = keys[i + step];
                if ((a < b) == ((i & run) == 0)) {
                    keys[i] = b;
                    keys[i + step] = a;
                }
            }
            // Up to 32 apart, both are one warp's own, and were in the step before.
            if (step > 32 || (step == 1 && run >= 64))
                __syncthreads();
            else
                __syncwarp();
        }
}
