// Decode attention of many rows over paged keys and values that are already in their pages, the newest token's too.
//
// All pages of a step lie in one line: row by row, of a row head by head, of a head in the order of the context. `plan`,
// once a step, cuts the line into equal runs, as many as `attend` has warps or fewer. So a warp has work of its own, with pages,
// sums and maximum, and meets no other, however uneven the rows are. What a warp has of a head whose pages lie in several
// runs it leaves in the workspace, at most twice; whichever warp comes last puts the head together, always in one order.
//
// A warp copies pages ahead into a ring of its own. Scores = K·qᵀ with tokens as rows of the tensor-core product and up to
// eight query heads as its columns, out = Vᵀ·p with dimensions as rows. In the ring, segments of 16 bytes stand permuted
// within 128, so that both are read 16 bytes a lane without conflicts.
#include "copies.cuh"
#include "order.cuh"
#include "stored.cuh"

constexpr int kPage = 16, kDim = OP_HEAD_DIM, kShared = OP_Q_HEADS / OP_KV_HEADS;
constexpr int kSubgroups = ceil_div(kShared, 8), kHeads = ceil_div(kShared, kSubgroups);  // query heads of an item
constexpr int kItems = OP_KV_HEADS * kSubgroups;                                        // of a row
constexpr int kSpans = kDim / 32, kBlocks = kDim / 64;
constexpr int kSegments = kDim * kKvBytes / 16;  // of 16 bytes, of a token
constexpr int kHalf = kPage * kDim * kKvBytes, kStage = 2 * kHalf;  // bytes of a page's keys; of a stage
constexpr int kWidth = OP_Q_HEADS * kDim;
constexpr int kPlanThreads = 1024;
static_assert(kDim % 64 == 0 && OP_Q_HEADS % OP_KV_HEADS == 0, "head layout");

struct alignas(16) Entry {  // a row that has a context
    int row, first, pages, length;  // its first page that is seen, how many are, tokens of the context
};
struct alignas(16) Run {  // where a warp starts
    int entry, item, page, count;
};

__device__ __forceinline__ Entry load_entry(const Entry* at) {
    const Quad q = load_shared_state(static_cast<const void*>(at));
    return {int(q.r[0]), int(q.r[1]), int(q.r[2]), int(q.r[3])};
}

// plan: pages of a run. One block; rows ≤ kPlanThreads. The next kernel must not start before it has ended: `attend`
// reads the plan before its wait.
extern "C" __global__ void __launch_bounds__(kPlanThreads)
    plan(const int* lengths, int rows, int units, int window, int* each, Entry* entries, Run* runs) {
    __shared__ u64 of_warp[kPlanThreads / 32];
    __shared__ int longest;  // pages of a head
    __shared__ int ends[kPlanThreads];  // pages of one head up to and with an entry
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = threadIdx.x;
    wait_for_previous();
    if (threadIdx.x == 0) longest = 0;
    const int length = row < rows ? max(load_shared_state(lengths + row), 0) : 0;
    const int first = window > 0 ? max(length - window, 0) / kPage : 0;
    const int pages = ceil_div(length, kPage) - first;
    u64 upto = u64(length > 0) << 32 | u32(pages);
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        const u64 other = __shfl_up_sync(0xFFFFFFFFu, upto, d);
        if (lane >= d) upto += other;
    }
    if (lane == 31) of_warp[warp] = upto;
    __syncthreads();
    u64 before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kPlanThreads / 32; ++w) before += w < warp ? of_warp[w] : 0, all += of_warp[w];
    upto += before;
    if (length > 0) {
        atomicMax(&longest, pages);
        const int at = int(upto >> 32) - 1;
        ends[at] = int(u32(upto));
        entries[at] = Entry{row, first, pages, length};
    }
    __syncthreads();
    const int live = int(all >> 32), total = int(u32(all)) * kItems;
    // One warp puts a head together, run by run, so a head of many pages has fewer, longer runs.
    int least = OP_LEAST;
    while (16 * least * least <= OP_MERGED * longest) least *= 2;
    const int run = max(least, ceil_div(total, units));
    if (threadIdx.x == 0) *each = run;
    for (int u = threadIdx.x; u < units; u += kPlanThreads) {
        const long long at = (long long)u * run;
        if (at >= total) {
            runs[u] = Run{0, 0, 0, 0};
            continue;
        }
        const int line = int(at) / kItems;  // the entry whose pages, of all heads, hold `at`
        int low = 0, high = live - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > line) high = middle; else low = middle + 1;
        }
        const int start = low > 0 ? ends[low - 1] : 0, held = ends[low] - start;
        const int within = int(at) - start * kItems;
        runs[u] = Run{low, within / held, within % held, min(run, total - int(at))};
    }
}

