/* A BERT sentence encoder in eight bits for CPUs with AVX-512 VNNI: tokens in, one unit vector out.
 *
 * Weights are signed, one scale an output channel; activations are unsigned, one scale and zero point a row, found as
 * they come. A product is tiled six rows by 64 channels, so that 24 sums stay in registers, and draws the next 64
 * channels' weights into the second-level cache meanwhile. All else is float32. No state, no allocation, no libc.
 */

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

typedef __m512 Floats;
typedef __m512i Ints;
typedef int32_t __attribute__((may_alias)) Four; /* bytes */

typedef struct {
    const int8_t *weight; /* [channels / 64][inputs / 4][64][4] */
    const float *scale, *bias, *total; /* a channel each; total: the sum of its weights */
} Linear;

typedef struct {
    Linear mix, out, up, down;
    const float *norm1_scale, *norm1_bias, *norm2_scale, *norm2_bias;
} Layer;

typedef struct {
    int32_t layers, heads, width, wide; /* width and wide are multiples of 64; width / heads is 32 or 64 */
    float epsilon;
    const int8_t *words;
    const float *word_scale, *places, *norm_scale, *norm_bias;
    const Layer *layer;
} Encoder;

typedef struct {
    const uint8_t *value;
    const float *scale, *zero; /* a row each */
    int rows, width;
} Rounded;

enum Epilogue { PLAIN, GELU, ADD };

INLINE Floats all(float x) { return _mm512_set1_ps(x); }
INLINE Floats at(const float *x) { return _mm512_loadu_ps(x); }
INLINE Floats muladd(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }

/* Cephes' reduction, and a Taylor polynomial on what is left: 1e-7 relative. */
INLINE Floats exponential(Floats x) {
    x = _mm512_max_ps(x, all(-87.0f));
    Floats n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats r = _mm512_fnmadd_ps(n, all(-2.12194440e-4f), _mm512_fnmadd_ps(n, all(0.693359375f), x));
    Floats p = muladd(all(1.0f / 720), r, all(1.0f / 120));
    p = muladd(muladd(muladd(p, r, all(1.0f / 24)), r, all(1.0f / 6)), r, all(0.5f));
    return _mm512_scalef_ps(muladd(muladd(p, r, all(1.0f)), r, all(1.0f)), n);
}

/* x Phi(x) with the error function after Abramowitz and Stegun, 7.1.26. */
INLINE Floats gelu(Floats x) {
    Floats size = _mm512_abs_ps(x), z = _mm512_mul_ps(size, all(0.70710678f));
    Floats t = _mm512_rcp14_ps(muladd(z, all(0.3275911f), all(1.0f)));
    Floats p = muladd(muladd(all(1.061405429f), t, all(-1.453152027f)), t, all(1.421413741f));
    p = _mm512_mul_ps(muladd(muladd(p, t, all(-0.284496736f)), t, all(0.254829592f)), t);
    Floats tail = _mm512_mul_ps(p, exponential(_mm512_fnmadd_ps(z, z, all(0.0f)))); /* 2 - 2 Phi(|x|) */
    return _mm512_fnmadd_ps(_mm512_mul_ps(size, all(0.5f)), tail, _mm512_max_ps(x, all(0.0f)));
}

