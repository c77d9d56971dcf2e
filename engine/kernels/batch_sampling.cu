// What `sampling` does, for many rows: a block a row, which reads the row's logits as often as it must and keeps all else
// in shared memory. Only rows that bias, penalise or bar tokens have tables, the `tables[m]`-th; the others have none.
//
// Same order, ties and whole-number sums as there, so the same tokens.
#include "copies.cuh"
#include "sampling_listed.cuh"
#include "sampling_whole.cuh"

constexpr float kMostNoise = 17.4f, kLeastNoise = -2.9f;  // `gumbel` lies between
constexpr int kSpan = OP_FLOAT32 ? 4 : 8;                 // logits of 16 bytes
constexpr int kQuads = kVocabulary / kSpan, kRounds = ceil_div(kQuads, kThreads);

// Not in line: few rows or tokens come so far, and every pass would have it four times.
__device__ __noinline__ float noise(u64 key, int place, int id) { return gumbel(key, place, id); }
__device__ __noinline__ u64 weigh(float heat) { return weight(heat); }
__device__ __noinline__ float adjusted(const Row& row, float v, float bias, u32 mark, bool barred) {
    return adjusted_logit(row, v, bias, mark, barred);
}

union Room {  // bins until it is known how to draw; then what may be drawn
    struct {
        u32 count[kBins];
        Sums<kBins> mass;
    } bins;
    u64 list[kListed];
};

// A row's logits after bias, penalties and barred tokens, by the whole block.
struct Adjusted {
    const Row& row;
    const u8* at;       // the row
    const float* bias;  // its table, or null
    const u32* marks;
    bool barred;
    Quad* ring;  // [OP_AHEAD][kThreads]

    __device__ __forceinline__ float raw(int id) const {
        if constexpr (OP_FLOAT32)
            return __ldcg(reinterpret_cast<const float*>(at) + id);
        else
            return bf16_to_float(__ldcg(reinterpret_cast<const u16*>(at) + id));
    }
    __device__ __forceinline__ float adjust(float v, float more, u32 mark) const {
        return bias == nullptr && marks == nullptr ? v : adjusted(row, v, more, mark, barred);
    }
    // visit(raw, adjusted, id), by the threads that copied: OP_AHEAD copies of each are under way. Rows that do not lie at
    // multiples of 16 bytes are read one by one.
    template <class Visit>
    __device__ __forceinline__ void each_pair(Visit&& visit) const {
        if constexpr (kVocabulary % kSpan != 0) {
#pragma unroll 1
            for (int id = threadIdx.x; id < kVocabulary; id += kThreads) {
                const float v = raw(id);
                visit(v, adjust(v, bias != nullptr ? bias[id] : 0.f, marks != nullptr ? marks[id] : 0u), id);
            }
        } else {
            auto bring = [&](int round, int slot) {
                const int n = round * kThreads + threadIdx.x;
                if (n < kQuads) copy_async(ring + slot * kThreads + threadIdx.x, at + n * 16, true);
                end_copy_group();
            };
#pragma unroll 1
            for (int n = 0; n < OP_AHEAD; ++n) bring(n, n);
            int slot = 0;
#pragma unroll 1
            for (int round = 0; round < kRounds; ++round) {
                wait_copy_groups<OP_AHEAD - 1>();
                const int first = (round * kThreads + threadIdx.x) * kSpan;
                if (first < kVocabulary) {
                    const Quad q = ring[slot * kThreads + threadIdx.x];
                    Quad more[kSpan / 4] = {}, mark[kSpan / 4] = {};
#pragma unroll
                    for (int i = 0; i < kSpan / 4; ++i) {
                        if (bias != nullptr) more[i] = load_quad(bias + first + 4 * i);
                        if (marks != nullptr) mark[i] = load_quad(marks + first + 4 * i);
                    }
#pragma unroll
                    for (int i = 0; i < kSpan; ++i) {
                        const float v = OP_FLOAT32 ? __uint_as_float(q.r[i % 4]) : bf16_to_float(u16(q.r[i / 2 % 4] >> i % 2 * 16));
                        visit(v, adjust(v, __uint_as_float(more[i / 4].r[i % 4]), mark[i / 4].r[i % 4]), first + i);
                    }
                }
                bring(round + OP_AHEAD, slot);
                slot = slot + 1 == OP_AHEAD ? 0 : slot + 1;
            }
            wait_copy_groups<0>();
        }
    }
    template <class Visit>
    __device__ __forceinline__ void each(Visit&& visit) const {
        each_pair([&](float, float v, int id) { visit(v, id); });
    }
};