namespace {

__device__ __forceinline__ float exp2_of(float v) {
    float f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(v));
    return f;
}

// Where a segment of a token's row stands in a stage. Of bf16, a K read has in a phase the rows 2i and 2i + 1 with four
// segments each, a V read the rows 0, 2, 4, 6 or 1, 3, 5, 7 with two; of e4m3, with two each, K the rows 4i to 4i + 3.
__device__ __forceinline__ int spot(int token, int segment) {
    constexpr int within = kSegments % 8 == 0 ? 6 : 2;
    const int moved = kKvBytes == 2 ? (token & 6) ^ ((token & 1) << 2)
                                    : (((token & 2) | ((token ^ (token >> 2)) & 1)) << 1) & within;
    return token * kDim * kKvBytes + ((segment ^ moved) << 4);
}
// Eight values of a token out of a stage, from value 8n on.
__device__ __forceinline__ Eight load_eight(const u8* stage, int token, int n) {
    const int at = kKvBytes == 2 ? spot(token, n) : spot(token, n / 2) + n % 2 * 8;
    return *reinterpret_cast<const Eight*>(stage + at);
}

// Where a row's results go.
struct Target {
    u16* out;
    int row, rows, column;  // of the first of an item's heads

    __device__ __forceinline__ u32* pair(int head, int d) const {
        return reinterpret_cast<u32*>(out + place_of<kWidth>(column + head * kDim + d, row, rows));
    }
};

// The line of pages from a run's start on.
struct Line {
    const Entry* entries;
    Entry entry;
    int at, item, page;

    __device__ __forceinline__ Line(const Entry* entries, const Run& run)
        : entries(entries), entry(load_entry(entries + run.entry)), at(run.entry), item(run.item), page(run.page) {}
    // `more`: whether there is a page after these of the item.
    __device__ __forceinline__ void next(int pages, bool more) {
        page += pages;
        if (page < entry.pages) return;
        page = 0;
        if (++item < kItems) return;
        item = 0, ++at;
        if (more) entry = load_entry(entries + at);
    }
    __device__ __forceinline__ bool newest() const { return page == entry.pages - 1; }
};

// Copies the line's pages into the warp's ring, one after the other.
struct Ahead {
    Line line;
    const u8 *keys, *values;
    const int* table;
    int stride, left, id, id_entry, id_base;  // a lane's page of the 32 from id_base on
    u8* ring;

    __device__ __forceinline__ void bring(int stage) {
        const int lane = threadIdx.x % 32, base = line.page & ~31;
        if (line.at != id_entry || base != id_base) {
            id_entry = line.at, id_base = base;
            const int n = base + lane;
            id = n < line.entry.pages ? load_shared_state(table + u64(line.entry.row) * stride + line.entry.first + n) : 0;
        }
        const u64 page = u64(__shfl_sync(0xFFFFFFFFu, id, line.page & 31));
        const u64 from = (page * OP_KV_HEADS + line.item / kSubgroups) * kHalf;
        u8* to = ring + stage * kStage;
#pragma unroll
        for (int i = 0; i < kPage * kSegments / 32; ++i) {
            const int at = i * 32 + lane, place = spot(at / kSegments, at % kSegments);
            copy_async(to + place, keys + from + at * 16, true);
            copy_async(to + kHalf + place, values + from + at * 16, true);
        }
        line.next(1, --left > 0);
    }
};

// What a warp holds of softmax(scores)·V, of heads 2t and 2t + 1.
struct Partial {
    float top[2] = {minus_infinity(), minus_infinity()}, sum[2] = {0.f, 0.f};  // sum: of this lane's tokens
    float out[kBlocks][4][4] = {};  // dims 64b + 8g + 2c, 2c + 1 × heads: 2·dim + head

