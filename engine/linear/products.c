// Products of float32 rows with weights that are kept in fewer bits: y[m][n] = sum over k of x[m][k] * w[n][k].
//
// The sums of an output are done in one order, in float32, whatever the other rows, columns and threads do. So a row's
// result does not depend on how many rows a step has.
//
// bits4 and bits8 lie in blocks of LANES outputs; within a block the inputs follow one another, each with its LANES
// values: HALF bytes of two values (the first HALF outputs in the low halves, the others in the high ones), or LANES
// signed bytes.
// 16 bits are a plain matrix [outputs][inputs] of bfloat16 or float16.

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// What one vector holds: as the units have it, since compilers split wider ones badly.
#if defined(__AVX512F__)
#define HALF 16
#elif defined(__AVX2__)
#define HALF 8
#else
#define HALF 4
#endif
#define LANES (2 * HALF)

typedef float floats __attribute__((vector_size(4 * HALF)));
typedef int32_t ints __attribute__((vector_size(4 * HALF)));
typedef uint32_t words __attribute__((vector_size(4 * HALF)));
typedef uint16_t shorts __attribute__((vector_size(2 * HALF)));
typedef uint8_t bytes __attribute__((vector_size(HALF)));
typedef int8_t chars __attribute__((vector_size(HALF)));

// Rows that share what was read and widened of a weight, and outputs of a plain one that share what was read of a row:
// as many as the registers hold sums of.
#if defined(__AVX512F__)
#define MOST_ROWS 8
#define ABREAST 4
#else
#define MOST_ROWS 4
#define ABREAST 2
#endif
#define ROWS_AT_ONCE 64  // their inputs stay in the second cache while all outputs pass by

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *x;  // [rows][inputs]
    float *y;        // [rows][outputs]
    long rows, inputs, outputs;
    int threads;
} product;

INLINE floats load_floats(const float *from) {
    floats v;
    memcpy(&v, from, sizeof v);
    return v;
}

// HALF whole numbers to lanes of 32 bits. Compilers take lanes of different widths apart one by one; the instructions
// are named where there are any.
#if defined(__AVX512F__)
INLINE ints widen_bytes(bytes v) { return (ints)_mm512_cvtepu8_epi32((__m128i)v); }
INLINE ints widen_chars(chars v) { return (ints)_mm512_cvtepi8_epi32((__m128i)v); }
INLINE words widen_shorts(shorts v) { return (words)_mm512_cvtepu16_epi32((__m256i)v); }
#elif defined(__AVX2__)
INLINE ints widen_bytes(bytes v) { return (ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)v)); }
INLINE ints widen_chars(chars v) { return (ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)v)); }
INLINE words widen_shorts(shorts v) { return (words)_mm256_cvtepu16_epi32((__m128i)v); }
#else
INLINE ints widen_bytes(bytes v) { return __builtin_convertvector(v, ints); }
INLINE ints widen_chars(chars v) { return __builtin_convertvector(v, ints); }
INLINE words widen_shorts(shorts v) { return __builtin_convertvector(v, words); }
#endif

INLINE floats to_floats(ints v) { return __builtin_convertvector(v, floats); }

INLINE ints load_bytes(const uint8_t *from) {
    bytes v;
    memcpy(&v, from, sizeof v);
    return widen_bytes(v);
}

INLINE floats of_chars(const int8_t *from) {
    chars v;
    memcpy(&v, from, sizeof v);
    return to_floats(widen_chars(v));
}

enum { BFLOAT16, FLOAT16, FLOAT32 };

// float16: its exponent is moved by a product with a power of two, which is exact for every finite number.
INLINE floats of_shorts(const uint16_t *from, int type) {
    shorts v;
    memcpy(&v, from, sizeof v);
    words wide = widen_shorts(v);
    if (type == BFLOAT16) return (floats)(wide << 16);
    floats size = (floats)((wide & 0x7fff) << 13) * 0x1p112f;
    return (floats)((words)size | ((wide & 0x8000) << 16));
}

INLINE floats of_type(const void *from, long at, int type) {
    return type == FLOAT32 ? load_floats((const float *)from + at) : of_shorts((const uint16_t *)from + at, type);
}

