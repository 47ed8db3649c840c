/* Compiled forms of exact functions: the same steps as in Python, in one pass over memory.
 *
 * Every line below is an addition, a multiplication, a division, a square root, a comparison or a look at bits, each
 * rounded as IEEE 754 says, in the order of the Python function of the same name. A compiler may vectorise that, but may
 * not fuse a multiplication with an addition (-ffp-contract=off) or reorder sums (no -ffast-math). So a kernel gives the
 * bits of its Python function on every host; tests/numerics/test_compiled.py compares the two.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
typedef int64_t i64;

INLINE i64 bits_of(double x) { i64 b; memcpy(&b, &x, 8); return b; }
INLINE double of_bits(i64 b) { double x; memcpy(&x, &b, 8); return x; }
INLINE int32_t size_of(float x) { int32_t b; memcpy(&b, &x, 4); return b & INT32_MAX; } /* its order is that of sizes */
INLINE double magnitude(double x) { return of_bits(bits_of(x) & INT64_MAX); }
INLINE double with_sign(double size, double sign) {
    return of_bits((bits_of(size) & INT64_MAX) | (bits_of(sign) & INT64_MIN));
}
#define INFINITE of_bits(2047LL << 52)
#define NOT_A_NUMBER of_bits((2047LL << 52) | (1LL << 51))
#define ROUNDER 0x1.8p52 /* adding and subtracting it rounds to an integer, ties to even, which its low bits then hold */
INLINE double rounded(double x) { return with_sign(x + ROUNDER - ROUNDER, x); }
INLINE i64 integer(double whole) { return bits_of(whole + ROUNDER) - bits_of(ROUNDER); }
INLINE double whole(i64 k) { return of_bits(bits_of(ROUNDER) + k) - ROUNDER; }
INLINE double power_of_two(i64 n) { return of_bits((n + 1023) << 52); }

/* -- functions of one number ------------------------------------------------------------------------------------- */

#define LN2_HI 0x1.62e42fee00000p-1
#define LN2_LO 0x1.a39ef35793c76p-33
#define LN2 0x1.62e42fefa39efp-1
#define SQRT_TWO 0x1.6a09e667f3bcdp+0

#define HORNER(x, c) \
    double total = (x) * c[sizeof(c) / 8 - 1] + c[sizeof(c) / 8 - 2]; \
    for (int i = (int)(sizeof(c) / 8) - 3; i >= 0; i--) total = total * (x) + c[i];

static const double EXP[] = {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                             1.0 / 362880};
static const double EXPM1[] = {1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                               1.0 / 362880, 1.0 / 3628800};
static const double LOG[] = {1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15, 1.0 / 17};
static const double SIN[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800};
static const double COS[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                             -1.0 / 87178291200};

INLINE double polynomial_exp(double x) { HORNER(x, EXP) return total; }
INLINE double polynomial_expm1(double x) { HORNER(x, EXPM1) return total; }
INLINE double polynomial_log(double x) { HORNER(x, LOG) return total; }
INLINE double polynomial_sin(double x) { HORNER(x, SIN) return total; }
INLINE double polynomial_cos(double x) { HORNER(x, COS) return total; }

INLINE double of_exp(double x) {
    x = x < -150.0 ? -150.0 : x;
    x = x > 150.0 ? 150.0 : x;
    double k = rounded(x * 0x1.71547652b82fep+0);
    double r = x - k * LN2_HI - k * LN2_LO;
    return of_bits(bits_of(polynomial_exp(r)) + (x == x ? integer(k) << 52 : 0));
}

INLINE double of_expm1(double x) {
    int small = magnitude(x) < 0.35;
    double near = small ? x : 0.0;
    double series = polynomial_expm1(near) * near, far = of_exp(x) - 1.0;
    return small ? series : far;
}

INLINE double of_log(double x) {
    i64 bits = bits_of(x), e = (bits >> 52) - 1023;
    double m = of_bits((bits & ((1LL << 52) - 1)) | (1023LL << 52));
    int large = m > SQRT_TWO;
    m = large ? m * 0.5 : m;
    double s = (m - 1.0) / (m + 1.0);
    double result = polynomial_log(s * s) * s * 2.0 + whole(e + large) * LN2;
    result = x > 0 ? result : x == 0 ? -INFINITE : NOT_A_NUMBER;
    return x == INFINITE ? x : result;
}

INLINE double of_log1p(double x) {
    double result = of_log(x + 1.0);
    return magnitude(x) < 0x1p-26 ? x : result;
}

INLINE double of_sigmoid(double x) { return 1.0 / (of_exp(-x) + 1.0); }

INLINE double of_tanh(double x) {
    double size = magnitude(x);
    double t = of_expm1((size > 20.0 ? 20.0 : size) * 2.0);
    return with_sign(t / (t + 2.0), x);
}

/* A table holds four coefficients for each node of 128 in a unit interval. */
INLINE double node_of(double x, double low, double high) {
    double t = x < low ? low : x;
    return ((t > high ? high : t) - low) * 128.0;
}
INLINE double from_table(const double *c, double d) { return ((c[3] * d + c[2]) * d + c[1]) * d + c[0]; }

#define GELU_SCALE 0x1.9884533d43651p-1
#define GELU_CUBE 0.044715
INLINE double gelu_inner(double x) { return (x * x * x * GELU_CUBE + x) * GELU_SCALE; }
INLINE double of_gelu_tanh(double x) { return (of_tanh(gelu_inner(x)) + 1.0) * x * 0.5; }
INLINE double of_gelu_tanh_slope(double x) {
    double t = of_tanh(gelu_inner(x));
    double inner_slope = (x * x * (3.0 * GELU_CUBE) + 1.0) * GELU_SCALE;
    return ((-(t * t) + 1.0) * inner_slope * x + t + 1.0) * 0.5;
}

