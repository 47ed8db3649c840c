/* Grids. */

INLINE double shifter(i64 top, i64 bits) {
    i64 e = top + 1023 + 52 - bits;
    e = e < 1 ? 1 : e > 2046 ? 2046 : e;
    return of_bits((e << 52) | (1LL << 51));
}

#ifndef __CUDACC__
struct snap_groups { const float *x; double *y; i64 outer, groups, inner, bits; };
/* Numbers seen as (outer, groups, inner), of which each group has a grid of its own. */
static void snap_groups_rows(const void *arguments, i64 first, i64 last) {
    const struct snap_groups *s = arguments;
    i64 inner = s->inner, outer = s->outer, groups = s->groups;
    for (i64 group = first; group < last; group++) {
        i32 most = 0;
        for (i64 o = 0; o < outer; o++) {
            const float *restrict x = s->x + (o * groups + group) * inner;
            for (i64 i = 0; i < inner; i++) {
                i32 size = size_of(x[i]);
                most = size > most ? size : most;
            }
        }
        double shift = shifter((most >> 23) - 126, s->bits);
        for (i64 o = 0; o < outer; o++) {
            const float *restrict x = s->x + (o * groups + group) * inner;
            double *restrict y = s->y + (o * groups + group) * inner;
            for (i64 i = 0; i < inner; i++) y[i] = (double)x[i] + shift - shift;
        }
    }
}
API void snap_groups(const float *x, double *y, i64 outer, i64 groups, i64 inner, i64 bits, unsigned threads) {
    struct snap_groups s = {x, y, outer, groups, inner, bits};
    share(snap_groups_rows, &s, groups, outer * groups * inner, threads);
}
API void snap_rows(const float *x, double *y, i64 rows, i64 width, i64 bits, unsigned threads) {
    snap_groups(x, y, 1, rows, width, bits, threads);
}

/* The bits of the largest size among numbers. */
static i64 largest_bits(const double *x, i64 n) {
    i64 most = 0;
    for (i64 i = 0; i < n; i++) {
        i64 size = bits_of(x[i]) & ~LEAST;
        most = size > most ? size : most;
    }
    return most;
}

/* Columns of matrices, of which each has a grid of its own: as many at a time as lie near each other in memory. Rows of
 * `x` are `across` numbers apart. */
#define MOST_COLUMNS 512
struct snap_columns { const float *x; double *y; i64 count, width, across, bits, wide; };
static void snap_columns_rows(const void *arguments, i64 first, i64 last) {
    const struct snap_columns *s = arguments;
    i64 width = s->width, count = s->count, wide = s->wide, across = s->across, blocks = (width + wide - 1) / wide;
    for (i64 block = first; block < last; block++) {
        i64 column = block % blocks * wide, columns = width - column < wide ? width - column : wide;
        const float *x = s->x + block / blocks * count * across + column;
        double *y = s->y + block / blocks * count * width + column;
        i32 most[MOST_COLUMNS] = {0};
        double shifts[MOST_COLUMNS];
        for (i64 i = 0; i < count; i++) {
            const float *restrict row = x + i * across;
            for (i64 c = 0; c < columns; c++) {
                i32 size = size_of(row[c]);
                most[c] = size > most[c] ? size : most[c];
            }
        }
        for (i64 c = 0; c < columns; c++) shifts[c] = shifter((most[c] >> 23) - 126, s->bits);
        for (i64 i = 0; i < count; i++) {
            const float *restrict row = x + i * across;
            double *restrict out = y + i * width;
            for (i64 c = 0; c < columns; c++) out[c] = (double)row[c] + shifts[c] - shifts[c];
        }
    }
}
API void snap_columns(const float *x, double *y, i64 outer, i64 count, i64 width, i64 across, i64 bits,
                      unsigned threads) {
    i64 wide = (width + (i64)threads - 1) / (i64)threads;
    wide = wide < COLUMNS ? COLUMNS : wide > MOST_COLUMNS ? MOST_COLUMNS : wide;
    struct snap_columns s = {x, y, count, width, across, bits, wide};
    share(snap_columns_rows, &s, outer * ((width + wide - 1) / wide), outer * count * width, threads);
}

/* Let a number that threads share be at least one whose bits these are. */
static void raise_to(float *number, i32 bits) {
    i32 *shared = (i32 *)number, known = __atomic_load_n(shared, __ATOMIC_RELAXED);
    while (bits > known && !__atomic_compare_exchange_n(shared, &known, bits, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

struct snap_to { const float *x; double *y; float *largest; double shift; };
static void snap_to_rows(const void *arguments, i64 first, i64 last) {
    const struct snap_to *s = arguments;
    const float *restrict x = s->x;
    double *restrict y = s->y, shift = s->shift;
    i32 most = 0;
    for (i64 i = first; i < last; i++) {
        i32 size = size_of(x[i]);
        most = size > most ? size : most;
        y[i] = (double)x[i] + shift - shift;
    }
    raise_to(s->largest, most);
}
API void snap_to(const float *x, double *y, float *largest, i64 n, double shift, unsigned threads) {
    struct snap_to s = {x, y, largest, shift};
    *largest = 0;
    share(snap_to_rows, &s, n, n, threads);
}

/* The sum of rows that are rounded to one grid, where no sum of a column has a negative zero. */
struct snap_sum { const float *x; double *y; float *largest; double shift; i64 rows, width; };
static void snap_sum_columns(const void *arguments, i64 first, i64 last) {
    const struct snap_sum *s = arguments;
    double shift = s->shift;
    i32 most = 0;
    for (i64 start = first; start < last; start += BLOCK) {
        i64 count = last - start < BLOCK ? last - start : BLOCK;
        double *restrict y = s->y + start;
        for (i64 i = 0; i < count; i++) y[i] = 0.0;
        for (i64 row = 0; row < s->rows; row++) {
            const float *restrict x = s->x + row * s->width + start;
            for (i64 i = 0; i < count; i++) {
                i32 size = size_of(x[i]);
                most = size > most ? size : most;
                y[i] += (double)x[i] + shift - shift;
            }
        }
    }
    raise_to(s->largest, most);
}
API void snap_sum(const float *x, double *y, float *largest, i64 rows, i64 width, double shift, unsigned threads) {
    struct snap_sum s = {x, y, largest, shift, rows, width};
    *largest = 0;
    share(snap_sum_columns, &s, width, rows * width, threads);
}

/* Products of factors on grids, without negative zeros, rounded once. */
struct finish { const double *x; float *y; };
static void finish_numbers(const void *arguments, i64 first, i64 last) {
    const struct finish *f = arguments;
    const double *restrict x = f->x;
    float *restrict y = f->y;
    for (i64 i = first; i < last; i++) y[i] = (float)(x[i] + 0.0);
}
API void finish(const double *x, float *y, i64 n, unsigned threads) {
    struct finish f = {x, y};
    share(finish_numbers, &f, n, n, threads);
}
#endif