// The first `count` of LANES outputs.
INLINE void store(float *to, floats low, floats high, long count) {
    float all[LANES];
    if (count >= LANES) {
        memcpy(to, &low, sizeof low);
        memcpy(to + HALF, &high, sizeof high);
        return;
    }
    memcpy(all, &low, sizeof low);
    memcpy(all + HALF, &high, sizeof high);
    memcpy(to, all, count * sizeof(float));
}

typedef struct {
    const uint8_t *q;    // [blocks][inputs][HALF]
    const void *scale;   // of `type` [groups][blocks * LANES]
    const uint8_t *zero; // [groups][blocks * LANES]; a value is (q - zero) * scale
    const void *minimum; // in its place, of `type`: a value is q * scale + minimum
    long group, width;   // inputs a group; blocks * LANES
    int type;
} int4;

// sums [rows][groups]: of a row's inputs, by group.
INLINE void tile4(const product *p, const int4 *w, const float *sums, long m, long n, int rows) {
    floats low[MOST_ROWS], high[MOST_ROWS];
    const uint8_t *q = w->q + n / 2 * p->inputs;
    const long groups = p->inputs / w->group;
    for (int r = 0; r < rows; r++) low[r] = high[r] = (floats){0};
    for (long g = 0; g < groups; g++) {
        floats a[MOST_ROWS], b[MOST_ROWS];
        const float *x = p->x + m * p->inputs + g * w->group;
        for (int r = 0; r < rows; r++) a[r] = b[r] = (floats){0};
        for (long k = 0; k < w->group; k++, q += HALF) {
            ints both = load_bytes(q);
            floats wa = to_floats(both & 15), wb = to_floats(both >> 4);
            for (int r = 0; r < rows; r++) {
                float one = x[r * p->inputs + k];
                a[r] += wa * one;
                b[r] += wb * one;
            }
        }
        const long at = g * w->width + n;
        floats sa = of_type(w->scale, at, w->type), sb = of_type(w->scale, at + HALF, w->type);
        if (w->minimum) {
            floats ma = of_type(w->minimum, at, w->type), mb = of_type(w->minimum, at + HALF, w->type);
            for (int r = 0; r < rows; r++) {
                float sum = sums[(m + r) * groups + g];
                low[r] += sa * a[r] + ma * sum;
                high[r] += sb * b[r] + mb * sum;
            }
            continue;
        }
        floats za = to_floats(load_bytes(w->zero + at)), zb = to_floats(load_bytes(w->zero + at + HALF));
        for (int r = 0; r < rows; r++) {
            float sum = sums[(m + r) * groups + g];
            low[r] += sa * (a[r] - za * sum);
            high[r] += sb * (b[r] - zb * sum);
        }
    }
    for (int r = 0; r < rows; r++) store(p->y + (m + r) * p->outputs + n, low[r], high[r], p->outputs - n);
}

typedef struct {
    const int8_t *q;     // [blocks][inputs][LANES]
    const float *scale;  // [blocks * LANES]
} int8;

INLINE void tile8(const product *p, const int8 *w, long m, long n, int rows) {
    floats low[MOST_ROWS], high[MOST_ROWS];
    const int8_t *q = w->q + n * p->inputs;
    const float *x = p->x + m * p->inputs;
    for (int r = 0; r < rows; r++) low[r] = high[r] = (floats){0};
    for (long k = 0; k < p->inputs; k++, q += LANES) {
        floats wa = of_chars(q), wb = of_chars(q + HALF);
        for (int r = 0; r < rows; r++) {
            float one = x[r * p->inputs + k];
            low[r] += wa * one;
            high[r] += wb * one;
        }
    }
    floats sa = load_floats(w->scale + n), sb = load_floats(w->scale + n + HALF);
    for (int r = 0; r < rows; r++)
        store(p->y + (m + r) * p->outputs + n, low[r] * sa, high[r] * sb, p->outputs - n);
}

typedef struct {
    const uint16_t *w;  // [outputs][inputs]
    int type;
} plain;

