// The state of a batch's rows between steps: `change` takes in what the host says of rows that come, go, move or get
// pages; `pick` chooses each row's token; `finish` moves the rows on and tells the host through a pinned ring.
//
// An entry of the ring is (number of the step << 32) | (flags << 24) | token. Every row of a step writes one, idle rows
// too, so that a step has ended for the host when all its entries carry its number.
#include "chosen.cuh"

constexpr u32 kIdle = 128;  // a flag, beside those of `chosen.cuh`
constexpr int kLeave = 0, kPages = 1, kEnter = 2, kMove = 3;
constexpr int kSampled = 16;  // words of a row of `sampling.cuh`
constexpr int kPickThreads = 256, kEach = 16;  // logits a thread looks at

// mail: an offset for each block, and there what it is to do:
//   leave  0, row
//   pages  1, row, first, count, pages
//   enter  2, row, token, position, last, free_from, temperature, noise (2 words), stops (8), count, the row of
//          `sampling.cuh` (16 words), pages
//   move   3, row, source
// No two blocks of a launch have the same row.
extern "C" __global__ void __launch_bounds__(128)
    change(const int* mail, int* token, int* position, int* length, int* last, int* free_from, float* temperature,
           u64* noise_key, int* stops, int* sampled, int* page_table, int table_stride) {
    const int* op = mail + mail[blockIdx.x];
    const int kind = op[0], row = op[1];
    int* pages = page_table + u64(row) * table_stride;
    if (kind == kLeave) {
        if (threadIdx.x == 0) position[row] = -1, length[row] = 0;
    } else if (kind == kPages) {
        for (int i = threadIdx.x; i < op[3]; i += blockDim.x) pages[op[2] + i] = op[4 + i];
    } else if (kind == kEnter) {
        if (threadIdx.x == 0) {
            token[row] = op[2], position[row] = op[3], length[row] = op[3] + 1, last[row] = op[4];
            free_from[row] = op[5], temperature[row] = __int_as_float(op[6]);
            noise_key[row] = (u64(u32(op[8])) << 32) | u32(op[7]);
        }
        if (threadIdx.x < kMaxStops) stops[row * kMaxStops + threadIdx.x] = op[9 + threadIdx.x];
        if (threadIdx.x < kSampled) sampled[row * kSampled + threadIdx.x] = op[18 + threadIdx.x];
        for (int i = threadIdx.x; i < op[17]; i += blockDim.x) pages[i] = op[18 + kSampled + i];
    } else if (kind == kMove) {
        const int from = op[2];
        if (threadIdx.x == 0) {
            token[row] = token[from], position[row] = position[from], length[row] = length[from], last[row] = last[from];
            free_from[row] = free_from[from], temperature[row] = temperature[from], noise_key[row] = noise_key[from];
            position[from] = -1, length[from] = 0;
        }
        if (threadIdx.x < kMaxStops) stops[row * kMaxStops + threadIdx.x] = stops[from * kMaxStops + threadIdx.x];
        if (threadIdx.x < kSampled) sampled[row * kSampled + threadIdx.x] = sampled[from * kSampled + threadIdx.x];
        const int* source = page_table + u64(from) * table_stride;
        for (int i = threadIdx.x; i < table_stride; i += blockDim.x) pages[i] = source[i];
    }
}

__device__ __forceinline__ float logit(const u8* product, u64 at, u64 size, int slices) {
    if constexpr (OP_SLICES) {
        float sum = 0.f;
        for (int s = 0; s < slices; ++s) sum += load_shared_state(reinterpret_cast<const float*>(product) + s * size + at);
        return sum;
    } else {
        return bf16_to_float(reinterpret_cast<const u16*>(product)[at]);
    }
}

// best[m] = the best of logit (greedy) or logit / temperature + noise, as a key whose lower half is the id's complement.
// Stop tokens are barred before position free_from.
extern "C" __global__ void __launch_bounds__(kPickThreads)
    pick(const u8* product, const float* bias, int slices, const int* position, const int* free_from,
         const float* temperature, const u64* noise_key, const int* stops, u64* best, int tokens, int trigger) {
    __shared__ u64 of_warp[kPickThreads / 32];
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const int m = blockIdx.y, here = load_shared_state(position + m);
    if (here < 0) return;
    const float heat = load_shared_state(temperature + m);
    const bool barred = here + 1 < load_shared_state(free_from + m);
    const u64 key = load_shared_state(noise_key + m), row = u64(m) * OP_VOCABULARY, size = u64(tokens) * OP_VOCABULARY;
    const int first = blockIdx.x * kPickThreads * kEach + threadIdx.x;
    float v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        if (const int n = first + i * kPickThreads; n < OP_VOCABULARY) v[i] = logit(product, row + n, size, slices);
    u64 mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int n = first + i * kPickThreads;
        if (n >= OP_VOCABULARY) break;
        float score = v[i] + (OP_SLICES && bias != nullptr ? bias[n] : 0.f);
        if (heat > 0.f) score = score / fmaxf(heat, 1e-30f) + gumbel(key, here + 1, n);  // a quotient must stay finite
        if (barred)
            for (int s = 0; s < kMaxStops; ++s)
                if (load_shared_state(stops + m * kMaxStops + s) == n) score = minus_infinity();
        const u64 c = candidate(score, n);
        mine = c > mine ? c : mine;
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) {
        const u64 other = __shfl_xor_sync(0xFFFFFFFFu, mine, d);
        mine = other > mine ? other : mine;
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kPickThreads / 32; ++w) mine = of_warp[w] > mine ? of_warp[w] : mine;
        atomicMax(best + m, mine);
    }
}

// One block. `number` is that of the step before.
extern "C" __global__ void __launch_bounds__(512)
    finish(u64* best, int* token, int* position, int* length, const int* last, const int* stops, u32* number, u64* ring,
           int ring_size, int ring_stride, int rows, int trigger) {
    if (trigger == 0) let_next_start();
    wait_for_previous();
    if (trigger == 1) let_next_start();
    const u32 step = u32(load_shared_state(reinterpret_cast<const int*>(number))) + 1;
    for (int m = threadIdx.x; m < rows; m += blockDim.x) {
        const u64 key = load_shared_state(best + m);
        const int here = load_shared_state(position + m);
        u32 flags = kIdle;
        int id = 0;
        if (here >= 0) {
            const bool none = !is_finite_score(u32(key >> 32));
            id = none ? 0 : int(~u32(key));
            flags = none ? kNoToken : 0u;
            for (int i = 0; i < kMaxStops; ++i)
                if (!none && load_shared_state(stops + m * kMaxStops + i) == id) flags |= kStopped;
            if (here + 1 >= load_shared_state(last + m)) flags |= kFull;
            best[m] = 0;
            token[m] = id;
            position[m] = flags != 0 ? -1 : here + 1;
            length[m] = flags != 0 ? 0 : here + 2;
        }
        const u64 entry = (u64(step) << 32) | (flags << 24) | u32(id);
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(ring + u64(step % u32(ring_size)) * ring_stride + m),
                     "l"(entry)
                     : "memory");
    }
    __syncthreads();
    if (threadIdx.x == 0) *number = step;
}