INLINE double of_silu(double x) { return of_sigmoid(x) * x; }
INLINE double of_silu_slope(double x) {
    double s = of_sigmoid(x);
    return (-s + 1.0) * s * x + s;
}
INLINE double of_log_sigmoid(double x) {
    double low = x > 0.0 ? 0.0 : x;
    return -of_log1p(of_exp(-magnitude(x))) + low;
}

#define FARTHEST 0x1p19 /* beyond it an angle needs more of pi than is here */
INLINE double circular(double x, i64 quarter) {
    double k = rounded(x * 0x1.45f306dc9c883p-1);
    double r = x - k * 0x1.921fb54400000p+0 - k * 0x1.0b4611a600000p-34 - k * 0x1.3198a2e037073p-69;
    i64 quadrant = (x == x ? integer(k) : 0) + quarter;
    double square = r * r, odd = polynomial_cos(square), even = polynomial_sin(square) * r;
    double size = quadrant & 1 ? odd : even;
    return quadrant & 2 ? -size : size;
}
INLINE double of_sin(double x) { return x == 0 ? x : circular(x, 0); }
INLINE double of_cos(double x) { return circular(x, 1); }

INLINE double root_of_float(double x) { return (double)(float)__builtin_sqrt((double)(float)x); }
INLINE double near_one(double x, i64 *half) {
    i64 h = ((bits_of(x) >> 52) - 1023) >> 1;
    *half = h = h < -511 ? -511 : h > 511 ? 511 : h;
    return x * power_of_two(-2 * h);
}
INLINE double of_sqrt(double x) {
    i64 half;
    x = near_one(x, &half);
    double near = root_of_float(x), better = (x / near + near) * 0.5;
    return (near == 0 || near == INFINITE ? near : better) * power_of_two(half);
}
INLINE double of_rsqrt(double x) {
    i64 half;
    x = near_one(x, &half);
    double near = 1.0 / root_of_float(x), better = (near * near * x * -0.5 + 1.5) * near;
    return (near == 0 || magnitude(near) == INFINITE ? near : better) * power_of_two(-half);
}

/* -- sharing rows between threads -------------------------------------------------------------------------------- */

typedef void (*rows_of)(const void *arguments, i64 first, i64 last);
struct share { rows_of body; const void *arguments; i64 rows; };

/* PyTorch's own OpenMP: its GOMP_parallel, omp_get_thread_num and omp_get_num_threads, or none. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void), (*team_size)(void);
API void use_threads(void *of_parallel, void *of_number, void *of_size) {
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))of_parallel;
    thread_number = (int (*)(void))of_number;
    team_size = (int (*)(void))of_size;
}

static void one_share(void *data) {
    const struct share *all = data;
    i64 n = thread_number(), team = team_size(); /* which may be smaller than the team that was asked for */
    all->body(all->arguments, all->rows * n / team, all->rows * (n + 1) / team);
}

static void share(rows_of body, const void *arguments, i64 rows, i64 numbers, unsigned threads) {
    struct share all = {body, arguments, rows};
    if (parallel && threads > 1 && rows > 1 && numbers >= 32768)
        parallel(one_share, &all, threads, 0);
    else
        body(arguments, 0, rows);
}

/* -- functions of many numbers ----------------------------------------------------------------------------------- */

struct map { const void *x; void *y; const double *table; };
#define MAP_OF(name, call, type, suffix) \
    static void name##_rows##suffix(const void *arguments, i64 first, i64 last) { \
        const struct map *m = arguments; \
        const type *restrict in = m->x; \
        type *restrict out = m->y; \
        const double *table = m->table; \
        (void)table; \
        for (i64 i = first; i < last; i++) { double x = in[i]; out[i] = (type)(call); } \
    } \
    API void name##suffix(const void *x, void *y, i64 n, unsigned threads, const double *table) { \
        struct map m = {x, y, table}; \
        share(name##_rows##suffix, &m, n, n, threads); \
    }
#define MAP(name, call) MAP_OF(name, call, float, _float) MAP_OF(name, call, double, _double)
MAP(exp, of_exp(x))
MAP(expm1, of_expm1(x))
MAP(log, of_log(x))
MAP(log1p, of_log1p(x))
MAP(sigmoid, of_sigmoid(x))
MAP(tanh, of_tanh(x))
MAP(gelu_tanh, of_gelu_tanh(x))
MAP(gelu_tanh_slope, of_gelu_tanh_slope(x))
MAP(silu, of_silu(x))
MAP(silu_slope, of_silu_slope(x))
MAP(log_sigmoid, of_log_sigmoid(x))
MAP(sin, of_sin(x))
MAP(cos, of_cos(x))
API int all_near_float(const float *x, i64 n) { /* whether sin and cos are for all of these numbers */
    int near = 1;
    for (i64 i = 0; i < n; i++) near &= !(magnitude(x[i]) > FARTHEST);
    return near;
}
API int all_near_double(const double *x, i64 n) {
    int near = 1;
    for (i64 i = 0; i < n; i++) near &= !(magnitude(x[i]) > FARTHEST);
    return near;
}
MAP(root_of_float, root_of_float(x))
MAP(sqrt, of_sqrt(x))
MAP(rsqrt, of_rsqrt(x))

static void relu_rows(const void *arguments, i64 first, i64 last) {
    const struct map *m = arguments;
    const float *restrict x = m->x;
    float *restrict y = m->y;
    for (i64 i = first; i < last; i++) y[i] = x[i] <= 0 ? 0 : x[i];
}
API void relu(const float *x, float *y, i64 n, unsigned threads) {
    struct map m = {x, y, 0};
    share(relu_rows, &m, n, n, threads);
}

