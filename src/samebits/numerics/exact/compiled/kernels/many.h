/* Functions of many numbers. */

struct map { const void *x; void *y; const double *table; };
#define MAP_OF(name, call, type, suffix) \
    PART(name##_part##suffix, struct map, m) { \
        BEGIN(struct map, m) \
        const type *restrict in = (const type *)m->x; \
        type *restrict out = (type *)m->y; \
        EVERY(i) { double x = in[i]; out[i] = (type)(call); } \
    } \
    API void name##suffix(const void *x, void *y, i64 n, unsigned threads, const double *table) { \
        struct map m = {x, y, table}; \
        RUN(name##_part##suffix, m, n, n); \
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
MAP(root_of_float, root_of_float(x))
MAP(sqrt, of_sqrt(x))
MAP(rsqrt, of_rsqrt(x))

PART(relu_part, struct map, m) {
    BEGIN(struct map, m)
    const float *restrict x = (const float *)m->x;
    float *restrict y = (float *)m->y;
    EVERY(i) y[i] = x[i] <= 0 ? 0 : x[i];
}
API void relu(const float *x, float *y, i64 n, unsigned threads) {
    struct map m = {x, y, 0};
    RUN(relu_part, m, n, n);
}

#ifdef __CUDACC__
#define TABLE_OF(name, argument, low, high, result, type, suffix) \
    API void name##suffix(const type *in, type *out, i64 last, unsigned threads, const double *table) { \
        EVERY(i) { \
            double x = in[i], t = node_of(argument, low, high), node = rounded(t); \
            double y = from_table(table + 4 * (i64)(x == x ? node : 0.0), (t - node) / 128.0); \
            out[i] = (type)(result); \
        } \
    }
#else
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

/* Functions from a table, in pieces: first all nodes, then their coefficients, which no vector can load at once. */
#define PIECE 256
#define TABLE_OF(name, argument, low, high, result, type, suffix) \
    static void name##_rows##suffix(const void *arguments, i64 first, i64 last) { \
        const struct map *m = arguments; \
        const type *restrict in = m->x; \
        type *restrict out = m->y; \
        double distances[PIECE], values[PIECE]; \
        i32 nodes[PIECE]; \
        for (i64 start = first; start < last; start += PIECE) { \
            int count = (int)(last - start < PIECE ? last - start : PIECE); \
            for (int i = 0; i < count; i++) { \
                double x = in[start + i], t = node_of(argument, low, high), node = rounded(t); \
                distances[i] = (t - node) / 128.0; \
                nodes[i] = (i32)(x == x ? node : 0.0); \
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
#endif
#define TABLE(name, argument, low, high, result) \
    TABLE_OF(name, argument, low, high, result, float, _float) TABLE_OF(name, argument, low, high, result, double, _double)
TABLE(erf, magnitude(x), 0.0, 4.0, with_sign(y, x))
TABLE(gelu, x, -8.0, 8.0, y * (x < -8.0 ? -8.0 : x))
TABLE(gelu_slope, x, -8.0, 8.0, y)