    // One page, of which tokens from `from` up to `to` are seen.
    __device__ __forceinline__ void add(const u8* stage, const Quad (&q)[kSpans], int from, int to, float scale) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float s[4] = {}, more[4] = {};
#pragma unroll
        for (int j = 0; j < kSpans; ++j) {
            const Quad a = widen(load_eight(stage, g, 4 * j + t)), b = widen(load_eight(stage, g + 8, 4 * j + t));
            const u32 low[4] = {a.r[0], b.r[0], a.r[1], b.r[1]}, high[4] = {a.r[2], b.r[2], a.r[3], b.r[3]};
            multiply_add(s, low, q[j].r[0], q[j].r[1]);
            multiply_add(more, high, q[j].r[2], q[j].r[3]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int token = g + c / 2 * 8;
            s[c] = token >= from && token < to ? (s[c] + more[c]) * scale : minus_infinity();
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float best = fmaxf(s[c], s[c + 2]);
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, d));
            best = fmaxf(top[c], best);  // some token of every page is seen
            const float kept = exp2_of(top[c] - best);
            s[c] = exp2_of(s[c] - best), s[c + 2] = exp2_of(s[c + 2] - best);
            sum[c] = sum[c] * kept + s[c] + s[c + 2];
            top[c] = best;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                for (int p = 0; p < 4; ++p) out[b][p][c] *= kept, out[b][p][c + 2] *= kept;
        }
        const u32 p0 = transpose8x8(pack_operands(s[0], s[1])), p1 = transpose8x8(pack_operands(s[2], s[3]));
        const u8* values = stage + kHalf;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            Eight v[4];  // tokens 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = load_eight(values, 2 * t + i % 2 + i / 2 * 8, 8 * b + g);
            if (to < kPage) {  // what lies past the context may be anything, even NaN
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (2 * t + i % 2 + i / 2 * 8 >= to) v[i] = Eight{};
            }
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const u32 a[4] = {beside(v[0].w, v[1].w, 2 * p), beside(v[0].w, v[1].w, 2 * p + 1),
                                  beside(v[2].w, v[3].w, 2 * p), beside(v[2].w, v[3].w, 2 * p + 1)};
                multiply_add(out[b][p], a, p0, p1);
            }
        }
    }

    __device__ __forceinline__ void end() {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) sum[c] += __shfl_xor_sync(0xFFFFFFFFu, sum[c], d);
    }

    __device__ __forceinline__ void store(const Target& to, int heads) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (2 * t + c >= heads) continue;
            const float f = 1.f / sum[c];
#pragma unroll
            for (int b = 0; b < kBlocks; ++b) {
                Quad q;
#pragma unroll
                for (int p = 0; p < 4; ++p) q.r[p] = pack_operands(out[b][p][c] * f, out[b][p][c + 2] * f);
                const int h = 2 * t + c, d = b * 64 + g * 8;
                if constexpr (OP_ORDER == kBf16) {
                    *reinterpret_cast<Quad*>(to.pair(h, d)) = q;
                } else {
#pragma unroll
                    for (int p = 0; p < 4; ++p) *to.pair(h, d + 2 * p) = q.r[p];
                }
            }
        }
    }

    // float32, for whoever puts the item together: [kHeads][kDim], and [kHeads] of maximum and sum.
    __device__ __forceinline__ void leave(float* outs, Float2* sums, int heads) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            if (2 * t + c >= heads) continue;
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                for (int p = 0; p < 4; p += 2) {
                    const Quad q = {__float_as_uint(out[b][p][c]), __float_as_uint(out[b][p][c + 2]),
                                    __float_as_uint(out[b][p + 1][c]), __float_as_uint(out[b][p + 1][c + 2])};
                    *reinterpret_cast<Quad*>(outs + (2 * t + c) * kDim + b * 64 + g * 8 + p * 2) = q;
                }
            if (g == 0) sums[2 * t + c] = Float2{top[c], sum[c]};
        }
    }
};

// An item out of what the runs `first` … `last` have left of it: a run's second slot is where an item begins that goes on
// in the next, its first where one goes on.
__device__ __forceinline__ void merge(const float* outs, const Float2* sums, int first, int last, const Target& to,
                                      int heads) {
    constexpr int kEach = kDim / 64;                              // pairs of a lane
    constexpr int kTogether = kHeads >= 8 ? 1 : 8 / kHeads;  // runs whose reads are under way together
    const int lane = threadIdx.x % 32;
    auto slot = [&](int run) { return u64(2 * run + (run == first)) * kHeads; };
    float best[kHeads], sum[kHeads] = {};
    Float2 all[kHeads][kEach] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) best[h] = minus_infinity();
    for (int run = first + lane; run <= last; run += 32)
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
            if (h < heads) best[h] = fmaxf(best[h], load_shared_state(sums + slot(run) + h).x);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int d = 16; d > 0; d >>= 1) best[h] = fmaxf(best[h], __shfl_xor_sync(0xFFFFFFFFu, best[h], d));
    for (int run = first; run <= last; run += kTogether) {
        Float2 part[kTogether][kHeads], v[kTogether][kHeads][kEach];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
                if (run + i <= last && h < heads) {
                    const u64 at = slot(run + i) + h;
                    part[i][h] = load_shared_state(sums + at);
#pragma unroll
                    for (int e = 0; e < kEach; ++e)
                        v[i][h][e] = load_shared_state(reinterpret_cast<const Float2*>(outs + at * kDim) + e * 32 + lane);
                }
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
                if (run + i <= last && h < heads) {
                    const float f = exp2_of(part[i][h].x - best[h]);
                    sum[h] += f * part[i][h].y;
#pragma unroll
                    for (int e = 0; e < kEach; ++e) all[h][e].x += f * v[i][h][e].x, all[h][e].y += f * v[i][h][e].y;
                }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
        if (h < heads)
#pragma unroll
            for (int e = 0; e < kEach; ++e)
                *to.pair(h, 2 * (e * 32 + lane)) = pack_operands(all[h][e].x / sum[h], all[h][e].y / sum[h]);
}

}  // namespace

