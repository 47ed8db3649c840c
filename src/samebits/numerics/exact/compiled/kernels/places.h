/* Sums into places and running sums, each on the grid of the numbers that meet there. */

struct place_of { double total, shift; i32 most, count; };
struct meeting {
    const float *x, *source;
    const i64 *places;
    float *y;
    i64 size, terms, inner;
    volatile char *declined;
};
INLINE i64 top_of(double size) { return (bits_of(size) >> 52) - 1022; }
INLINE double of_size(i32 bits) { float x; memcpy(&x, &bits, 4); return x; }

/* Some neighbouring columns of a matrix. */
struct piece { i64 outer, column, columns; };
INLINE i64 pieces(i64 inner) { return (inner + COLUMNS - 1) / COLUMNS; }
INLINE struct piece piece_of(i64 inner, i64 number) {
    i64 column = number % pieces(inner) * COLUMNS;
    struct piece p = {number / pieces(inner), column, inner - column < COLUMNS ? inner - column : COLUMNS};
    return p;
}

/* Rows of terms, each of which has a place, of some columns. */
static void accumulated_rows(const void *arguments, i64 first, i64 last) {
    const struct meeting *m = arguments;
    i64 inner = m->inner;
    for (i64 number = first; number < last; number++) {
        struct piece here = piece_of(inner, number);
        i64 columns = here.columns, start = here.outer * m->size * inner + here.column;
        const float *x = m->x + start, *source = m->source + here.outer * m->terms * inner + here.column;
        float *y = m->y + start;
        i64 *count = calloc((size_t)m->size, sizeof(i64)), infinite = 0;
        double *total = malloc((size_t)(m->size * columns) * 2 * sizeof(double)), *shift = total + m->size * columns;
        i32 *most = malloc((size_t)(m->size * columns) * sizeof(i32));
        if (!count || !total || !most) *m->declined = 1; /* no memory */
        for (i64 i = 0; i < m->terms && !*m->declined; i++) {
            i64 p = m->places[i];
            if (p < 0 || p >= m->size) { *m->declined = 1; break; }
            i32 *largest = most + p * columns;
            if (count[p]++ == 0)
                for (i64 c = 0; c < columns; c++) largest[c] = size_of(x[p * inner + c]);
            for (i64 c = 0; c < columns; c++) {
                i32 size = size_of(source[i * inner + c]);
                largest[c] = size > largest[c] ? size : largest[c];
            }
        }
        for (i64 p = 0; p < m->size && !*m->declined; p++)
            for (i64 c = p * columns; c < (p + 1) * columns && count[p]; c++) {
                infinite |= most[c] >= 0x7f800000; /* or NaN */
                shift[c] = shifter(top_of(of_size(most[c])) + top_of(count[p]), 53);
                total[c] = (double)x[p * inner + c - p * columns] + shift[c] - shift[c];
            }
        if (infinite) *m->declined = 1;
        for (i64 i = 0; i < m->terms && !*m->declined; i++)
            for (i64 c = 0, at = m->places[i] * columns; c < columns; c++)
                total[at + c] += (double)source[i * inner + c] + shift[at + c] - shift[at + c];
        for (i64 p = 0; p < m->size && !*m->declined; p++)
            for (i64 c = 0; c < columns && count[p]; c++) y[p * inner + c] = (float)total[p * columns + c];
        free(count), free(total), free(most);
    }
}
/* Terms that have a place each, of some columns. */
static void accumulated_numbers(const void *arguments, i64 first, i64 last) {
    const struct meeting *m = arguments;
    i64 inner = m->inner;
    for (i64 number = first; number < last; number++) {
        struct piece piece = piece_of(inner, number);
        i64 columns = piece.columns, start = piece.outer * m->size * inner + piece.column;
        i64 of_terms = piece.outer * m->terms * inner + piece.column;
        const float *x = m->x + start, *source = m->source + of_terms;
        const i64 *places = m->places + of_terms;
        float *y = m->y + start;
        struct place_of *met = calloc((size_t)(m->size * columns), sizeof(struct place_of));
        if (!met) { *m->declined = 1; return; } /* no memory */
#define EVERY_TERM(i, c, p) \
    for (i64 i = 0; i < m->terms; i++) \
        for (i64 c = 0, p; c < columns && (p = places[i * inner + c], 1); c++)
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
    struct meeting m = {x, source, places, y, size, terms, inner, &declined};
    memcpy(y, x, (size_t)(outer * size * inner) * sizeof(float));
    rows_of body = each ? accumulated_numbers : accumulated_rows;
    share(body, &m, outer * pieces(inner), outer * terms * inner, threads);
    return !declined;
}

struct running { const float *x; float *y; i64 count, inner, bits; volatile char *declined; };
static void running_sums(const void *arguments, i64 first, i64 last) {
    const struct running *s = arguments;
    i64 inner = s->inner;
    for (i64 number = first; number < last; number++) {
        struct piece here = piece_of(inner, number);
        i64 columns = here.columns, start = here.outer * s->count * inner + here.column;
        const float *restrict x = s->x + start;
        float *restrict y = s->y + start;
        i32 most[COLUMNS] = {0};
        double shift[COLUMNS], total[COLUMNS] = {0.0};
        for (i64 i = 0; i < s->count; i++)
            for (i64 c = 0; c < columns; c++) {
                i32 size = size_of(x[i * inner + c]);
                most[c] = size > most[c] ? size : most[c];
            }
        for (i64 c = 0; c < columns; c++) {
            if (most[c] >= 0x7f800000) *s->declined = 1; /* infinite or NaN */
            shift[c] = shifter(top_of(of_size(most[c])), s->bits);
        }
        for (i64 i = 0; i < s->count && !*s->declined; i++)
            for (i64 c = 0; c < columns; c++) {
                total[c] += (double)x[i * inner + c] + shift[c] - shift[c];
                y[i * inner + c] = (float)total[c];
            }
    }
}
/* Whether it has an answer: all numbers are finite. */
API int running(const float *x, float *y, i64 outer, i64 count, i64 inner, i64 bits, unsigned threads) {
    volatile char declined = 0;
    struct running s = {x, y, count, inner, bits, &declined};
    share(running_sums, &s, outer * pieces(inner), outer * count * inner, threads);
    return !declined;
}
