/* Sums into places, each on the grid of the numbers that meet there. */

struct place_of { double total, shift; i32 most, count; };
struct meeting {
    const float *x, *source;
    const i64 *places;
    float *y;
    i64 size, terms, inner, each, wide;
    volatile char *declined;
};
INLINE i64 top_of(double size) { return (bits_of(size) >> 52) - 1022; }
INLINE double of_size(i32 bits) { float x; memcpy(&x, &bits, 4); return x; }

/* Terms of some columns. Either a whole row of terms has a place, or each term. */
static void accumulated_columns(const void *arguments, i64 first, i64 last) {
    const struct meeting *m = arguments;
    i64 inner = m->inner, wide = m->wide, blocks = (inner + wide - 1) / wide;
    for (i64 block = first; block < last; block++) {
        i64 outer = block / blocks, column = block % blocks * wide;
        i64 columns = inner - column < wide ? inner - column : wide;
        const float *x = m->x + outer * m->size * inner + column, *source = m->source + outer * m->terms * inner + column;
        const i64 *places = m->each ? m->places + outer * m->terms * inner + column : m->places;
        float *y = m->y + outer * m->size * inner + column;
        struct place_of *met = calloc((size_t)(m->size * columns), sizeof(struct place_of));
        if (!met) { *m->declined = 1; return; } /* no memory */
#define EVERY_TERM(i, c, p) \
    for (i64 i = 0; i < m->terms; i++) \
        for (i64 c = 0, p; c < columns && (p = m->each ? places[i * inner + c] : places[i], 1); c++)
        EVERY_TERM(i, c, p) {
            if (p < 0 || p >= m->size) { *m->declined = 1, free(met); return; }
            struct place_of *here = met + p * columns + c;
            i32 size = size_of(source[i * inner + c]);
            if (here->count++ == 0) here->most = size_of(x[p * inner + c]);
            here->most = size > here->most ? size : here->most;
        }
        EVERY_TERM(i, c, p) {
            struct place_of *here = met + p * columns + c;
            if (here->count > 0) {
                if (here->most >= 0x7f800000) { *m->declined = 1, free(met); return; } /* infinite or NaN */
                here->shift = shifter(top_of(of_size(here->most)) + top_of(here->count), 53);
                here->total = (double)x[p * inner + c] + here->shift - here->shift;
                here->count = 0;
            }
            here->total += (double)source[i * inner + c] + here->shift - here->shift;
        }
        EVERY_TERM(i, c, p) y[p * inner + c] = (float)met[p * columns + c].total;
        free(met);
    }
}
/* Whether it has an answer: terms and places that they meet are finite, and there are such places. */
API int accumulated(const float *x, const float *source, const i64 *places, float *y, i64 outer, i64 size, i64 terms,
                    i64 inner, i64 each, unsigned threads) {
    volatile char declined = 0;
    struct meeting m = {x, source, places, y, size, terms, inner, each, COLUMNS, &declined};
    memcpy(y, x, (size_t)(outer * size * inner) * sizeof(float));
    share(accumulated_columns, &m, outer * ((inner + COLUMNS - 1) / COLUMNS), outer * terms * inner, threads);
    return !declined;
}