// queries [rows, OP_Q_HEADS, kDim]; out [rows, kWidth] in the order of OP_ORDER. Rows without a context are left alone.
extern "C" __global__ void __launch_bounds__(OP_WARPS * 32)
    attend(const u16* queries, const u8* key_pool, const u8* value_pool, const int* page_table, int table_stride,
           const int* each, const Entry* entries, const Run* runs, float* outs, Float2* sums, int* arrivals, u16* out,
           int rows, float scale, int window, int trigger) {
    extern __shared__ __align__(128) u8 rings[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    if (trigger == 0) let_next_start();
    const int unit = warp * gridDim.x + blockIdx.x;  // neighbours on different multiprocessors, should there be few
    const Quad words = load_shared_state(static_cast<const void*>(runs + unit));
    const Run run{int(words.r[0]), int(words.r[1]), int(words.r[2]), int(words.r[3])};
    if (run.count == 0) {
        wait_for_previous();
        return;
    }
    Line line(entries, run);
    u8* ring = rings + warp * OP_STAGES * kStage;
    Ahead ahead{line, key_pool, value_pool, page_table, table_stride, run.count, 0, -1, 0, ring};
    // Every page but a row's last was written by steps before.
    int ready = 0;
    while (ready < OP_STAGES && ahead.left > 0 && !ahead.line.newest()) ahead.bring(ready++), end_copy_group();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    for (; ready < OP_STAGES; ++ready) {
        if (ahead.left > 0) ahead.bring(ready);
        end_copy_group();
    }
    int stage = 0;
    for (int done = 0; done < run.count;) {
        const Entry entry = line.entry;
        const int kv = line.item / kSubgroups, sub = line.item % kSubgroups, head = kv * kShared + sub * kHeads;
        const int heads = min(kHeads, kShared - sub * kHeads);
        const u16* own = queries + (u64(entry.row) * OP_Q_HEADS + head) * kDim;
        const Target target{out, entry.row, rows, head * kDim};
        Quad q[kSpans];
#pragma unroll
        for (int j = 0; j < kSpans; ++j)
            q[j] = g < heads ? load_shared_state(static_cast<const void*>(own + g * kDim + 32 * j + 8 * t)) : Quad{};
        const int page = line.page, pages = min(entry.pages - page, run.count - done);
        const int oldest = window > 0 ? entry.length - window : 0;
        Partial part;
        for (int i = 0; i < pages; ++i) {
            wait_copy_groups<OP_STAGES - 1>();
            __syncwarp();
            const int token = (entry.first + page + i) * kPage;
            part.add(ring + stage * kStage, q, oldest - token, entry.length - token, scale);
            __syncwarp();
            if (ahead.left > 0) ahead.bring(stage);
            end_copy_group();
            if (++stage == OP_STAGES) stage = 0;
        }
        part.end();
        if (pages == entry.pages) {
            part.store(target, heads);
        } else {
            const u64 slot = u64(2 * unit + (page == 0)) * kHeads;
            part.leave(outs + slot * kDim, sums + slot, heads);
            __threadfence();
            __syncwarp();
            const int length = load_shared_state(each), start = unit * length + done - page;  // of the item, in the line
            const int first = start / length, last = (start + entry.pages - 1) / length;
            int before = 0;
            if (lane == 0) {
                before = atomicAdd(arrivals + first, 1);
                if (before == last - first) arrivals[first] = 0;  // ready for the next launch
            }
            if (__shfl_sync(0xFFFFFFFFu, before, 0) == last - first) {
                __threadfence();
                merge(outs, sums, first, last, target, heads);
            }
        }
        done += pages;
        line.next(pages, done < run.count);
    }
    wait_copy_groups<0>();
}
