// The walk over a model's layers for tokens of any sequences, each by itself, in one call: one of the walks that
// engine/model/layers describes. Norms, rotations, attention over pages and gates stand between the products of tiles.h.
//
// A step is a sequence of phases. A phase is cut into units that any thread may claim, and ends when all of its units
// are done, so a thread that the system has taken off its core holds up nobody unless it is in the middle of a unit.
// What a unit computes depends on its number alone: no result depends on the number of threads.

#define _GNU_SOURCE
#include "tiles.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define SPLIT 512  // positions that one unit of attention reads at most
#define PAGE 16    // positions of a page
#define FLOATS_A_LINE 16

enum { BITS4, BITS8, BITS16, BITS32 };

typedef struct {
    long kind, outputs;
    union {
        int4 four;
        int8 eight;
        plain sixteen;
        wide thirty_two;
    } as;
} part;

typedef struct {
    const part *parts;  // one beside another
    const float *bias;  // [outputs], or none
    long count, inputs, outputs;
} linear;

typedef struct {
    const float *input_norm, *mlp_norm;  // [hidden]
    const float *head_norm;              // [heads + kv_heads][dim], or none
    linear qkv, output, gate_up, down;
    long window;  // positions that a query sees, or 0 for all
} layer;

typedef struct {
    const layer *layers;
    const float *norm;    // [hidden], the last
    const float *angles;  // [positions][2][dim]: cosines, then sines negated in the first half
    linear head;
    long count, hidden, heads, kv_heads, dim, inner;
    float epsilon;
} model;

typedef struct {
    float *x;                         // [rows][hidden]
    float *logits;                    // [rows][vocab], of the head
    const int64_t *positions, *slots; // [rows]; slot = page * PAGE + offset
    const int32_t *pages;             // [rows][widest]
    void *cache;                      // [layers][2][kv_heads][cached][dim]: float, or bytes of e4m3
    float *room;                      // of walk_room floats
    long rows, widest, cached, narrow, splits, threads;
} step;

// Where the parts of a step's room begin, in floats.
typedef struct {
    long qkv, attended, gated, inner, partial, products, own, own_x, own_sums, own_scores, own_mixed, own_keys, each, all;
} layout;

INLINE long lines(long floats_) { return (floats_ + FLOATS_A_LINE - 1) / FLOATS_A_LINE * FLOATS_A_LINE; }
INLINE long most(long a, long b) { return a > b ? a : b; }

static layout lay_out(const model *m, const step *s) {
    const long queries = m->heads * m->dim, widest = most(most(m->hidden, m->inner), queries);
    layout at;
    at.qkv = 0;
    at.attended = at.qkv + lines(s->rows * (m->heads + 2 * m->kv_heads) * m->dim);
    at.gated = at.attended + lines(s->rows * queries);
    at.inner = at.gated + lines(s->rows * 2 * m->inner);
    at.products = at.inner + lines(s->rows * m->inner);
    at.partial = at.products + lines(s->rows * m->hidden);
    at.own = at.partial + (s->splits > 1 ? lines(s->rows * m->heads * s->splits * (m->dim + 2)) : 0);
    at.own_x = 0;
    at.own_sums = at.own_x + lines(s->rows * widest);
    at.own_scores = at.own_sums + lines(s->rows * widest);  // a group has one input or more
    at.own_mixed = at.own_scores + lines(m->heads / m->kv_heads * SPLIT);
    at.own_keys = at.own_mixed + lines(m->heads / m->kv_heads * m->dim);
    at.each = at.own_keys + (s->narrow ? lines(SPLIT * m->dim) : 0);
    at.all = at.own + s->threads * at.each;
    return at;
}

// Floats that a step needs beside its arguments.
long walk_room(const model *m, const step *s) { return lay_out(m, s).all; }

// -- arithmetic -------------------------------------------------------------------------------------------------------

INLINE floats all_of(float one) { return (floats){0} + one; }

INLINE void store_floats(float *to, floats v) { memcpy(to, &v, sizeof v); }

INLINE floats pick(ints mask, floats yes, floats no) { return (floats)(((ints)yes & mask) | ((ints)no & ~mask)); }