namespace {

__device__ __forceinline__ Scale scale_of(const Row& row, const Adjusted& logits) {
    __shared__ float highs[kThreads / 32], lows[kThreads / 32];
    float high = minus_infinity(), low = -minus_infinity();
    bool sound = true;
    logits.each_pair([&](float raw, float v, int) {
        sound = sound && is_finite(raw);
        high = fmaxf(high, v);
        if (is_finite(v)) low = fminf(low, v);
    });
    high = warp_max(high);
    low = -warp_max(-low);
    if ((threadIdx.x & 31) == 0) highs[threadIdx.x >> 5] = high, lows[threadIdx.x >> 5] = low;
    sound = __syncthreads_and(sound) != 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) high = fmaxf(high, highs[w]), low = fminf(low, lows[w]);
    return Scale(high, low, sound, row);
}

__device__ __forceinline__ void count_bins(const Adjusted& logits, const Scale& scale, u32* count, u64 (&own)[kOwnBins]) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) count[i] = 0;
    __syncthreads();
    logits.each([&](float v, int) {
        const float heat = scale.heat(v);
        if (is_finite(heat)) atomicAdd(&count[scale.bin(heat)], 1u);
    });
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) own[i] = count[threadIdx.x * kOwnBins + i];
}

// Of the bins up to `last`.
__device__ __forceinline__ void weigh_bins(const Adjusted& logits, const Scale& scale, int last, Sums<kBins>& mass,
                                           u64 (&own)[kOwnBins]) {
    mass.clear();
    __syncthreads();
    logits.each([&](float v, int) {
        const float heat = scale.heat(v);
        if (!is_finite(heat)) return;
        const int bin = scale.bin(heat);
        const u64 w = bin <= last ? weigh(heat) : 0;
        if (w != 0) mass.add(bin, w);
    });
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) own[i] = mass.at(threadIdx.x * kOwnBins + i);
}

// A thread's best draw. The hottest token is always kept, so what stays below it whatever its noise needs none.
struct Draw {
    const Row& row;
    int place;
    u64 best = 0;
    float worth = kLeastNoise;  // a score that some token reaches

    __device__ __forceinline__ void add(float heat, int id) {
        if (heat + kMostNoise < worth) return;
        const float score = heat + noise(row.noise_key, place, id);
        best = larger(best, candidate(score, id));
        worth = fmaxf(worth, score);
    }
};

