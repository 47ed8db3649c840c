/* Rows: softmax and layer norm. */

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