// e to the x, to some 2 units in the last place; 1 exactly at 0. Beyond +-87 it stays where it is there.
INLINE floats exponential(floats x) {
    const floats low = all_of(-87.0f), high = all_of(87.0f), shift = all_of(12582912.0f);
    x = pick((ints)(x < low), low, x);
    x = pick((ints)(x > high), high, x);
    floats n = (x * 1.44269504f + shift) - shift;
    floats r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    floats p = all_of(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
}

INLINE float exponential_of(float x) { return exponential(all_of(x))[0]; }

INLINE floats load_some(const float *from, long count) {
    floats v = {0};
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}

static void norm(const float *x, const float *weight, float epsilon, long width, float *to) {
    floats sums[4] = {{0}};
    float all[4], square = 0;
    long k = 0;
    for (; k + 4 * HALF <= width; k += 4 * HALF)
        for (int at = 0; at < 4; at++) {
            floats v = load_floats(x + k + at * HALF);
            sums[at] += v * v;
        }
    add_lanes(sums, all);
    for (; k < width; k++) square += x[k] * x[k];
    square += (all[0] + all[1]) + (all[2] + all[3]);
    const float scale = 1.0f / __builtin_sqrtf(square / (float)width + epsilon);
    for (k = 0; k < width; k++) to[k] = x[k] * scale * weight[k];
}

// -- the parts of a layer -----------------------------------------------------------------------------------------------

typedef struct {
    long phase;    // that this thread has a unit of; it goes on from step to step
    int prepared;  // whether this thread has done what each has to do for itself in this phase
    long group;    // that sums of its inputs are of, or 0
    float *own;    // this thread's part of the room
} worker;

typedef struct {
    const model *m;
    const step *s;
    layout at;
    long head;  // whether the step is the head alone
} job;

static long blocks_of(const linear *l) {
    long blocks = 0;
    for (long at = 0; at < l->count; at++) blocks += (l->parts[at].outputs + LANES - 1) / LANES;
    return blocks;
}

// The outputs of one block of a part, at y and the LANES floats behind it.
static void multiply_block(const part *one, const product *p, long n, worker *w, const job *j) {
    float *sums = w->own + j->at.own_sums;
    switch (one->kind) {
    case BITS4:
        if (w->group != one->as.four.group) {
            const long group = one->as.four.group, groups = p->inputs / group;
            for (long r = 0; r < p->rows; r++) sum_groups(p->x + r * p->inputs, p->inputs, group, sums + r * groups);
            w->group = group;
        }
        block4(p, &one->as.four, sums, 0, p->rows, n);
        break;
    case BITS8: block8(p, &one->as.eight, 0, p->rows, n); break;
    case BITS16:
        if (one->as.sixteen.type == BFLOAT16)
            block16(p, &one->as.sixteen, 0, p->rows, n, BFLOAT16);
        else
            block16(p, &one->as.sixteen, 0, p->rows, n, FLOAT16);
        break;
    default: block32(p, &one->as.thirty_two, 0, p->rows, n);
    }
}

// Blocks [first, first + many) of a linear: y = x . W + bias, and where `onto`, that is added to what stands there.
static void multiply(const linear *l, const float *x, float *y, float *onto, long first, long many, worker *w,
                     const job *j) {
    const long rows = j->s->rows;
    long before = 0, output = 0;
    for (long at = 0; at < l->count && many > 0; at++) {
        const part *one = l->parts + at;
        const long blocks = (one->outputs + LANES - 1) / LANES;
        for (; many > 0 && first < before + blocks; first++, many--) {
            const long n = (first - before) * LANES, end = least(n + LANES, one->outputs);
            const product p = {x, y + output, rows, l->inputs, one->outputs, l->outputs, 1};
            multiply_block(one, &p, n, w, j);
            for (long r = 0; r < rows && (l->bias || onto); r++) {
                float *found = y + output + r * l->outputs;
                if (l->bias)
                    for (long k = n; k < end; k++) found[k] += l->bias[output + k];
                if (onto)
                    for (long k = n; k < end; k++) onto[output + r * l->outputs + k] += found[k];
            }
        }
        before += blocks;
        output += one->outputs;
    }
}

// e4m3 as float, exactly but for NaN. The exponent 0 is worked out apart, since denormals are slow.
INLINE floats of_e4m3(const uint8_t *from) {
    ints bits = load_bytes(from), size = bits & 0x7f, sign = (bits & 0x80) << 24;
    floats value = (floats)((size << 20) + (120 << 23));
    value = pick((ints)(size < 8), value * 2.0f - 0x1p-6f, value);
    return (floats)((ints)value | sign);
}

// To the nearest, to even at a tie, and to +-448 beyond.
INLINE uint8_t to_e4m3(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint8_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7f;
    if (bits >= 0x43e00000) return sign | 0x7e;
    if (bits < 0x3c800000) {  // below the least of exponent 1: steps of 2^-9
        float size;
        memcpy(&size, &bits, sizeof size);
        return sign | (uint8_t)((size * 512.0f + 8388608.0f) - 8388608.0f);
    }
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | (uint8_t)((bits >> 20) - (120 << 3));
}

INLINE void *cached(const job *j, long layer_, long values, long head) {
    const model *m = j->m;
    const long at = ((layer_ * 2 + values) * m->kv_heads + head) * j->s->cached * m->dim;
    return (uint8_t *)j->s->cache + at * (j->s->narrow ? 1 : (long)sizeof(float));
}

static void rotate(const float *angles, long dim, float *x) {
    const float *cosine = angles, *sine = angles + dim;
    const long half = dim / 2;
    for (long k = 0; k < half; k++) {
        const float low = x[k], high = x[half + k];
        x[k] = low * cosine[k] + high * sine[k];
        x[half + k] = high * cosine[half + k] + low * sine[half + k];
    }
}

// Norms (where the model has them) and rotates the queries and keys of one row, and puts keys and values in the cache.
static void place(const job *j, long at, const layer *l, long row) {
    const model *m = j->m;
    const step *s = j->s;
    const long dim = m->dim, turned = m->heads + m->kv_heads;
    float *qkv = s->room + j->at.qkv + row * (turned + m->kv_heads) * dim;
    const float *angles = m->angles + s->positions[row] * 2 * dim;
    for (long head = 0; head < turned; head++) {
        float *x = qkv + head * dim;
        if (l->head_norm) norm(x, l->head_norm + head * dim, m->epsilon, dim, x);
        rotate(angles, dim, x);
    }
    for (long head = 0; head < 2 * m->kv_heads; head++) {
        const float *from = qkv + (m->heads + head) * dim;
        void *to = cached(j, at, head / m->kv_heads, head % m->kv_heads);
        if (s->narrow)
            for (long k = 0; k < dim; k++) ((uint8_t *)to)[s->slots[row] * dim + k] = to_e4m3(from[k]);
        else
            memcpy((float *)to + s->slots[row] * dim, from, (size_t)dim * sizeof(float));
    }
}

typedef struct {
    const void *held;      // [cached][dim] of one head, keys or values
    const float *widened;  // [count][dim], where those are bytes
    const int32_t *pages;
    long first, dim;  // the first position
} span;

INLINE const float *at_position(const span *from, long at) {
    if (from->widened) return from->widened + at * from->dim;
    const long position = from->first + at;
    return (const float *)from->held + ((long)from->pages[position / PAGE] * PAGE + position % PAGE) * from->dim;
}

static void widen(span *from, long count, float *to) {
    for (long at = 0; at < count; at++) {
        const long position = from->first + at, dim = from->dim;
        const uint8_t *bytes_ = (const uint8_t *)from->held;
        bytes_ += ((long)from->pages[position / PAGE] * PAGE + position % PAGE) * dim;
        long k = 0;
        for (; k + HALF <= dim; k += HALF) store_floats(to + at * dim + k, of_e4m3(bytes_ + k));
        for (; k < dim; k++) {
            uint8_t last[HALF] = {bytes_[k]};
            to[at * dim + k] = of_e4m3(last)[0];
        }
    }
    from->widened = to;
}

// Products of one query with four keys.
INLINE void score(const float *query, const float *const keys[4], long dim, float to[4]) {
    floats sums[4] = {{0}};
    long k = 0;
    for (; k + HALF <= dim; k += HALF) {
        const floats one = load_floats(query + k);
        for (int at = 0; at < 4; at++) sums[at] += one * load_floats(keys[at] + k);
    }
    add_lanes(sums, to);
    for (; k < dim; k++)
        for (int at = 0; at < 4; at++) to[at] += query[k] * keys[at][k];
}

static void scores_of(const span *keys, long count, const float *queries, long heads, float scale, float *scores) {
    for (long at = 0; at < count; at += 4) {
        const float *four[4];
        for (int k = 0; k < 4; k++) four[k] = at_position(keys, least(at + k, count - 1));
        for (long head = 0; head < heads; head++) {
            float found[4];
            score(queries + head * keys->dim, four, keys->dim, found);
            for (long k = 0; k < 4; k++) scores[head * SPLIT + at + k] = found[k] * scale;  // SPLIT is whole fours
        }
    }
}

// Scores to weights, whose sum it returns; their greatest in `greatest`.
static float soften(float *scores, long count, float *greatest) {
    float top = scores[0];
    for (long k = 1; k < count; k++) top = scores[k] > top ? scores[k] : top;
    floats sum = {0};
    long k = 0;
    for (; k + HALF <= count; k += HALF) {
        const floats weight = exponential(load_floats(scores + k) - top);
        store_floats(scores + k, weight);
        sum += weight;
    }
    float all = add_up(sum);
    for (; k < count; k++) all += scores[k] = exponential_of(scores[k] - top);
    *greatest = top;
    return all;
}

// A weighted sum of values, for `heads` queries and `vectors` vectors of the head from k on.
INLINE void mix(const span *values, long count, const float *scores, float *to, long k, int heads, int vectors) {
    floats sums[4][4];
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < vectors; v++) sums[head][v] = (floats){0};
    for (long at = 0; at < count; at++) {
        const float *from = at_position(values, at) + k;
        floats held[4];
        for (int v = 0; v < vectors; v++) held[v] = load_floats(from + v * HALF);
        for (int head = 0; head < heads; head++)
            for (int v = 0; v < vectors; v++) sums[head][v] += held[v] * scores[head * SPLIT + at];
    }
    for (int head = 0; head < heads; head++)
        for (int v = 0; v < vectors; v++) store_floats(to + head * values->dim + k + v * HALF, sums[head][v]);
}

