// Products with the tiles of tiles.h: blocks of outputs on the threads of OpenMP.

#include "tiles.h"

#define OUTPUTS _Pragma("omp parallel for schedule(static) num_threads(p->threads) if (p->threads > 1)")

// room: float [rows][groups].
void multiply4(const product *p, const int4 *w, float *room) {
    const long groups = p->inputs / w->group;
    for (long m = 0; m < p->rows; m++) sum_groups(p->x + m * p->inputs, p->inputs, w->group, room + m * groups);
    for (long m = 0; m < p->rows; m += ROWS_AT_ONCE) {
        const long last = least(m + ROWS_AT_ONCE, p->rows);
        OUTPUTS
        for (long n = 0; n < p->outputs; n += LANES) block4(p, w, room, m, last, n);
    }
}

void multiply8(const product *p, const int8 *w) {
    for (long m = 0; m < p->rows; m += ROWS_AT_ONCE) {
        const long last = least(m + ROWS_AT_ONCE, p->rows);
        OUTPUTS
        for (long n = 0; n < p->outputs; n += LANES) block8(p, w, m, last, n);
    }
}

INLINE void multiply16(const product *p, const plain *w, int type) {
    for (long m = 0; m < p->rows; m += ROWS_AT_ONCE) {
        const long last = least(m + ROWS_AT_ONCE, p->rows);
        OUTPUTS
        for (long n = 0; n < p->outputs; n += LANES) block16(p, w, m, last, n, type);
    }
}

void multiply_bfloat16(const product *p, const plain *w) { multiply16(p, w, BFLOAT16); }

void multiply_float16(const product *p, const plain *w) { multiply16(p, w, FLOAT16); }

int outputs_a_block(void) { return LANES; }