/* Functions from a table, in pieces: first all nodes, then their coefficients, which no vector can load at once. */
#define PIECE 256
#define TABLE_OF(name, argument, low, high, result, type, suffix) \
    static void name##_rows##suffix(const void *arguments, i64 first, i64 last) { \
        const struct map *m = arguments; \
        const type *restrict in = m->x; \
        type *restrict out = m->y; \
        double distances[PIECE], values[PIECE]; \
        int32_t nodes[PIECE]; \
        for (i64 start = first; start < last; start += PIECE) { \
            int count = (int)(last - start < PIECE ? last - start : PIECE); \
            for (int i = 0; i < count; i++) { \
                double x = in[start + i], t = node_of(argument, low, high), node = rounded(t); \
                distances[i] = (t - node) / 128.0; \
                nodes[i] = (int32_t)(x == x ? node : 0.0); \
            } \
            for (int i = 0; i < count; i++) values[i] = from_table(m->table + 4 * nodes[i], distances[i]); \
            for (int i = 0; i < count; i++) { \
                double x = in[start + i], y = values[i]; \
                (void)x; \
                out[start + i] = (type)(result); \
            } \
        } \
    } \
    API void name##suffix(const void *x, void *y, i64 n, unsigned threads, const double *table) { \
        struct map m = {x, y, table}; \
        share(name##_rows##suffix, &m, n, n, threads); \
    }
#define TABLE(name, argument, low, high, result) \
    TABLE_OF(name, argument, low, high, result, float, _float) TABLE_OF(name, argument, low, high, result, double, _double)
TABLE(erf, magnitude(x), 0.0, 4.0, with_sign(y, x))
TABLE(gelu, x, -8.0, 8.0, y * (x < -8.0 ? -8.0 : x))
TABLE(gelu_slope, x, -8.0, 8.0, y)

/* -- sums by halving --------------------------------------------------------------------------------------------- */

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

/* -- grids ------------------------------------------------------------------------------------------------------- */

INLINE double shifter(i64 top, i64 bits) {
    i64 e = top + 1023 + 52 - bits;
    e = e < 1 ? 1 : e > 2046 ? 2046 : e;
    return of_bits((e << 52) | (1LL << 51));
}