#define MIX(heads_)                                                                                \
    do {                                                                                           \
        long k_ = 0;                                                                               \
        for (; k_ + 4 * HALF <= dim; k_ += 4 * HALF) mix(values, count, scores, to, k_, heads_, 4); \
        for (; k_ + HALF <= dim; k_ += HALF) mix(values, count, scores, to, k_, heads_, 1);         \
        for (int head_ = 0; head_ < heads_; head_++)                                               \
            for (long one_ = k_; one_ < dim; one_++) {                                             \
                float sum_ = 0;                                                                    \
                for (long at_ = 0; at_ < count; at_++)                                             \
                    sum_ += at_position(values, at_)[one_] * scores[head_ * SPLIT + at_];           \
                to[head_ * dim + one_] = sum_;                                                     \
            }                                                                                      \
    } while (0)

static void mix_four(const span *values, long count, const float *scores, float *to, long dim) { MIX(4); }
static void mix_three(const span *values, long count, const float *scores, float *to, long dim) { MIX(3); }
static void mix_two(const span *values, long count, const float *scores, float *to, long dim) { MIX(2); }
static void mix_one(const span *values, long count, const float *scores, float *to, long dim) { MIX(1); }

static void mix_all(const span *values, long count, const float *scores, float *to, long dim, long heads) {
    for (; heads > 0; heads -= 4, scores += 4 * SPLIT, to += 4 * dim) {
        if (heads >= 4)
            mix_four(values, count, scores, to, dim);
        else if (heads == 3)
            mix_three(values, count, scores, to, dim);
        else if (heads == 2)
            mix_two(values, count, scores, to, dim);
        else
            mix_one(values, count, scores, to, dim);
    }
}

