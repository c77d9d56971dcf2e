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

/* x Phi(x), Phi as a polynomial: 5e-4 at most up to 30, a hundredth of what rounding to eight bits takes. */
INLINE Floats gelu(Floats x) {
    Floats z = _mm512_min_ps(_mm512_max_ps(x, all(-4.0f)), all(4.0f)), q = _mm512_mul_ps(z, z);
    Floats p = muladd(all(2.278150452e-8f), q, all(-1.598605549e-6f));
    p = muladd(muladd(p, q, all(4.795558180e-5f)), q, all(-8.140160589e-4f));
    p = muladd(muladd(p, q, all(8.772391036e-3f)), q, all(-6.457311654e-2f));
    return _mm512_mul_ps(x, muladd(z, muladd(p, q, all(3.978833535e-1f)), all(0.5f)));
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
    Ints x = _mm512_set1_epi32(*(const Four *)(from + (size_t)r * width)); \
    DOT(s##r##0, x, w0); DOT(s##r##1, x, w1); DOT(s##r##2, x, w2); DOT(s##r##3, x, w3); }
#define FETCH(N) for (int i = 0; i < N; i++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
#define FOUR(M, AHEAD) { \
    Ints w0 = _mm512_load_si512(w), w1 = _mm512_load_si512(w + 64); \
    Ints w2 = _mm512_load_si512(w + 128), w3 = _mm512_load_si512(w + 192); \
    FETCH(AHEAD) \
    ROWS_##M(STEP) \
    w += 256, from += 4; }
#define PUT(r) \
    _mm512_store_si512(sums[r], s##r##0), _mm512_store_si512(sums[r] + 16, s##r##1); \
    _mm512_store_si512(sums[r] + 32, s##r##2), _mm512_store_si512(sums[r] + 48, s##r##3);
#define TILE(M, NAME, ONE, TWO) \
    static void tile_##M##_##NAME(const uint8_t *from, int width, const int8_t *w, const char *next, \
                                  int32_t (*sums)[64]) { \
        ROWS_##M(BEGIN) \
        for (const uint8_t *end = from + width; from < end;) { \
            FOUR(M, ONE) \
            FOUR(M, TWO) \
        } \
        ROWS_##M(PUT) \
    }
#define TILES(M) TILE(M, 0, 0, 0) TILE(M, 1, 1, 0) TILE(M, 2, 1, 1) TILE(M, 4, 2, 2) TILE(M, 8, 4, 4)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#define OF(M) {tile_##M##_0, tile_##M##_1, tile_##M##_2, tile_##M##_4, tile_##M##_8}
static void (*const tiles_of[6][5])(const uint8_t *, int, const int8_t *, const char *, int32_t (*)[64]) = {
    OF(1), OF(2), OF(3), OF(4), OF(5), OF(6)};

INLINE void finish(enum Epilogue how, const Rounded *a, int row, int rows, const Linear *l, int c, int channels,
                   int32_t (*sums)[64], const float *add, float *to) {
    for (int r = 0; r < rows; r++) {
        Floats zero = all(a->zero[row + r]), scale = all(a->scale[row + r]);
        size_t place = (size_t)(row + r) * channels + c;
        for (int i = 0; i < 64; i += 16) {
            Floats y = _mm512_cvtepi32_ps(_mm512_load_si512(sums[r] + i));
            y = _mm512_fnmadd_ps(zero, at(l->total + c + i), y);
            y = muladd(_mm512_mul_ps(y, scale), at(l->scale + c + i), at(l->bias + c + i));
            if (how == GELU) y = gelu(y);
            if (how == ADD) y = _mm512_add_ps(y, at(add + place + i));
            _mm512_storeu_ps(to + place + i, y);
        }
    }
}

/* Rows are split evenly. The next channels' weights are as many lines as there are inputs, eight for each eight inputs
 * of a tile: up to eight tiles share in fetching them. */
INLINE void product(enum Epilogue how, const Rounded *a, const Linear *l, int channels, const float *add, float *to) {
    int32_t sums[6][64] __attribute__((aligned(64)));
    int tiles = (a->rows + 5) / 6, way = tiles >= 8 ? 1 : tiles >= 4 ? 2 : tiles >= 2 ? 3 : 4, each = 1 << (way - 1);
    for (int c = 0; c < channels; c += 64) {
        const int8_t *w = l->weight + (size_t)c * a->width;
        const char *beyond = (const char *)(w + (size_t)64 * a->width);
        for (int tile = 0, row = 0, end; tile < tiles; tile++, row = end) {
            end = (tile + 1) * a->rows / tiles;
            const char *next = beyond + (size_t)tile * each * a->width * 8;
            const uint8_t *from = a->value + (size_t)row * a->width;
            tiles_of[end - row - 1][tile * each < 8 ? way : 0](from, a->width, w, next, sums);
            finish(how, a, row, end - row, l, c, channels, sums, add, to);
        }
    }
}

static void plain(const Rounded *a, const Linear *l, int channels, float *to) {
    product(PLAIN, a, l, channels, to, to);
}

static void bent(const Rounded *a, const Linear *l, int channels, float *to) {
    product(GELU, a, l, channels, to, to);
}

static void added(const Rounded *a, const Linear *l, int channels, float *to) {
    product(ADD, a, l, channels, to, to);
}

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

/* to[16][padded] = 16 rows of x, turned; `real` of them, the others 0. */
INLINE void turn(const float *x, size_t stride, int real, float *to, size_t padded) {
    Floats a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = i < real ? at(x + i * stride) : all(0.0f);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            __m512d p = _mm512_castps_pd(b[i + j]), q = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_f32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_storeu_ps(to + j * padded, _mm512_shuffle_f32x4(b[j], b[j + 8], 0x88));
        _mm512_storeu_ps(to + (j + 8) * padded, _mm512_shuffle_f32x4(b[j], b[j + 8], 0xdd));
    }
}

/* scores[4][padded] = four queries times keys[size][padded], 16 * n keys of them. */
INLINE void score(const int size, const int n, const float *const query[4], const float *keys, int padded,
                  float *scores) {
    Floats sum[4][4];
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < n; i++) sum[r][i] = all(0.0f);
    for (int d = 0; d < size; d++, keys += padded) {
        Floats key[4];
        for (int i = 0; i < n; i++) key[i] = at(keys + 16 * i);
        for (int r = 0; r < 4; r++)
            for (int i = 0; i < n; i++) sum[r][i] = muladd(all(query[r][d]), key[i], sum[r][i]);
    }
    for (int r = 0; r < 4; r++)
        for (int i = 0; i < n; i++) _mm512_storeu_ps(scores + (size_t)r * padded + 16 * i, sum[r][i]);
}