struct snap { const float *x; double *y; i64 width, bits, count, groups; };
/* Numbers seen as (outer, groups, inner), of which each group has a grid of its own. */
static void snap_groups_rows(const void *arguments, i64 first, i64 last) {
    const struct snap *s = arguments;
    i64 inner = s->width, outer = s->count, groups = s->groups;
    for (i64 group = first; group < last; group++) {
        int32_t most = 0;
        for (i64 o = 0; o < outer; o++) {
            const float *restrict x = s->x + (o * groups + group) * inner;
            for (i64 i = 0; i < inner; i++) {
                int32_t size = size_of(x[i]);
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
    struct snap s = {x, y, inner, bits, outer, groups};
    share(snap_groups_rows, &s, groups, outer * groups * inner, threads);
}
API void snap_rows(const float *x, double *y, i64 rows, i64 width, i64 bits, unsigned threads) {
    snap_groups(x, y, 1, rows, width, bits, threads);
}

/* The bits of the largest size among numbers. */
static i64 largest_bits(const double *x, i64 n) {
    i64 most = 0;
    for (i64 i = 0; i < n; i++) {
        i64 size = bits_of(x[i]) & INT64_MAX;
        most = size > most ? size : most;
    }
    return most;
}

/* All numbers on one grid, as a weight has it. */
struct snap_all { const double *x; double *y; double shift; };
static void snap_all_rows(const void *arguments, i64 first, i64 last) {
    const struct snap_all *s = arguments;
    const double *restrict x = s->x;
    double *restrict y = s->y, shift = s->shift;
    for (i64 i = first; i < last; i++) y[i] = x[i] + shift - shift;
}
API void snap_all(const double *x, double *y, i64 n, i64 bits, unsigned threads) {
    i64 most = largest_bits(x, n);
    struct snap_all s = {x, y, shifter((most >> 52) - 1022, bits)};
    share(snap_all_rows, &s, n, n, threads);
}

/* Columns of matrices, of which each has a grid of its own: as many at a time as lie near each other in memory. */
#define MOST_COLUMNS 512
static void snap_columns_rows(const void *arguments, i64 first, i64 last) {
    const struct snap *s = arguments;
    i64 width = s->width, count = s->count, wide = s->groups, blocks = (width + wide - 1) / wide;
    for (i64 block = first; block < last; block++) {
        i64 column = block % blocks * wide, columns = width - column < wide ? width - column : wide;
        const float *x = s->x + block / blocks * count * width + column;
        double *y = s->y + block / blocks * count * width + column;
        int32_t most[MOST_COLUMNS] = {0};
        double shifts[MOST_COLUMNS];
        for (i64 i = 0; i < count; i++) {
            const float *restrict row = x + i * width;
            for (i64 c = 0; c < columns; c++) {
                int32_t size = size_of(row[c]);
                most[c] = size > most[c] ? size : most[c];
            }
        }
        for (i64 c = 0; c < columns; c++) shifts[c] = shifter((most[c] >> 23) - 126, s->bits);
        for (i64 i = 0; i < count; i++) {
            const float *restrict row = x + i * width;
            double *restrict out = y + i * width;
            for (i64 c = 0; c < columns; c++) out[c] = (double)row[c] + shifts[c] - shifts[c];
        }
    }
}
API void snap_columns(const float *x, double *y, i64 outer, i64 count, i64 width, i64 bits, unsigned threads) {
    i64 wide = (width + (i64)threads - 1) / (i64)threads;
    wide = wide < COLUMNS ? COLUMNS : wide > MOST_COLUMNS ? MOST_COLUMNS : wide;
    struct snap s = {x, y, width, bits, count, wide};
    share(snap_columns_rows, &s, outer * ((width + wide - 1) / wide), outer * count * width, threads);
}

/* Let a number that threads share be at least one whose bits these are. */
static void raise_to(float *number, int32_t bits) {
    int32_t *shared = (int32_t *)number, known = __atomic_load_n(shared, __ATOMIC_RELAXED);
    while (bits > known && !__atomic_compare_exchange_n(shared, &known, bits, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

struct snap_to { const float *x; double *y; float *largest; double shift; };
static void snap_to_rows(const void *arguments, i64 first, i64 last) {
    const struct snap_to *s = arguments;
    const float *restrict x = s->x;
    double *restrict y = s->y, shift = s->shift;
    int32_t most = 0;
    for (i64 i = first; i < last; i++) {
        int32_t size = size_of(x[i]);
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
    int32_t most = 0;
    for (i64 start = first; start < last; start += BLOCK) {
        i64 count = last - start < BLOCK ? last - start : BLOCK;
        double *restrict y = s->y + start;
        for (i64 i = 0; i < count; i++) y[i] = 0.0;
        for (i64 row = 0; row < s->rows; row++) {
            const float *restrict x = s->x + row * s->width + start;
            for (i64 i = 0; i < count; i++) {
                int32_t size = size_of(x[i]);
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

/* Products of factors on grids, without negative zeros, plus a bias, rounded once. */
struct finish { const double *x, *bias; float *y; i64 width; };
static void finish_rows(const void *arguments, i64 first, i64 last) {
    const struct finish *f = arguments;
    i64 width = f->width;
    const double *restrict bias = f->bias;
    for (i64 row = first; row < last; row++) {
        const double *restrict x = f->x + row * width;
        float *restrict y = f->y + row * width;
        if (bias) for (i64 i = 0; i < width; i++) y[i] = (float)(x[i] + 0.0 + bias[i]);
        else for (i64 i = 0; i < width; i++) y[i] = (float)(x[i] + 0.0);
    }
}
API void finish(const double *x, const double *bias, float *y, i64 rows, i64 width, unsigned threads) {
    struct finish f = {x, bias, y, width};
    share(finish_rows, &f, rows, rows * width, threads);
}

/* -- rows: softmax and layer norm -------------------------------------------------------------------------------- */

struct rows {
    const float *a, *b, *weight, *bias, *mean, *scale;
    float *y, *of_mean, *of_scale;
    const i64 *targets;
    i64 width, groups, positions;
    double eps;
};
/* A weight or bias is for each number of a row, or in group norm for each channel, which has so many positions. */
INLINE const float *of_row(const struct rows *r, const float *parameters, i64 row) {
    return r->positions ? parameters + row % r->groups * (r->width / r->positions) : parameters;
}
#define EACH(i, p, parameters, body) \
    if (r->positions) \
        for (i64 c_ = 0, i = 0; i < width; c_++) { \
            double p = parameters[c_]; \
            for (i64 end_ = i + r->positions; i < end_; i++) body; \
        } \
    else \
        for (i64 i = 0; i < width; i++) { double p = parameters[i]; body; }
#define ROWS(name) \
    static void name##_rows(const void *arguments, i64 first, i64 last) { \
        const struct rows *r = arguments; \
        i64 width = r->width; \
        double *v = malloc((size_t)(2 * width + 1) * sizeof(double)), *w = v + width; \
        for (i64 row = first; row < last; row++) { \
            const float *restrict a = r->a + row * width, *restrict b = r->b ? r->b + row * width : 0; \
            float *restrict y = r->y + row * width; \
            name##_row(r, row, width, a, b, y, v, w); \
        } \
        free(v); \
    }
#define ROW(name) \
    INLINE void name##_row(const struct rows *r, i64 row, i64 width, const float *restrict a, const float *restrict b, \
                           float *restrict y, double *restrict v, double *restrict w)

/* Numbers less the largest of their row. */
INLINE void below_largest(i64 width, const float *restrict a, double *restrict v) {
    float most = a[0];
    for (i64 i = 1; i < width; i++) most = a[i] > most || a[i] != a[i] ? a[i] : most;
    for (i64 i = 0; i < width; i++) v[i] = (double)a[i] - (double)most;
}
ROW(softmax) {
    (void)r; (void)row; (void)b;
    below_largest(width, a, v);
    for (i64 i = 0; i < width; i++) w[i] = v[i] = of_exp(v[i]);
    double total = halved(w, width);
    for (i64 i = 0; i < width; i++) y[i] = (float)(v[i] / total);
}
ROWS(softmax)
ROW(log_softmax) {
    (void)r; (void)row; (void)b;
    below_largest(width, a, v);
    for (i64 i = 0; i < width; i++) w[i] = of_exp(v[i]);
    double total = of_log(halved(w, width));
    for (i64 i = 0; i < width; i++) y[i] = (float)(v[i] - total);
}
ROWS(log_softmax)
ROW(cross_entropy) { /* y is the gradient, of_mean the loss */
    (void)b;
    i64 target = r->targets[row];
    below_largest(width, a, v);
    double chosen = v[target];
    for (i64 i = 0; i < width; i++) w[i] = v[i] = of_exp(v[i]);
    double total = halved(w, width);
    for (i64 i = 0; i < width; i++) v[i] = v[i] / total;
    v[target] = v[target] - 1.0;
    for (i64 i = 0; i < width; i++) y[i] = (float)v[i];
    r->of_mean[row] = (float)(of_log(total) - chosen);
}
ROWS(cross_entropy)
ROW(softmax_backward) { /* a is the gradient, b the result */
    (void)r; (void)row;
    for (i64 i = 0; i < width; i++) w[i] = v[i] = (double)a[i] * (double)b[i];
    double total = halved(w, width);
    for (i64 i = 0; i < width; i++) y[i] = (float)(v[i] - total * (double)b[i]);
}
ROWS(softmax_backward)
ROW(log_softmax_backward) {
    (void)r; (void)row; (void)v;
    for (i64 i = 0; i < width; i++) w[i] = a[i];
    double total = halved(w, width);
    for (i64 i = 0; i < width; i++) y[i] = (float)((double)a[i] - of_exp(b[i]) * total);
}
ROWS(log_softmax_backward)
ROW(layer_norm) {
    (void)b;
    double count = (double)width;
    for (i64 i = 0; i < width; i++) w[i] = a[i];
    double middle = halved(w, width) / count;
    for (i64 i = 0; i < width; i++) { v[i] = (double)a[i] - middle; w[i] = v[i] * v[i]; }
    double scale = of_rsqrt(halved(w, width) / count + r->eps);
    for (i64 i = 0; i < width; i++) v[i] = v[i] * scale;
    if (r->weight) {
        const float *restrict weight = of_row(r, r->weight, row);
        EACH(i, p, weight, v[i] = v[i] * p)
    }
    if (r->bias) {
        const float *restrict bias = of_row(r, r->bias, row);
        EACH(i, p, bias, v[i] = v[i] + p)
    }
    for (i64 i = 0; i < width; i++) y[i] = (float)v[i];
    r->of_mean[row] = (float)middle;
    r->of_scale[row] = (float)scale;
}
ROWS(layer_norm)
ROW(layer_norm_backward) { /* a is the gradient, b the input */
    double count = (double)width, mean = r->mean[row], scale = r->scale[row];
    for (i64 i = 0; i < width; i++) v[i] = a[i];
    if (r->weight) {
        const float *restrict weight = of_row(r, r->weight, row);
        EACH(i, p, weight, v[i] = v[i] * p)
    }
    for (i64 i = 0; i < width; i++) w[i] = v[i] * (((double)b[i] - mean) * scale);
    double along = halved(w, width) / count;
    memcpy(w, v, (size_t)width * sizeof(double));
    double level = halved(w, width) / count;
    for (i64 i = 0; i < width; i++)
        y[i] = (float)((v[i] - level - ((double)b[i] - mean) * scale * along) * scale);
}
ROWS(layer_norm_backward)

#define ROW_API(name) \
    API void name(const float *a, const float *b, float *y, i64 rows, i64 width, unsigned threads) { \
        struct rows r = {.a = a, .b = b, .y = y, .width = width}; \
        share(name##_rows, &r, rows, rows * width, threads); \
    }
ROW_API(softmax)
ROW_API(log_softmax)
ROW_API(softmax_backward)
ROW_API(log_softmax_backward)
/* Whether all targets are classes; if not, nothing is computed. */
API int cross_entropy(const float *logits, const i64 *targets, float *losses, float *slopes, i64 rows, i64 width,
                      unsigned threads) {
    for (i64 row = 0; row < rows; row++)
        if (targets[row] < 0 || targets[row] >= width) return 0;
    struct rows r = {.a = logits, .y = slopes, .of_mean = losses, .targets = targets, .width = width};
    share(cross_entropy_rows, &r, rows, rows * width, threads);
    return 1;
}
/* In layer norm positions are 0; in group norm a row is a group of channels. */
API void layer_norm(const float *x, const float *weight, const float *bias, float *y, float *mean, float *scale,
                    i64 rows, i64 width, i64 groups, i64 positions, double eps, unsigned threads) {
    struct rows r = {.a = x, .weight = weight, .bias = bias, .y = y, .of_mean = mean, .of_scale = scale, .width = width,
                     .groups = groups, .positions = positions, .eps = eps};
    share(layer_norm_rows, &r, rows, rows * width, threads);
}
API void layer_norm_backward(const float *grad, const float *x, const float *weight, const float *mean,
                             const float *scale, float *y, i64 rows, i64 width, i64 groups, i64 positions,
                             unsigned threads) {
    struct rows r = {.a = grad, .b = x, .weight = weight, .mean = mean, .scale = scale, .y = y, .width = width,
                     .groups = groups, .positions = positions};
    share(layer_norm_backward_rows, &r, rows, rows * width, threads);
}

/* -- cells of recurrent layers: one step, and back through it ------------------------------------------------------ */

INLINE double steep_tanh(double x) { return of_sigmoid(x * 2.0) * 2.0 - 1.0; }
INLINE double slope_of_sigmoid(double y) { return (-y + 1.0) * y; }
INLINE double slope_of_tanh(double y) { return -(y * y) + 1.0; }

struct cell { const float *x; const double *a, *b, *c, *d, *e; double *y, *z, *v, *w; i64 width; };
static void lstm_rows(const void *arguments, i64 first, i64 last) { /* a: hidden, b: cell; y: gates */
    const struct cell *l = arguments;
    i64 n = l->width;
    for (i64 row = first; row < last; row++) {
        const float *x = l->x + row * 4 * n;
        const double *hidden = l->a + row * 4 * n, *before = l->b + row * n;
        double *restrict gates = l->y + row * 4 * n, *restrict shown = l->z + row * n;
        double *restrict state = l->v + row * n, *restrict cell = l->w + row * n;
        for (i64 i = 0; i < 4 * n; i++) gates[i] = x[i] + hidden[i];
        for (i64 i = 2 * n; i < 3 * n; i++) gates[i] = gates[i] * 2.0;
        for (i64 i = 0; i < 4 * n; i++) gates[i] = of_sigmoid(gates[i]);
        for (i64 i = 2 * n; i < 3 * n; i++) gates[i] = gates[i] * 2.0 - 1.0;
        /* one function a loop, else compilers do not make vectors of it */
        for (i64 i = 0; i < n; i++) cell[i] = (double)(float)(gates[n + i] * before[i] + gates[i] * gates[2 * n + i]);
        for (i64 i = 0; i < n; i++) shown[i] = steep_tanh(cell[i]);
        for (i64 i = 0; i < n; i++) state[i] = gates[3 * n + i] * shown[i];
    }
}
API void lstm(const float *x, const double *hidden, const double *before, double *gates, double *shown, double *state,
              double *cell, i64 rows, i64 width, unsigned threads) {
    struct cell l = {.x = x, .a = hidden, .b = before, .y = gates, .z = shown, .v = state, .w = cell, .width = width};
    share(lstm_rows, &l, rows, rows * width * 4, threads);
}
static void lstm_slopes_rows(const void *arguments, i64 first, i64 last) { /* a, b: gradients, c: cell, d: gates */
    const struct cell *l = arguments;
    i64 n = l->width;
    for (i64 row = first; row < last; row++) {
        const double *of_state = l->a + row * n, *of_cell = l->b + row * n, *before = l->c + row * n;
        const double *gates = l->d + row * 4 * n, *shown = l->e + row * n;
        double *restrict slopes = l->y + row * 4 * n, *restrict earlier = l->z + row * n;
        for (i64 i = 0; i < n; i++) {
            double entry = gates[i], forget = gates[n + i], candidate = gates[2 * n + i], out = gates[3 * n + i];
            double cell = of_cell[i] + of_state[i] * out * slope_of_tanh(shown[i]);
            slopes[i] = cell * candidate * slope_of_sigmoid(entry);
            slopes[n + i] = cell * before[i] * slope_of_sigmoid(forget);
            slopes[2 * n + i] = cell * entry * slope_of_tanh(candidate);
            slopes[3 * n + i] = of_state[i] * shown[i] * slope_of_sigmoid(out);
            earlier[i] = cell * forget;
        }
    }
}
API void lstm_slopes(const double *of_state, const double *of_cell, const double *before, const double *gates,
                     const double *shown, double *slopes, double *earlier, i64 rows, i64 width, unsigned threads) {
    struct cell l = {.a = of_state, .b = of_cell, .c = before, .d = gates, .e = shown, .y = slopes, .z = earlier,
                     .width = width};
    share(lstm_slopes_rows, &l, rows, rows * width * 4, threads);
}
static void gru_rows(const void *arguments, i64 first, i64 last) { /* a: hidden, b: state; y: gates */
    const struct cell *g = arguments;
    i64 n = g->width;
    for (i64 row = first; row < last; row++) {
        const float *x = g->x + row * 3 * n;
        const double *hidden = g->a + row * 3 * n, *before = g->b + row * n;
        double *restrict gates = g->y + row * 2 * n, *restrict candidate = g->z + row * n;
        double *restrict own = g->v + row * n, *restrict state = g->w + row * n;
        for (i64 i = 0; i < 2 * n; i++) gates[i] = of_sigmoid(x[i] + hidden[i]);
        for (i64 i = 0; i < n; i++) own[i] = (double)(float)hidden[2 * n + i];
        for (i64 i = 0; i < n; i++) candidate[i] = x[2 * n + i] + gates[i] * own[i];
        for (i64 i = 0; i < n; i++) candidate[i] = steep_tanh(candidate[i]);
        for (i64 i = 0; i < n; i++) state[i] = (before[i] - candidate[i]) * gates[n + i] + candidate[i];
    }
}
API void gru(const float *x, const double *hidden, const double *before, double *gates, double *candidate, double *own,
             double *state, i64 rows, i64 width, unsigned threads) {
    struct cell g = {.x = x, .a = hidden, .b = before, .y = gates, .z = candidate, .v = own, .w = state, .width = width};
    share(gru_rows, &g, rows, rows * width * 3, threads);
}
static void gru_slopes_rows(const void *arguments, i64 first, i64 last) { /* a: gradient, b: state, c: gates */
    const struct cell *g = arguments;
    i64 n = g->width;
    for (i64 row = first; row < last; row++) {
        const double *grad = g->a + row * n, *before = g->b + row * n, *gates = g->c + row * 2 * n;
        const double *candidate = g->d + row * n, *own = g->e + row * n;
        double *restrict of_x = g->y + row * 3 * n, *restrict of_hidden = g->z + row * 3 * n;
        double *restrict earlier = g->v + row * n;
        for (i64 i = 0; i < n; i++) {
            double reset = gates[i], renewal = gates[n + i];
            double inner = grad[i] * (-renewal + 1.0) * slope_of_tanh(candidate[i]);
            of_hidden[i] = of_x[i] = inner * own[i] * slope_of_sigmoid(reset);
            of_hidden[n + i] = of_x[n + i] = (before[i] - candidate[i]) * grad[i] * slope_of_sigmoid(renewal);
            of_x[2 * n + i] = inner;
            of_hidden[2 * n + i] = inner * reset;
            earlier[i] = grad[i] * renewal;
        }
    }
}
API void gru_slopes(const double *grad, const double *before, const double *gates, const double *candidate,
                    const double *own, double *of_x, double *of_hidden, double *earlier, i64 rows, i64 width,
                    unsigned threads) {
    struct cell g = {.a = grad, .b = before, .c = gates, .d = candidate, .e = own, .y = of_x, .z = of_hidden,
                     .v = earlier, .width = width};
    share(gru_slopes_rows, &g, rows, rows * width * 3, threads);
}

/* -- depthwise convolutions of images and kernels on grids, whose sums of products are exact in any order ---------- */

struct moves {
    i64 channels, each, size[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
    i64 plane[2], met[2]; /* a plane, and how much of an image is in it */
};
static struct moves moves_of(const i64 *n) {
    struct moves m = {n[0], n[1], {n[2], n[3]}, {n[4], n[5]}, {n[6], n[7]}, {n[8], n[9]}, {n[10], n[11]},
                      {n[12], n[13]}, {0}, {0}};
    for (int axis = 0; axis < 2; axis++) {
        m.plane[axis] = (m.out[axis] - 1) * m.stride[axis] + (m.kernel[axis] - 1) * m.dilation[axis] + 1;
        i64 room = m.plane[axis] - m.padding[axis];
        m.met[axis] = m.size[axis] < room ? m.size[axis] : room;
    }
    return m;
}

/* A plane is an image with its padding, as far as kernels reach. Where the stride is 1, rows of outputs are spread to
 * the width of a plane: then the output at a place is a sum of the plane's numbers at the same place plus an offset, one
 * for each number of the kernel, and one loop runs over all rows. Other strides go row by row. */
#define LANES 8
typedef double lanes __attribute__((vector_size(8 * LANES), aligned(8), may_alias));
struct depthwise {
    struct moves moves;
    const double *a, *b;
    double *y, *spread, *plane;
    i64 *offsets, images, numbers, area, reach, spread_size, plane_size, inside;
};
static struct depthwise begin(const struct depthwise *given) {
    struct depthwise d = *given;
    const struct moves *m = &d.moves;
    d.numbers = m->kernel[0] * m->kernel[1];
    d.area = m->out[0] * m->out[1];
    d.reach = (m->kernel[0] - 1) * m->dilation[0] * m->plane[1] + (m->kernel[1] - 1) * m->dilation[1];
    d.plane_size = m->plane[0] * m->plane[1];
    d.spread_size = m->out[0] * m->plane[1];
    d.inside = m->padding[0] * m->plane[1] + m->padding[1];
    d.offsets = malloc((size_t)d.numbers * sizeof(i64));
    d.plane = calloc((size_t)(d.plane_size + 2 * LANES), sizeof(double));
    d.spread = calloc((size_t)(d.spread_size + 2 * d.reach + 2 * LANES), sizeof(double));
    for (i64 n = 0; n < d.numbers; n++)
        d.offsets[n] = n / m->kernel[1] * m->dilation[0] * m->plane[1] + n % m->kernel[1] * m->dilation[1];
    return d;
}
static void end(struct depthwise *d) { free(d->offsets); free(d->plane); free(d->spread); }
INLINE int dense(const struct moves *m) { return m->stride[0] == 1 && m->stride[1] == 1; }

static void copy_rows(double *to, i64 to_width, const double *from, i64 from_width, const i64 *shape) {
    for (i64 row = 0; row < shape[0] && shape[1] > 0; row++)
        memcpy(to + row * to_width, from + row * from_width, (size_t)shape[1] * sizeof(double));
}

/* Sums of weights times numbers at offsets, for each of many places. */
static void gather(double *to, const double *from, const i64 *offsets, i64 sign, const double *weights, i64 numbers,
                   i64 n) {
    for (i64 i = 0; i < n; i += 2 * LANES) {
        lanes first = {0}, second = {0};
        for (i64 k = 0; k < numbers; k++) {
            const double *x = from + i + sign * offsets[k];
            first += weights[k] * *(const lanes *)x;
            second += weights[k] * *(const lanes *)(x + LANES);
        }
        *(lanes *)(to + i) = first;
        *(lanes *)(to + i + LANES) = second;
    }
}
static double dot(const double *x, const double *y, i64 n) {
    lanes first = {0}, second = {0};
    for (i64 i = 0; i < n; i += 2 * LANES) {
        first += *(const lanes *)(x + i) * *(const lanes *)(y + i);
        second += *(const lanes *)(x + i + LANES) * *(const lanes *)(y + i + LANES);
    }
    double total = 0.0;
    for (int i = 0; i < LANES; i++) total += first[i] + second[i];
    return total;
}
#define EACH_OUTPUT(...) \
    for (i64 row = 0; row < m->out[0]; row++) \
        for (i64 n = 0; n < d.numbers; n++) { \
            i64 met = row * m->stride[0] * m->plane[1] + d.offsets[n], out = row * m->out[1]; \
            for (i64 c = 0; c < m->out[1]; c++) { i64 at = met + c * m->stride[1]; __VA_ARGS__ } \
        }

static void depthwise_planes(const void *arguments, i64 first, i64 last) { /* a: images, b: kernels */
    struct depthwise d = begin(arguments);
    const struct moves *m = &d.moves;
    i64 outputs = m->channels * m->each;
    for (i64 index = first; index < last; index++) {
        i64 image = index / outputs, output = index % outputs;
        const double *weights = d.b + output * d.numbers;
        double *y = d.y + index * d.area;
        const double *x = d.a + (image * m->channels + output / m->each) * m->size[0] * m->size[1];
        copy_rows(d.plane + d.inside, m->plane[1], x, m->size[1], m->met);
        if (dense(m)) {
            gather(d.spread, d.plane, d.offsets, 1, weights, d.numbers, d.spread_size - m->plane[1] + m->out[1]);
            copy_rows(y, m->out[1], d.spread, m->plane[1], m->out);
        } else {
            memset(y, 0, (size_t)d.area * sizeof(double));
            EACH_OUTPUT(y[out + c] += weights[n] * d.plane[at];)
        }
    }
    end(&d);
}
API void depthwise(const double *x, const double *kernels, double *y, const i64 *moves, i64 images, unsigned threads) {
    struct depthwise d = {.moves = moves_of(moves), .a = x, .b = kernels, .y = y, .images = images};
    i64 planes = images * d.moves.channels * d.moves.each;
    share(depthwise_planes, &d, planes, planes * d.moves.out[0] * d.moves.out[1], threads);
}

static void depthwise_images_planes(const void *arguments, i64 first, i64 last) { /* a: gradients, b: kernels */
    struct depthwise d = begin(arguments);
    const struct moves *m = &d.moves;
    double *sums = calloc((size_t)(d.plane_size + 2 * LANES), sizeof(double));
    for (i64 index = first; index < last; index++) {
        double *y = d.y + index * m->size[0] * m->size[1];
        memset(y, 0, (size_t)(m->size[0] * m->size[1]) * sizeof(double));
        memset(sums, 0, (size_t)d.plane_size * sizeof(double));
        for (i64 one = 0; one < m->each; one++) {
            const double *weights = d.b + (index % m->channels * m->each + one) * d.numbers;
            const double *grad = d.a + (index * m->each + one) * d.area;
            /* of weights that are not finite the zeros between rows would make NaN */
            if (dense(m) && largest_bits(weights, d.numbers) < bits_of(INFINITE)) {
                copy_rows(d.spread + d.reach, m->plane[1], grad, m->out[1], m->out);
                gather(d.plane, d.spread + d.reach, d.offsets, -1, weights, d.numbers, d.plane_size);
                for (i64 i = 0; i < d.plane_size; i++) sums[i] += d.plane[i];
            } else
                EACH_OUTPUT(sums[at] += weights[n] * grad[out + c];)
        }
        copy_rows(y, m->size[1], sums + d.inside, m->plane[1], m->met);
    }
    free(sums);
    end(&d);
}
API void depthwise_images(const double *grad, const double *kernels, double *y, const i64 *moves, i64 images,
                          unsigned threads) {
    struct depthwise d = {.moves = moves_of(moves), .a = grad, .b = kernels, .y = y, .images = images};
    i64 planes = images * d.moves.channels;
    share(depthwise_images_planes, &d, planes, planes * d.moves.size[0] * d.moves.size[1], threads);
}

static void depthwise_kernels_planes(const void *arguments, i64 first, i64 last) { /* a: gradients, b: images */
    struct depthwise d = begin(arguments);
    const struct moves *m = &d.moves;
    i64 outputs = m->channels * m->each;
    for (i64 output = first; output < last; output++) {
        double *y = d.y + output * d.numbers;
        memset(y, 0, (size_t)d.numbers * sizeof(double));
        for (i64 image = 0; image < d.images; image++) {
            const double *grad = d.a + (image * outputs + output) * d.area;
            const double *x = d.b + (image * m->channels + output / m->each) * m->size[0] * m->size[1];
            copy_rows(d.plane + d.inside, m->plane[1], x, m->size[1], m->met);
            if (dense(m) && largest_bits(d.plane, d.plane_size) < bits_of(INFINITE)) {
                copy_rows(d.spread, m->plane[1], grad, m->out[1], m->out);
                for (i64 n = 0; n < d.numbers; n++)
                    y[n] += dot(d.spread, d.plane + d.offsets[n], d.spread_size - m->plane[1] + m->out[1]);
            } else
                EACH_OUTPUT(y[n] += grad[out + c] * d.plane[at];)
        }
    }
    end(&d);
}
API void depthwise_kernels(const double *grad, const double *x, double *y, const i64 *moves, i64 images,
                           unsigned threads) {
    struct depthwise d = {.moves = moves_of(moves), .a = grad, .b = x, .y = y, .images = images};
    i64 outputs = d.moves.channels * d.moves.each;
    share(depthwise_kernels_planes, &d, outputs, images * outputs * d.moves.out[0] * d.moves.out[1], threads);
}

/* -- optimizers: weights and sums of gradients are float64, states float32 ----------------------------------------- */

struct update { double *p; const double *sums; float *first, *second; double terms, factor, n[3]; float scale; int divide; };
INLINE float gradient_of(const struct update *u, i64 i) {
    double total = u->divide ? u->sums[i] / u->terms : u->sums[i] * u->factor;
    return (float)total * u->scale;
}
static void sgd_rows(const void *arguments, i64 first, i64 last) {
    const struct update *u = arguments;
    float lr = (float)u->n[0], momentum = (float)u->n[1], decay = (float)u->n[2];
    for (i64 i = first; i < last; i++) {
        float p = (float)u->p[i], g = gradient_of(u, i);
        g = u->n[2] != 0 ? g + p * decay : g;
        if (u->n[1] != 0) u->first[i] = g = u->first[i] * momentum + g;
        u->p[i] = (double)(p - g * lr);
    }
}
static void adamw_rows(const void *arguments, i64 first, i64 last) {
    const struct update *u = arguments;
    float decay = (float)u->n[0], rate = (float)u->n[1], correction = (float)u->n[2], eps = (float)1e-8;
    double *restrict weights = u->p;
    float *restrict means = u->first, *restrict squares = u->second;
    for (i64 i = first; i < last; i++) {
        float p = (float)weights[i], g = gradient_of(u, i), mean = means[i], square = squares[i];
        p = u->n[0] != 1 ? p * decay : p;
        mean = mean + (g - mean) * (float)(1.0 - 0.9);
        square = square * (float)0.999 + g * g * (float)(1.0 - 0.999);
        means[i] = mean;
        squares[i] = square;
        float root = (float)__builtin_sqrt((double)square) / correction + eps;
        weights[i] = (double)(p - mean / root * rate);
    }
}
static void update(rows_of body, double *p, const double *sums, float *first, float *second, i64 n, double terms,
                   double scale, double n0, double n1, double n2, unsigned threads) {
    i64 count = (i64)terms;
    struct update u = {p, sums, first, second, terms, 1.0 / terms, {n0, n1, n2}, (float)scale,
                       (count & (count - 1)) != 0};
    share(body, &u, n, n, threads);
}
#define UPDATE(name) \
    API void name(double *p, const double *sums, float *first, float *second, i64 n, double terms, double scale, \
                  double n0, double n1, double n2, unsigned threads) { \
        update(name##_rows, p, sums, first, second, n, terms, scale, n0, n1, n2, threads); \
    }
UPDATE(sgd)
UPDATE(adamw)