// The queries of one row that share one head of keys, over the positions of one split.
static void attend(const job *j, long at, const layer *l, long unit, worker *w) {
    const model *m = j->m;
    const step *s = j->s;
    const long dim = m->dim, group = m->heads / m->kv_heads;
    const long split = unit % s->splits, head = unit / s->splits % m->kv_heads, row = unit / s->splits / m->kv_heads;
    const long end = s->positions[row] + 1, oldest = l->window ? most(end - l->window, 0) : 0;
    const long first = most(oldest, split * SPLIT), count = least(end, (split + 1) * SPLIT) - first;
    const float *queries = s->room + j->at.qkv + (row * (m->heads + 2 * m->kv_heads) + head * group) * dim;
    const long query = row * m->heads + head * group;
    float *whole = s->room + j->at.attended + query * dim, *partial = s->room + j->at.partial;
    float *scores = w->own + j->at.own_scores, *widened = w->own + j->at.own_keys;
    float *mixed = s->splits > 1 ? w->own + j->at.own_mixed : whole;
    if (count <= 0) {  // a split that this row has not got, or does not see
        for (long one = 0; one < group; one++) partial[((query + one) * s->splits + split) * (dim + 2)] = 0;
        return;
    }
    span keys = {cached(j, at, 0, head), 0, s->pages + row * s->widest, first, dim}, values = keys;
    values.held = cached(j, at, 1, head);
    if (s->narrow) widen(&keys, count, widened);
    scores_of(&keys, count, queries, group, 1.0f / __builtin_sqrtf((float)dim), scores);
    if (s->narrow) widen(&values, count, widened);
    float sums[group], tops[group];
    for (long one = 0; one < group; one++) sums[one] = soften(scores + one * SPLIT, count, tops + one);
    mix_all(&values, count, scores, mixed, dim, group);
    for (long one = 0; one < group; one++) {
        float *found = mixed + one * dim;
        if (s->splits == 1) {
            for (long k = 0; k < dim; k++) found[k] /= sums[one];
            continue;
        }
        float *to = partial + ((query + one) * s->splits + split) * (dim + 2);
        to[0] = sums[one];
        to[1] = tops[one];
        memcpy(to + 2, found, (size_t)dim * sizeof(float));
    }
}