INLINE void scored(const int size, const float *const query[4], const float *keys, int padded, float *scores) {
    int j = 0;
    for (; j + 64 <= padded; j += 64) score(size, 4, query, keys + j, padded, scores + j);
    if (padded - j == 48) score(size, 3, query, keys + j, padded, scores + j);
    if (padded - j == 32) score(size, 2, query, keys + j, padded, scores + j);
    if (padded - j == 16) score(size, 1, query, keys + j, padded, scores + j);
}

/* mixed: [rows][query, key, value][heads][size]; queries are scaled already. */
INLINE void attend(const int size, const float *mixed, int rows, int heads, float *keys, float *scores, float *to) {
    int width = heads * size, padded = (rows + 15) / 16 * 16;
    size_t stride = 3 * (size_t)width;
    __mmask16 last = (__mmask16)((1u << (rows - (padded - 16))) - 1);
    for (int head = 0; head < heads; head++) {
        const float *query = mixed + head * size, *key = query + width, *value = key + width;
        for (int t = 0; t < rows; t += 16)
            for (int d = 0; d < size; d += 16)
                turn(key + t * stride + d, stride, rows - t, keys + (size_t)d * padded + t, (size_t)padded);
        for (int t = 0; t < rows; t += 4) {
            int real = rows - t < 4 ? rows - t : 4;
            const float *four[4];
            for (int r = 0; r < 4; r++) four[r] = query + (size_t)(t + (r < real ? r : 0)) * stride;
            scored(size, four, keys, padded, scores);
            float inverse[4];
            for (int r = 0; r < 4; r++) inverse[r] = shares(scores + (size_t)r * padded, padded, last);
            Floats sum[4][4];
            for (int r = 0; r < 4; r++)
                for (int d = 0; d < size / 16; d++) sum[r][d] = all(0.0f);
            for (int j = 0; j < rows; j++)
                for (int r = 0; r < 4; r++) {
                    Floats share = all(scores[(size_t)r * padded + j]);
                    for (int d = 0; d < size / 16; d++)
                        sum[r][d] = muladd(share, at(value + j * stride + d * 16), sum[r][d]);
                }
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