__device__ __forceinline__ u64 best_of(const Row& row, const Adjusted& logits, const Scale& scale, int place, Room& room) {
    __shared__ int listed;
    Cut cut{kAll, kBins, 0, 0, 0, 0};
    u64 counts[kOwnBins];
    if (row.filtered()) {
        count_bins(logits, scale, room.bins.count, counts);
        cut = cut_of(row, counts,
                     [&](u64 (&masses)[kOwnBins]) { weigh_bins(logits, scale, kBins, room.bins.mass, masses); });
    }
    Draw draw{row, place};
    if (cut.mode == kWhole) {
        u64 masses[kOwnBins] = {};
        if (row.top_p < 1.0) weigh_bins(logits, scale, cut.last, room.bins.mass, masses);
        const Whole<Adjusted> whole{logits, scale};
        const u32 least = whole.least_key(row, cut, counts, masses);
        whole.each([&](float heat, int id) {
            if (ordered(heat) >= least && heat >= row.floor) draw.add(heat, id);
        });
        return draw.best;
    }
    __syncthreads();  // the bins are read
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    logits.each([&](float v, int id) {
        const float heat = row.greedy() ? v : scale.heat(v);
        if (!is_finite(heat)) return;
        if (cut.mode != kAll) {
            const int bin = scale.bin(heat);
            if (bin > cut.last) return;
            if (cut.mode == kList || bin == cut.last) {
                room.list[atomicAdd(&listed, 1)] = candidate(heat, id);
                return;
            }
        }
        if (row.greedy())
            draw.best = larger(draw.best, candidate(heat, id));
        else if (heat >= row.floor)
            draw.add(heat, id);
    });
    __syncthreads();
    if (cut.mode != kAll && listed > 0) draw.best = larger(draw.best, draw_listed(row, cut, room.list, listed, place));
    return draw.best;
}

}  // namespace

// Replaces best[m] of the rows that ask for it. logits [rows, kVocabulary], float32 or bf16.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sample(const Row* rows, const int* position, const u8* logits, u64* best, int trigger) {
    extern __shared__ Quad ring[];
    __shared__ Room room;
    const int m = blockIdx.x;
    if (trigger == 0) let_next_start();
    const Row row = rows[m];
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int place = load_shared_state(position + m);
    if (!(row.uses & kOn) || place < 0) return;
    u32* own_marks = row.uses & kMarked ? row.marks : nullptr;
    const Adjusted own{row, logits + u64(m) * kVocabulary * (OP_FLOAT32 ? 4 : 2), row.uses & kBiased ? row.bias : nullptr,
                       own_marks, place + 1 < row.free_from, ring};
    const Scale scale = scale_of(row, own);
    u64 found = 0;
    if (scale.sound) found = block_best(best_of(row, own, scale, place + 1, room));
    if (threadIdx.x != 0) return;
    best[m] = found;
    if (found != 0 && own_marks != nullptr) {
        u32* mark = own_marks + int(~u32(found));
        *mark = (*mark | kSeen) + 1;
    }
}

// Writes the tables of rows that come, by blocks that have kShare tokens each. told: an offset for each row, and there
//   address of its biases and of its marks (2 words each, 0 for none), counts of ids given, made, barred and biased, these
//   ids one kind after the other, and the biases.
constexpr int kShare = 4096;
extern "C" __global__ void __launch_bounds__(kThreads) fill(const int* told) {
    __shared__ u32 marks[kShare];
    __shared__ float biases[kShare];
    const int* own = told + told[blockIdx.y];
    const auto address = [&](int at) { return u64(u32(own[at + 1])) << 32 | u32(own[at]); };
    float* bias_table = reinterpret_cast<float*>(address(0));
    u32* mark_table = reinterpret_cast<u32*>(address(2));
    const int given = own[4], made = own[5], barred = own[6], biased = own[7];
    const int first = blockIdx.x * kShare, count = min(kShare, kVocabulary - first);
    const int* ids = own + 8;
    const int* values = ids + given + made + barred + biased;
    for (int i = threadIdx.x; i < count; i += kThreads) marks[i] = 0, biases[i] = 0.f;
    __syncthreads();
    for (int i = threadIdx.x; i < given + made + barred + biased; i += kThreads) {
        const int id = ids[i] - first;
        if (id < 0 || id >= count) continue;
        if (i < given + made) {
            atomicOr(&marks[id], kSeen);
            if (i >= given) atomicAdd(&marks[id], 1u);
        } else if (i < given + made + barred) {
            atomicOr(&marks[id], kBarred);
        } else {
            atomicAdd(&biases[id], __int_as_float(values[i - (given + made + barred)]));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
        if (mark_table != nullptr) mark_table[first + i] = marks[i];
        if (bias_table != nullptr) bias_table[first + i] = biases[i];
    }
}