// The splits of one head of a row, in their order.
static void combine(const job *j, long unit) {
    const long dim = j->m->dim, splits = j->s->splits;
    const float *from = j->s->room + j->at.partial + unit * splits * (dim + 2);
    float *to = j->s->room + j->at.attended + unit * dim, top = -__builtin_inff(), sum = 0;
    for (long at = 0; at < splits; at++)
        if (from[at * (dim + 2)] != 0) top = from[at * (dim + 2) + 1] > top ? from[at * (dim + 2) + 1] : top;
    for (long k = 0; k < dim; k++) to[k] = 0;
    for (long at = 0; at < splits; at++, from += dim + 2) {
        if (from[0] == 0) continue;
        const float weight = exponential_of(from[1] - top);
        sum += weight * from[0];
        for (long k = 0; k < dim; k++) to[k] += weight * from[2 + k];
    }
    for (long k = 0; k < dim; k++) to[k] /= sum;
}

// silu(gate) * up of LANES columns of one row.
static void gate(const job *j, long unit) {
    const long inner = j->m->inner, blocks = (inner + LANES - 1) / LANES, row = unit / blocks;
    const float *from = j->s->room + j->at.gated + row * 2 * inner;
    float *to = j->s->room + j->at.inner + row * inner;
    const long last = least((unit % blocks + 1) * LANES, inner);
    for (long k = unit % blocks * LANES; k < last; k += HALF) {
        const long some = least(HALF, last - k);
        const floats g = load_some(from + k, some), up = load_some(from + inner + k, some);
        const floats found = g / (exponential(-g) + 1.0f) * up;
        memcpy(to + k, &found, (size_t)some * sizeof(float));
    }
}

// -- phases -------------------------------------------------------------------------------------------------------------

enum { QKV, PLACE, ATTEND, COMBINE, OUTPUT, GATE_UP, GATE, DOWN, KINDS };

INLINE long kinds(const job *j) { return j->s->splits > 1 ? KINDS : KINDS - 1; }

INLINE long phases_of(const job *j) { return j->head ? 1 : j->m->count * kinds(j); }

INLINE long kind_of(const job *j, long phase) {
    const long kind = phase % kinds(j);
    return kind >= COMBINE && j->s->splits == 1 ? kind + 1 : kind;
}

static long units_of(const job *j, long phase) {
    if (j->head) return blocks_of(&j->m->head);
    const layer *l = j->m->layers + phase / kinds(j);
    const long rows = j->s->rows;
    switch (kind_of(j, phase)) {
    case QKV: return blocks_of(&l->qkv);
    case PLACE: return rows;
    case ATTEND: return rows * j->m->kv_heads * j->s->splits;
    case COMBINE: return rows * j->m->heads;
    case OUTPUT: return blocks_of(&l->output);
    case GATE_UP: return blocks_of(&l->gate_up);
    case GATE: return rows * ((j->m->inner + LANES - 1) / LANES);
    default: return blocks_of(&l->down);
    }
}

