/* Sums by halving. */

#ifdef __CUDACC__
/* The sum of count numbers, which the threads of a block share, and which they overwrite. */
INLINE double halved(double *x, i64 count) {
    __syncthreads();
    for (; count > 1; count /= 2) {
        i64 half = count / 2;
        EACH(i, half) {
            double both = x[i] + x[half + i];
            x[i] = i == 0 && count % 2 ? both + x[2 * half] : both;
        }
        __syncthreads();
    }
    double total = count ? x[0] : 0.0;
    __syncthreads();
    return total;
}
#else
/* The sum of count numbers, which it overwrites. */
INLINE double halved(double *restrict x, i64 count) {
    if (count == 0) return 0.0;
    while (count > 1) {
        i64 half = count / 2;
        for (i64 i = 0; i < half; i++) x[i] = x[i] + x[half + i];
        if (count % 2) x[0] = x[0] + x[2 * half];
        count = half;
    }
    return x[0];
}

#define COLUMNS 32
#define BLOCK 1024
struct sum { const void *x; double *y; i64 count, inner; };
#define SUM_OF(type, suffix) \
    static void sum_rows##suffix(const void *arguments, i64 first, i64 last) { \
        const struct sum *s = arguments; \
        i64 inner = s->inner, count = s->count, half = count / 2; \
        i64 blocks = (inner + COLUMNS - 1) / COLUMNS, wide = inner < COLUMNS ? inner : COLUMNS; \
        double *kept = malloc((size_t)(half ? half : 1) * (size_t)wide * sizeof(double)); \
        for (i64 block = first; block < last; block++) { \
            i64 column = block % blocks * COLUMNS; \
            i64 columns = inner - column < COLUMNS ? inner - column : COLUMNS; \
            const type *x = (const type *)s->x + block / blocks * count * inner + column; \
            double *y = s->y + block / blocks * inner + column; \
            if (count < 2) { \
                for (i64 c = 0; c < columns; c++) y[c] = count ? (double)x[c] : 0.0; \
                continue; \
            } \
            for (i64 i = 0; i < half; i++) { \
                const type *restrict one = x + i * inner, *restrict other = x + (half + i) * inner; \
                double *restrict both = kept + i * columns; \
                for (i64 c = 0; c < columns; c++) both[c] = (double)one[c] + (double)other[c]; \
            } \
            if (count % 2) \
                for (i64 c = 0; c < columns; c++) kept[c] = kept[c] + (double)x[2 * half * inner + c]; \
            for (i64 left = half; left > 1; left /= 2) { \
                i64 fewer = left / 2 * columns; \
                for (i64 i = 0; i < fewer; i++) kept[i] = kept[i] + kept[fewer + i]; \
                if (left % 2) \
                    for (i64 c = 0; c < columns; c++) kept[c] = kept[c] + kept[2 * fewer + c]; \
            } \
            memcpy(y, kept, (size_t)columns * sizeof(double)); \
        } \
        free(kept); \
    } \
    API void sum##suffix(const void *x, double *y, i64 outer, i64 count, i64 inner, unsigned threads) { \
        struct sum s = {x, y, count, inner}; \
        share(sum_rows##suffix, &s, outer * ((inner + COLUMNS - 1) / COLUMNS), outer * count * inner, threads); \
    }
SUM_OF(float, _float)
SUM_OF(double, _double)
#endif
