// Tiles of products of float32 rows with weights that are kept in fewer bits: y[m][n] = sum over k of x[m][k] * w[n][k].
//
// The sums of an output are done in one order, in float32, whatever the other rows, columns and threads do. So a row's
// result does not depend on how many rows a step has, nor on whether `products.c` or `walk.c` multiplies.
//
// bits4 and bits8 lie in blocks of LANES outputs; within a block the inputs follow one another, each with its LANES
// values: HALF bytes of two values (the first HALF outputs in the low halves, the others in the high ones), or LANES
// signed bytes.
// 16 bits are a plain matrix [outputs][inputs] of bfloat16 or float16.

#pragma once

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

// Rows that share what was read and widened of a weight: as many as the registers hold sums of.
#if defined(__AVX512F__)
#define MOST_ROWS 8
#else
#define MOST_ROWS 4
#endif
// Outputs of a plain weight that share what was read of so many rows.
#define ABREAST(rows) ((rows) == MOST_ROWS ? 2 : 4)
#define ROWS_AT_ONCE 64  // their inputs stay in the second cache while all outputs pass by

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const float *x;  // [rows][inputs]
    float *y;        // [rows][stride], the first `outputs` of each
    long rows, inputs, outputs, stride;
    int threads;
} product;

// Asks for what will be read some time after `from`. Weights lie in the order in which they are read, and no processor
// looks far enough ahead by itself, least of all beyond a page: that halves what it reads a second.
#define AHEAD 6144
INLINE void fetch(const void *from) { __builtin_prefetch((const char *)from + AHEAD); }

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
    const void *scale;   // of `type` [blocks][groups][LANES]
    const uint8_t *zero; // [blocks][groups][LANES]; a value is (q - zero) * scale
    const void *minimum; // in its place, of `type`: a value is q * scale + minimum
    long group;          // inputs of one
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
            fetch(q);
            ints both = load_bytes(q);
            floats wa = to_floats(both & 15), wb = to_floats(both >> 4);
            for (int r = 0; r < rows; r++) {
                float one = x[r * p->inputs + k];
                a[r] += wa * one;
                b[r] += wb * one;
            }
        }
        const long at = n * groups + g * LANES;
        fetch((const char *)w->scale + at * (w->type == FLOAT32 ? 4 : 2));
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
    for (int r = 0; r < rows; r++) store(p->y + (m + r) * p->stride + n, low[r], high[r], p->outputs - n);
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
        fetch(q);
        floats wa = of_chars(q), wb = of_chars(q + HALF);
        for (int r = 0; r < rows; r++) {
            float one = x[r * p->inputs + k];
            low[r] += wa * one;
            high[r] += wb * one;
        }
    }
    floats sa = load_floats(w->scale + n), sb = load_floats(w->scale + n + HALF);
    for (int r = 0; r < rows; r++)
        store(p->y + (m + r) * p->stride + n, low[r] * sa, high[r] * sb, p->outputs - n);
}

typedef struct {
    const uint16_t *w;  // [outputs][inputs]
    int type;
} plain;

// The sums of the lanes of four vectors, each in the order ((0 + 2) + (1 + 3)) within four lanes, then by halves.
INLINE void add_lanes(const floats v[4], float to[4]) {
#if defined(__AVX512F__)
    __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
    __m512 all = _mm512_add_ps(low, high);
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
    __m256 a = (__m256)v[0], b = (__m256)v[1], c = (__m256)v[2], d = (__m256)v[3];
    __m256d ab = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
    __m256d cd = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
    __m256 low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), high = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
    __m256 all = _mm256_add_ps(low, high);
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int at = 0; at < 4; at++) to[at] = (v[at][0] + v[at][2]) + (v[at][1] + v[at][3]);
#endif
}

INLINE float add_up(floats v) {
    const floats four[4] = {v, v, v, v};
    float found[4];
    add_lanes(four, found);
    return found[0];
}