// What every thread that takes part in a phase computes for itself.
static void prepare(const job *j, const float *weight, worker *w) {
    if (w->prepared) return;
    w->prepared = 1;
    const long width = j->m->hidden;
    for (long row = 0; row < j->s->rows; row++)
        norm(j->s->x + row * width, weight, j->m->epsilon, width, w->own + j->at.own_x + row * width);
}

static void do_units(const job *j, long phase, long first, long many, worker *w) {
    const step *s = j->s;
    const float *own = w->own + j->at.own_x;
    float *room = s->room, *products = room + j->at.products;
    if (j->head) {
        prepare(j, j->m->norm, w);
        multiply(&j->m->head, own, s->logits, 0, first, many, w, j);
        return;
    }
    const long at = phase / kinds(j);
    const layer *l = j->m->layers + at;
    switch (kind_of(j, phase)) {
    case QKV:
        prepare(j, l->input_norm, w);
        multiply(&l->qkv, own, room + j->at.qkv, 0, first, many, w, j);
        break;
    case PLACE:
        for (; many > 0; many--) place(j, at, l, first++);
        break;
    case ATTEND:
        for (; many > 0; many--) attend(j, at, l, first++, w);
        break;
    case COMBINE:
        for (; many > 0; many--) combine(j, first++);
        break;
    case OUTPUT:
        multiply(&l->output, room + j->at.attended, products, s->x, first, many, w, j);
        break;
    case GATE_UP:
        prepare(j, l->mlp_norm, w);
        multiply(&l->gate_up, own, room + j->at.gated, 0, first, many, w, j);
        break;
    case GATE:
        for (; many > 0; many--) gate(j, first++);
        break;
    default:
        multiply(&l->down, room + j->at.inner, products, s->x, first, many, w, j);
    }
}

// -- threads ------------------------------------------------------------------------------------------------------------

// From the highest bits: the number of a phase, which goes on from step to step; how many threads help the caller; the
// next unit that nobody has claimed; how many units there are, 0 where no step is under way.
#define BITS_OF_UNITS 17
#define BITS_OF_HELPERS 6
#define UNITS ((1ul << BITS_OF_UNITS) - 1)
#define MOST_HELPERS ((1 << BITS_OF_HELPERS) - 1)
#define PHASES ((1ul << (64 - BITS_OF_HELPERS - 2 * BITS_OF_UNITS)) - 1)

typedef unsigned long ticket;

INLINE ticket ticket_of(unsigned long phase, unsigned long helpers, unsigned long next, unsigned long units) {
    return (((phase & PHASES) << BITS_OF_HELPERS | helpers) << BITS_OF_UNITS | next) << BITS_OF_UNITS | units;
}
INLINE unsigned long phase_in(ticket t) { return t >> (BITS_OF_HELPERS + 2 * BITS_OF_UNITS); }
INLINE unsigned long helpers_in(ticket t) { return t >> 2 * BITS_OF_UNITS & MOST_HELPERS; }
INLINE unsigned long next_in(ticket t) { return t >> BITS_OF_UNITS & UNITS; }
INLINE unsigned long units_in(ticket t) { return t & UNITS; }

// The most units that a phase may have.
long walk_units(void) { return UNITS; }

#define SPINS 4096  // some 100 to 200 us of waiting before a thread gives its core away
#define STACK (1 << 20)

static struct {
    _Alignas(64) atomic_ulong ticket;
    atomic_long done;  // units of the phase that `ticket` is of
    _Alignas(64) atomic_long sleeping;
    const job *_Atomic job;
    atomic_ulong first;  // number of the step's first phase
    _Alignas(64) pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_flag busy;
    long helpers;
    pid_t process;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .busy = ATOMIC_FLAG_INIT};

INLINE void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

INLINE void spin(long *spins) {
    if (++*spins < SPINS)
        rest();
    else
        sched_yield();
}