// Lane by lane over the inputs, the lanes in order at the end, then what fills no vector.
INLINE void tile16(const product *p, const plain *w, long m, long n, int rows, int columns, int type) {
    floats sum[ABREAST][ABREAST];
    const long whole = p->inputs / HALF * HALF;
    const float *x = p->x + m * p->inputs;
    const uint16_t *from = w->w + n * p->inputs;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = (floats){0};
    for (long k = 0; k < whole; k += HALF) {
        floats wide[ABREAST];
        for (int c = 0; c < columns; c++) wide[c] = of_shorts(from + c * p->inputs + k, type);
        for (int r = 0; r < rows; r++) {
            floats one = load_floats(x + r * p->inputs + k);
            for (int c = 0; c < columns; c++) sum[r][c] += one * wide[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) {
            float all = 0;
            for (int lane = 0; lane < HALF; lane++) all += sum[r][c][lane];
            for (long k = whole; k < p->inputs; k++) {
                uint16_t last[HALF] = {from[c * p->inputs + k]};
                all += of_shorts(last, type)[0] * x[r * p->inputs + k];
            }
            p->y[(m + r) * p->outputs + n + c] = all;
        }
}

// All of [from, last) in tiles of constant sizes, so that sums stay in registers.
#define STEP(at, last, size, call) for (; at + size <= (last); at += size) call(at, size)
#if MOST_ROWS == 8
#define TILES(from, last, call)      \
    do {                             \
        long at_ = (from);           \
        STEP(at_, last, 8, call);    \
        STEP(at_, last, 4, call);    \
        STEP(at_, last, 2, call);    \
        STEP(at_, last, 1, call);    \
    } while (0)
#else
#define TILES(from, last, call)      \
    do {                             \
        long at_ = (from);           \
        STEP(at_, last, 4, call);    \
        STEP(at_, last, 2, call);    \
        STEP(at_, last, 1, call);    \
    } while (0)
#endif

INLINE long least(long a, long b) { return a < b ? a : b; }

#define OUTPUTS _Pragma("omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)")

// room: float [rows][groups].
void multiply4(const product *p, const int4 *w, float *room) {
    const long groups = p->inputs / w->group;
    for (long at = 0; at < p->rows * groups; at++) {
        float sum = 0;
        for (long k = 0; k < w->group; k++) sum += p->x[at * w->group + k];
        room[at] = sum;
    }
    for (long m = 0; m < p->rows; m += ROWS_AT_ONCE) {
        OUTPUTS
        for (long n = 0; n < p->outputs; n += LANES) {
#define CALL(at, rows) tile4(p, w, room, at, n, rows)
            TILES(m, least(m + ROWS_AT_ONCE, p->rows), CALL);
#undef CALL
        }
    }
}

void multiply8(const product *p, const int8 *w) {
    for (long m = 0; m < p->rows; m += ROWS_AT_ONCE) {
        OUTPUTS
        for (long n = 0; n < p->outputs; n += LANES) {
#define CALL(at, rows) tile8(p, w, at, n, rows)
            TILES(m, least(m + ROWS_AT_ONCE, p->rows), CALL);
#undef CALL
        }
    }
}

INLINE void rows16(const product *p, const plain *w, long m, long last, long n, int columns, int type) {
#define CALL(at, rows) tile16(p, w, at, n, rows, columns, type)
    STEP(m, last, ABREAST, CALL);
    STEP(m, last, 2, CALL);
    STEP(m, last, 1, CALL);
#undef CALL
}

INLINE void multiply16(const product *p, const plain *w, int type) {
    for (long m = 0; m < p->rows; m += ROWS_AT_ONCE) {
        const long last = least(m + ROWS_AT_ONCE, p->rows);
        OUTPUTS
        for (long n = 0; n < p->outputs; n += ABREAST) {
            if (n + ABREAST <= p->outputs)
                rows16(p, w, m, last, n, ABREAST, type);
            else
                for (long one = n; one < p->outputs; one++) rows16(p, w, m, last, one, 1, type);
        }
    }
}

void multiply_bfloat16(const product *p, const plain *w) { multiply16(p, w, BFLOAT16); }

void multiply_float16(const product *p, const plain *w) { multiply16(p, w, FLOAT16); }

int outputs_a_block(void) { return LANES; }