// Lane by lane over the inputs, then the lanes, then what fills no vector.
INLINE void tile16(const product *p, const plain *w, long m, long n, int rows, int columns, int type) {
    floats sum[MOST_ROWS][4];
    const long whole = p->inputs / HALF * HALF;
    const float *x = p->x + m * p->inputs;
    const uint16_t *from = w->w + n * p->inputs;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) sum[r][c] = (floats){0};
    for (long k = 0; k < whole; k += HALF) {
        floats wide[4];
        for (int c = 0; c < columns; c++) {
            fetch(from + c * p->inputs + k);
            wide[c] = of_shorts(from + c * p->inputs + k, type);
        }
        for (int r = 0; r < rows; r++) {
            floats one = load_floats(x + r * p->inputs + k);
            for (int c = 0; c < columns; c++) sum[r][c] += one * wide[c];
        }
    }
    for (int r = 0; r < rows; r++) {
        float all[4];
        add_lanes(sum[r], all);
        for (int c = 0; c < columns; c++) {
            for (long k = whole; k < p->inputs; k++) {
                uint16_t last[HALF] = {from[c * p->inputs + k]};
                all[c] += of_shorts(last, type)[0] * x[r * p->inputs + k];
            }
            p->y[(m + r) * p->stride + n + c] = all[c];
        }
    }
}

typedef struct {
    const float *w;  // [inputs][width], the first `outputs` of each
    long width;
} wide;

INLINE void tile32(const product *p, const wide *w, long m, long n, int rows) {
    floats low[MOST_ROWS], high[MOST_ROWS];
    const float *x = p->x + m * p->inputs, *from = w->w + n;
    for (int r = 0; r < rows; r++) low[r] = high[r] = (floats){0};
    for (long k = 0; k < p->inputs; k++, from += w->width) {
        floats a = load_floats(from), b = load_floats(from + HALF);
        __builtin_prefetch(from + 8 * w->width);
        for (int r = 0; r < rows; r++) {
            float one = x[r * p->inputs + k];
            low[r] += a * one;
            high[r] += b * one;
        }
    }
    for (int r = 0; r < rows; r++) store(p->y + (m + r) * p->stride + n, low[r], high[r], LANES);
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

// All rows of [m, last) with the LANES outputs from n on.
INLINE void block4(const product *p, const int4 *w, const float *sums, long m, long last, long n) {
#define CALL(at, rows) tile4(p, w, sums, at, n, rows)
    TILES(m, last, CALL);
#undef CALL
}

INLINE void block8(const product *p, const int8 *w, long m, long last, long n) {
#define CALL(at, rows) tile8(p, w, at, n, rows)
    TILES(m, last, CALL);
#undef CALL
}

INLINE void columns16(const product *p, const plain *w, long m, long n, int rows, int type) {
    const long end = least(n + LANES, p->outputs);
#define CALL(at, columns) tile16(p, w, m, at, rows, columns, type)
    STEP(n, end, ABREAST(rows), CALL);
    STEP(n, end, 1, CALL);
#undef CALL
}

INLINE void block16(const product *p, const plain *w, long m, long last, long n, int type) {
#define CALL(at, rows) columns16(p, w, at, n, rows, type)
    TILES(m, last, CALL);
#undef CALL
}

INLINE void block32(const product *p, const wide *w, long m, long last, long n) {
    if (n + LANES <= p->outputs) {
#define CALL(at, rows) tile32(p, w, at, n, rows)
        TILES(m, last, CALL);
#undef CALL
        return;
    }
    for (; m < last; m++)
        for (long one = n; one < p->outputs; one++) {
            float sum = 0;
            for (long k = 0; k < p->inputs; k++) sum += p->x[m * p->inputs + k] * w->w[k * w->width + one];
            p->y[m * p->stride + one] = sum;
        }
}

// Of one row's inputs, by group: lane by lane where a group is whole vectors.
INLINE void sum_groups(const float *x, long inputs, long group, float *sums) {
    for (long g = 0; g < inputs / group; g++, x += group) {
        if (group % HALF == 0) {
            floats sum = load_floats(x);
            for (long k = HALF; k < group; k += HALF) sum += load_floats(x + k);
            sums[g] = add_up(sum);
            continue;
        }
        float sum = 0;
        for (long k = 0; k < group; k++) sum += x[k];
        sums[g] = sum;
    }
}