// Whether there was a unit to do for this thread. It claims a share of what is left, so that the last claims are small.
static int do_some(unsigned long number, worker *w) {
    ticket t = atomic_load(&pool.ticket);
    const unsigned long next = next_in(t), units = units_in(t), helpers = helpers_in(t);
    if (next >= units || number > helpers) return 0;
    const unsigned long share = (units - next) / (2 * helpers + 2), many = share ? share : 1;
    if (!atomic_compare_exchange_strong(&pool.ticket, &t, ticket_of(phase_in(t), helpers, next + many, units))) return 1;
    const job *j = atomic_load(&pool.job);  // the step cannot end before these units are done
    const unsigned long phase = (phase_in(t) - atomic_load(&pool.first)) & PHASES;
    if (w->phase != (long)phase_in(t))
        *w = (worker){(long)phase_in(t), 0, 0, j->s->room + j->at.own + (long)number * j->at.each};
    do_units(j, (long)phase, (long)next, (long)many, w);
    if (atomic_fetch_add(&pool.done, (long)many) + (long)many < (long)units) return 1;
    atomic_store(&pool.done, 0);
    const int last = (long)phase + 1 == phases_of(j);
    atomic_store(&pool.ticket,
                 ticket_of(phase_in(t) + 1, helpers, 0, last ? 0 : (unsigned long)units_of(j, (long)phase + 1)));
    return 1;
}

INLINE int wanted(unsigned long number) {
    const ticket t = atomic_load(&pool.ticket);
    return units_in(t) != 0 && number <= helpers_in(t);
}

static void sleep_until_wanted(unsigned long number) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (!wanted(number)) pthread_cond_wait(&pool.wake, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *help(void *number_) {
    const unsigned long number = (unsigned long)(uintptr_t)number_;
    worker w = {-1, 0, 0, 0};
    for (long spins = 0;;) {
        if (do_some(number, &w)) {
            spins = 0;
        } else if (wanted(number)) {
            spin(&spins);
        } else if (++spins < SPINS) {
            w.phase = -1;
            rest();
        } else {
            sleep_until_wanted(number);
            spins = 0;
        }
    }
    return 0;
}

// A process that was forked off has none of the threads.
static void begin_anew(void) {
    pool.process = getpid();
    pool.helpers = 0;
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.ticket, 0);
    atomic_store(&pool.done, 0);
    atomic_flag_clear(&pool.busy);
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.wake, 0);
}

// As many helpers as could be started, no more than asked for.
static unsigned long helpers_of(long wanted_) {
    pthread_attr_t attributes;
    if (pool.helpers < wanted_ && !pthread_attr_init(&attributes)) {
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, STACK);
        while (pool.helpers < wanted_) {
            pthread_t thread;
            if (pthread_create(&thread, &attributes, help, (void *)(uintptr_t)(pool.helpers + 1))) break;
            pool.helpers++;
        }
        pthread_attr_destroy(&attributes);
    }
    return (unsigned long)least(pool.helpers, wanted_);
}

static void alone(const job *j) {
    for (long phase = 0; phase < phases_of(j); phase++) {
        worker w = {phase, 0, 0, j->s->room + j->at.own};
        do_units(j, phase, 0, units_of(j, phase), &w);
    }
}

static void together(const job *j) {
    const unsigned long helpers = helpers_of(least(j->s->threads - 1, MOST_HELPERS));
    const unsigned long first = phase_in(atomic_load(&pool.ticket));
    const unsigned long last = (first + (unsigned long)phases_of(j)) & PHASES;
    worker w = {-1, 0, 0, 0};
    atomic_store(&pool.job, j);
    atomic_store(&pool.first, first);
    atomic_store(&pool.ticket, ticket_of(first, helpers, 0, (unsigned long)units_of(j, 0)));
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    for (long spins = 0; phase_in(atomic_load(&pool.ticket)) != last;) {
        if (do_some(0, &w))
            spins = 0;
        else
            spin(&spins);
    }
}

static void walk(const model *m, const step *s, long head) {
    const job j = {m, s, lay_out(m, s), head};
    if (pool.process != getpid()) begin_anew();
    if (s->threads < 2 || atomic_flag_test_and_set(&pool.busy)) {
        alone(&j);
        return;
    }
    together(&j);
    atomic_flag_clear(&pool.busy);
}

// Feeds s->rows tokens whose embeddings are in s->x, which becomes what the last layer leaves.
void walk_layers(const model *m, const step *s) { walk(m, s, 0); }

// The logits of s->x.
void walk_head(const model *m, const step *s) { walk(m, s, 1); }