/* Written out, row by row, and with the instruction spelled: compilers else keep the sums in memory. */
#define ROWS_1(X) X(0)
#define ROWS_2(X) ROWS_1(X) X(1)
#define ROWS_3(X) ROWS_2(X) X(2)
#define ROWS_4(X) ROWS_3(X) X(3)
#define ROWS_5(X) ROWS_4(X) X(4)
#define ROWS_6(X) ROWS_5(X) X(5)
#define BEGIN(r) Ints s##r##0 = _mm512_setzero_si512(), s##r##1 = s##r##0, s##r##2 = s##r##0, s##r##3 = s##r##0;
#define DOT(sum, x, w) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w))
#define STEP(r) { \
    Ints x = _mm512_set1_epi32(*(const Four *)(from + (size_t)r * width + k)); \
    DOT(s##r##0, x, w0); DOT(s##r##1, x, w1); DOT(s##r##2, x, w2); DOT(s##r##3, x, w3); }
#define PUT(r) \
    _mm512_store_si512(sums[r], s##r##0), _mm512_store_si512(sums[r] + 16, s##r##1); \
    _mm512_store_si512(sums[r] + 32, s##r##2), _mm512_store_si512(sums[r] + 48, s##r##3);
#define TILE(M, AHEAD) \
    static void tile_##M##_##AHEAD(const uint8_t *from, int width, const int8_t *w, const char *next, int32_t (*sums)[64]) { \
        ROWS_##M(BEGIN) \
        for (int k = 0; k < width; k += 4, w += 256, next += 64 * AHEAD) { \
            Ints w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64); \
            Ints w2 = _mm512_load_si512(w + 128), w3 = _mm512_load_si512(w + 192); \
            if (AHEAD > 0) _mm_prefetch(next, _MM_HINT_T1); \
            if (AHEAD > 1) _mm_prefetch(next + 64, _MM_HINT_T1); \
            if (AHEAD > 2) _mm_prefetch(next + 128, _MM_HINT_T1), _mm_prefetch(next + 192, _MM_HINT_T1); \
            ROWS_##M(STEP) \
        } \
        ROWS_##M(PUT) \
    }
#define TILES(M) TILE(M, 0) TILE(M, 1) TILE(M, 2) TILE(M, 4)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#define OF(M) {tile_##M##_0, tile_##M##_1, tile_##M##_2, tile_##M##_4}
static void (*const tiles_of[6][4])(const uint8_t *, int, const int8_t *, const char *, int32_t (*)[64]) = {
    OF(1), OF(2), OF(3), OF(4), OF(5), OF(6)};

INLINE void finish(enum Epilogue how, const Rounded *a, int row, int rows, const Linear *l, int c, int channels,
                   int32_t (*sums)[64], const float *add, float *to) {
    for (int r = 0; r < rows; r++) {
        Floats zero = all(a->zero[row + r]), scale = all(a->scale[row + r]);
        size_t place = (size_t)(row + r) * channels + c;
        for (int i = 0; i < 64; i += 16) {
            Floats y = _mm512_fnmadd_ps(zero, at(l->total + c + i), _mm512_cvtepi32_ps(_mm512_load_si512(sums[r] + i)));
            y = muladd(_mm512_mul_ps(y, scale), at(l->scale + c + i), at(l->bias + c + i));
            if (how == GELU) y = gelu(y);
            if (how == ADD) y = _mm512_add_ps(y, at(add + place + i));
            _mm512_storeu_ps(to + place + i, y);
        }
    }
}

/* Rows are split evenly. The next channels' weights are as many lines as there are inputs, that is four a step of one
 * tile: up to four tiles share in fetching them. */
INLINE void product(enum Epilogue how, const Rounded *a, const Linear *l, int channels, const float *add, float *to) {
    int32_t sums[6][64] __attribute__((aligned(64)));
    int tiles = (a->rows + 5) / 6, way = tiles >= 4 ? 1 : tiles >= 2 ? 2 : 3, each = way == 3 ? 4 : way;
    for (int c = 0; c < channels; c += 64) {
        const int8_t *w = l->weight + (size_t)c * a->width;
        const char *beyond = (const char *)(w + (size_t)64 * a->width);
        for (int tile = 0, row = 0, end; tile < tiles; tile++, row = end) {
            end = (tile + 1) * a->rows / tiles;
            const char *next = beyond + (size_t)tile * each * a->width * 16;
            tiles_of[end - row - 1][tile * each < 4 ? way : 0](a->value + (size_t)row * a->width, a->width, w, next, sums);
            finish(how, a, row, end - row, l, c, channels, sums, add, to);
        }
    }
}

static void plain(const Rounded *a, const Linear *l, int channels, float *to) { product(PLAIN, a, l, channels, to, to); }
static void bent(const Rounded *a, const Linear *l, int channels, float *to) { product(GELU, a, l, channels, to, to); }
static void added(const Rounded *a, const Linear *l, int channels, float *to) { product(ADD, a, l, channels, to, to); }

static Rounded rounded(const float *x, int rows, int width, uint8_t *value, float *scale, float *zero) {
    for (int row = 0; row < rows; row++, x += width) {
        Floats low = all(0.0f), high = low;
        for (int i = 0; i < width; i += 16) {
            low = _mm512_min_ps(low, at(x + i));
            high = _mm512_max_ps(high, at(x + i));
        }
        float least = _mm512_reduce_min_ps(low), step = (_mm512_reduce_max_ps(high) - least) / 255.0f;
        step = step < 1e-20f ? 1e-20f : step;
        float offset = (float)(int)(0.5f - least / step);
        Floats inverse = all(1.0f / step), offsets = all(offset);
        for (int i = 0; i < width; i += 16) {
            Ints v = _mm512_cvtps_epi32(muladd(at(x + i), inverse, offsets));
            v = _mm512_max_epi32(v, _mm512_setzero_si512());
            _mm_storeu_si128((__m128i *)(value + (size_t)row * width + i), _mm512_cvtusepi32_epi8(v));
        }
        scale[row] = step;
        zero[row] = offset;
    }
    return (Rounded){value, scale, zero, rows, width};
}

static void norm(float *x, int rows, int width, float epsilon, const float *scale, const float *bias) {
    for (int row = 0; row < rows; row++, x += width) {
        Floats sum = all(0.0f), squares = sum;
        for (int i = 0; i < width; i += 16) sum = _mm512_add_ps(sum, at(x + i));
        Floats mean = all(_mm512_reduce_add_ps(sum) / (float)width);
        for (int i = 0; i < width; i += 16) {
            Floats d = _mm512_sub_ps(at(x + i), mean);
            squares = muladd(d, d, squares);
        }
        Floats root = _mm512_sqrt_ps(all(_mm512_reduce_add_ps(squares) / (float)width + epsilon));
        Floats inverse = _mm512_div_ps(all(1.0f), root);
        for (int i = 0; i < width; i += 16) {
            Floats d = _mm512_mul_ps(_mm512_sub_ps(at(x + i), mean), inverse);
            _mm512_storeu_ps(x + i, muladd(d, at(scale + i), at(bias + i)));
        }
    }
}

/* In place: e^(x - max), its padding 0. Returns one over their sum. */
INLINE float shares(float *x, int padded, __mmask16 last) {
    Floats most = all(-1e30f), sum = all(0.0f);
    for (int i = 0; i < padded; i += 16) {
        __mmask16 real = i + 16 < padded ? (__mmask16)0xffff : last;
        most = _mm512_mask_max_ps(most, real, most, at(x + i));
    }
    most = all(_mm512_reduce_max_ps(most));
    for (int i = 0; i < padded; i += 16) {
        __mmask16 real = i + 16 < padded ? (__mmask16)0xffff : last;
        Floats e = _mm512_maskz_mov_ps(real, exponential(_mm512_sub_ps(at(x + i), most)));
        sum = _mm512_add_ps(sum, e);
        _mm512_storeu_ps(x + i, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

/* scores[4][padded] = four queries times keys[size][padded], 32 keys at a time. */
INLINE void score(const int size, const float *const query[4], const float *keys, int padded, float *scores) {
    for (int j = 0; j < padded; j += 32) {
        int second = j + 16 < padded ? 16 : 0; /* else the first again */
        Floats sum[4][2];
        for (int r = 0; r < 4; r++) sum[r][0] = sum[r][1] = all(0.0f);
        for (int d = 0; d < size; d++) {
            Floats k0 = at(keys + (size_t)d * padded + j), k1 = at(keys + (size_t)d * padded + j + second);
            for (int r = 0; r < 4; r++) {
                sum[r][0] = muladd(all(query[r][d]), k0, sum[r][0]);
                sum[r][1] = muladd(all(query[r][d]), k1, sum[r][1]);
            }
        }
        for (int r = 0; r < 4; r++) {
            _mm512_storeu_ps(scores + (size_t)r * padded + j, sum[r][0]);
            _mm512_storeu_ps(scores + (size_t)r * padded + j + second, sum[r][1]);
        }
    }
}

/* mixed: [rows][query, key, value][heads][size]; queries are scaled already. */
INLINE void attend(const int size, const float *mixed, int rows, int heads, float *keys, float *scores, float *to) {
    int width = heads * size, padded = (rows + 15) / 16 * 16;
    size_t stride = 3 * (size_t)width;
    __mmask16 last = (__mmask16)((1u << (rows - (padded - 16))) - 1);
    for (int head = 0; head < heads; head++) {
        const float *query = mixed + head * size, *key = query + width, *value = key + width;
        for (int t = 0; t < padded; t++)
            for (int d = 0; d < size; d++) keys[(size_t)d * padded + t] = t < rows ? key[t * stride + d] : 0.0f;
        for (int t = 0; t < rows; t += 4) {
            int real = rows - t < 4 ? rows - t : 4;
            const float *four[4];
            for (int r = 0; r < 4; r++) four[r] = query + (size_t)(t + (r < real ? r : 0)) * stride;
            score(size, four, keys, padded, scores);
            float inverse[4];
            for (int r = 0; r < 4; r++) inverse[r] = shares(scores + (size_t)r * padded, padded, last);
            Floats sum[4][4];
            for (int r = 0; r < 4; r++)
                for (int d = 0; d < size / 16; d++) sum[r][d] = all(0.0f);
            for (int j = 0; j < rows; j++)
                for (int r = 0; r < 4; r++)
                    for (int d = 0; d < size / 16; d++)
                        sum[r][d] = muladd(all(scores[(size_t)r * padded + j]), at(value + j * stride + d * 16), sum[r][d]);
            for (int r = 0; r < real; r++)
                for (int d = 0; d < size / 16; d++) {
                    float *place = to + (size_t)(t + r) * width + head * size + d * 16;
                    _mm512_storeu_ps(place, _mm512_mul_ps(sum[r][d], all(inverse[r])));
                }
        }
    }
}

static void attend_32(const float *mixed, int rows, int heads, float *keys, float *scores, float *to) {
    attend(32, mixed, rows, heads, keys, scores, to);
}

static void attend_64(const float *mixed, int rows, int heads, float *keys, float *scores, float *to) {
    attend(64, mixed, rows, heads, keys, scores, to);
}

/* Bytes that `encode` needs to work in, for so many rows. */
size_t room(const Encoder *e, int rows) {
    size_t padded = (size_t)(rows + 15) / 16 * 16, n = (size_t)rows;
    size_t floats = n * (5 * (size_t)e->width + (size_t)e->wide + 2) + padded * (64 + 4);
    return 4 * floats + n * (size_t)(e->wide > e->width ? e->wide : e->width);
}

static void unit(const float *x, int rows, int width, float *to) {
    Floats squares = all(0.0f);
    for (int i = 0; i < width; i += 16) {
        Floats sum = all(0.0f);
        for (int row = 0; row < rows; row++) sum = _mm512_add_ps(sum, at(x + (size_t)row * width + i));
        _mm512_storeu_ps(to + i, sum);
        squares = muladd(sum, sum, squares);
    }
    Floats length = _mm512_sqrt_ps(all(_mm512_reduce_add_ps(squares)));
    for (int i = 0; i < width; i += 16) _mm512_storeu_ps(to + i, _mm512_div_ps(at(to + i), length));
}

static void embed(const Encoder *e, const int32_t *ids, int rows, float *x) {
    for (int row = 0; row < rows; row++, x += e->width) {
        const int8_t *word = e->words + (size_t)ids[row] * e->width;
        Floats scale = all(e->word_scale[ids[row]]);
        for (int i = 0; i < e->width; i += 16) {
            Floats w = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(word + i))));
            _mm512_storeu_ps(x + i, muladd(w, scale, at(e->places + (size_t)row * e->width + i)));
        }
    }
}

/* ids are below the number of words, rows between 1 and the number of places; `work` has `room`. */
void encode(const Encoder *e, const int32_t *ids, int rows, float *work, float *to) {
    int width = e->width, padded = (rows + 15) / 16 * 16;
    float *x = work, *seen = x + (size_t)rows * width, *mixed = seen + (size_t)rows * width;
    float *raised = mixed + (size_t)rows * 3 * width, *scale = raised + (size_t)rows * e->wide, *zero = scale + rows;
    float *keys = zero + rows, *scores = keys + (size_t)padded * 64;
    uint8_t *bytes = (uint8_t *)(scores + (size_t)padded * 4);
    embed(e, ids, rows, x);
    norm(x, rows, width, e->epsilon, e->norm_scale, e->norm_bias);
    for (const Layer *l = e->layer; l < e->layer + e->layers; l++) {
        Rounded a = rounded(x, rows, width, bytes, scale, zero);
        plain(&a, &l->mix, 3 * width, mixed);
        (width == 32 * e->heads ? attend_32 : attend_64)(mixed, rows, e->heads, keys, scores, seen);
        a = rounded(seen, rows, width, bytes, scale, zero);
        added(&a, &l->out, width, x);
        norm(x, rows, width, e->epsilon, l->norm1_scale, l->norm1_bias);
        a = rounded(x, rows, width, bytes, scale, zero);
        bent(&a, &l->up, e->wide, raised);
        a = rounded(raised, rows, e->wide, bytes, scale, zero);
        added(&a, &l->down, width, x);
        norm(x, rows, width, e->epsilon, l->norm2_scale, l->norm2_bias);
    }
    unit(x, rows, width, to);
}
