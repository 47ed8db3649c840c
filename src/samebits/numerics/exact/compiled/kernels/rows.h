/* Rows: softmax and layer norm. */

struct rows {
    const float *a, *b, *weight, *bias, *mean, *scale;
    float *y, *of_mean, *of_scale;
    const i64 *targets;
    i64 width, groups, positions;
    double eps, *room;
};
/* A weight or bias is for each number of a row, or in group norm for each channel, which has so many positions. */
INLINE const float *of_row(const struct rows *r, const float *parameters, i64 row) {
    return r->positions ? parameters + row % r->groups * (r->width / r->positions) : parameters;
}
#ifdef __CUDACC__
#define EACH_OF_ROW(i, p, parameters, body) \
    EACH(i, width) { double p = parameters[r->positions ? i / r->positions : i]; body; }
/* A block computes rows, in room for two of them: of its own in the GPU's memory, or in what its threads share. */
#define ROOM , double *room
#define RUN_ROWS(name, r, rows, numbers) r.room = room, name##_rows(&r, rows)
#define ROWS(name) \
    INLINE void name##_rows(const struct rows *r, i64 rows) { \
        i64 width = r->width; \
        SHARED_BY_BLOCK(shared); \
        double *v = r->room ? r->room + blockIdx.x * 2 * width : shared; \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) { \
            const float *a = r->a + row * width, *b = r->b ? r->b + row * width : 0; \
            name##_row(r, row, width, a, b, r->y + row * width, v, v + width); \
            __syncthreads(); \
        } \
    }
#else
#define ROOM
#define RUN_ROWS(name, r, rows, numbers) share(name##_rows, &r, rows, numbers, threads)
#define EACH_OF_ROW(i, p, parameters, body) \
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
#endif
#define ROW(name) \
    INLINE void name##_row(const struct rows *r, i64 row, i64 width, const float *restrict a, const float *restrict b, \
                           float *restrict y, double *restrict v, double *restrict w)

/* Numbers less the largest of their row. */
INLINE float larger(float one, float other) { return other > one || other != other ? other : one; }
INLINE void below_largest(i64 width, const float *restrict a, double *restrict v) {
    float most = a[0];
#ifdef __CUDACC__
    __shared__ float of_threads[THREADS_OF_ROW];
    EACH(i, width) most = larger(most, a[i]);
    of_threads[threadIdx.x] = most;
    __syncthreads();
    for (int i = 0; i < blockDim.x; i++) most = larger(most, of_threads[i]);
#else
    for (i64 i = 1; i < width; i++) most = larger(most, a[i]);
#endif
    EACH(i, width) v[i] = (double)a[i] - (double)most;
}
ROW(softmax) {
    (void)r; (void)row; (void)b;
    below_largest(width, a, v);
    EACH(i, width) w[i] = v[i] = of_exp(v[i]);
    double total = halved(w, width);
    EACH(i, width) y[i] = (float)(v[i] / total);
}
ROWS(softmax)
ROW(log_softmax) {
    (void)r; (void)row; (void)b;
    below_largest(width, a, v);
    EACH(i, width) w[i] = of_exp(v[i]);
    double total = of_log(halved(w, width));
    EACH(i, width) y[i] = (float)(v[i] - total);
}
ROWS(log_softmax)
ROW(cross_entropy) { /* y is the gradient, of_mean the loss */
    (void)b;
    i64 target = r->targets[row];
    below_largest(width, a, v);
    ALL_DONE;
    double chosen = v[target];
    ALL_DONE;
    EACH(i, width) w[i] = v[i] = of_exp(v[i]);
    double total = halved(w, width);
    EACH(i, width) v[i] = v[i] / total;
    EACH(i, width) if (i == target) v[i] = v[i] - 1.0;
    EACH(i, width) y[i] = (float)v[i];
    ONCE r->of_mean[row] = (float)(of_log(total) - chosen);
}
ROWS(cross_entropy)
ROW(softmax_backward) { /* a is the gradient, b the result */
    (void)r; (void)row;
    EACH(i, width) w[i] = v[i] = (double)a[i] * (double)b[i];
    double total = halved(w, width);
    EACH(i, width) y[i] = (float)(v[i] - total * (double)b[i]);
}
ROWS(softmax_backward)
ROW(log_softmax_backward) {
    (void)r; (void)row; (void)v;
    EACH(i, width) w[i] = a[i];
    double total = halved(w, width);
    EACH(i, width) y[i] = (float)((double)a[i] - of_exp(b[i]) * total);
}
ROWS(log_softmax_backward)
ROW(layer_norm) {
    (void)b;
    double count = (double)width;
    EACH(i, width) w[i] = a[i];
    double middle = halved(w, width) / count;
    EACH(i, width) { v[i] = (double)a[i] - middle; w[i] = v[i] * v[i]; }
    double scale = of_rsqrt(halved(w, width) / count + r->eps);
    EACH(i, width) v[i] = v[i] * scale;
    if (r->weight) {
        const float *restrict weight = of_row(r, r->weight, row);
        EACH_OF_ROW(i, p, weight, v[i] = v[i] * p)
    }
    if (r->bias) {
        const float *restrict bias = of_row(r, r->bias, row);
        EACH_OF_ROW(i, p, bias, v[i] = v[i] + p)
    }
    EACH(i, width) y[i] = (float)v[i];
    ONCE {
        r->of_mean[row] = (float)middle;
        r->of_scale[row] = (float)scale;
    }
}
ROWS(layer_norm)
ROW(layer_norm_backward) { /* a is the gradient, b the input */
    double count = (double)width, mean = r->mean[row], scale = r->scale[row];
    EACH(i, width) v[i] = a[i];
    if (r->weight) {
        const float *restrict weight = of_row(r, r->weight, row);
        EACH_OF_ROW(i, p, weight, v[i] = v[i] * p)
    }
    EACH(i, width) w[i] = v[i] * (((double)b[i] - mean) * scale);
    double along = halved(w, width) / count;
    EACH(i, width) w[i] = v[i];
    double level = halved(w, width) / count;
    EACH(i, width)
        y[i] = (float)((v[i] - level - ((double)b[i] - mean) * scale * along) * scale);
}
ROWS(layer_norm_backward)

ROW(rms_norm) {
    (void)row; (void)b;
    double count = (double)width;
    EACH(i, width) { v[i] = a[i]; w[i] = v[i] * v[i]; }
    double scale = of_rsqrt(halved(w, width) / count + r->eps);
    EACH(i, width) y[i] = (float)(v[i] * scale);
}
ROWS(rms_norm)
ROW(rms_norm_backward) { /* a is the gradient, b the input */
    (void)row;
    double count = (double)width;
    EACH(i, width) { v[i] = b[i]; w[i] = v[i] * v[i]; }
    double scale = of_rsqrt(halved(w, width) / count + r->eps);
    EACH(i, width) { v[i] = v[i] * scale; w[i] = (double)a[i] * v[i]; }
    double along = halved(w, width) / count;
    EACH(i, width) y[i] = (float)(((double)a[i] - v[i] * along) * scale);
}
ROWS(rms_norm_backward)

#define ROW_API(name) \
    API void name(const float *a, const float *b, float *y, i64 rows, i64 width, unsigned threads ROOM) { \
        struct rows r = {0}; \
        r.a = a, r.b = b, r.y = y, r.width = width; \
        RUN_ROWS(name, r, rows, rows * width); \
    }
ROW_API(softmax)
ROW_API(log_softmax)
ROW_API(softmax_backward)
ROW_API(log_softmax_backward)
/* On a CPU, whether all targets are classes; if not, nothing is computed. On a GPU another target ends the kernel. */
API ANSWER cross_entropy(const float *logits, const i64 *targets, float *losses, float *slopes, i64 rows, i64 width,
                         unsigned threads ROOM) {
    REQUIRE_EACH(row, rows, targets[row] >= 0 && targets[row] < width)
    struct rows r = {0};
    r.a = logits, r.y = slopes, r.of_mean = losses, r.targets = targets, r.width = width;
    RUN_ROWS(cross_entropy, r, rows, rows * width);
    YES;
}
/* In layer norm positions are 0; in group norm a row is a group of channels. */
API void layer_norm(const float *x, const float *weight, const float *bias, float *y, float *mean, float *scale,
                    i64 rows, i64 width, i64 groups, i64 positions, double eps, unsigned threads ROOM) {
    struct rows r = {0};
    r.a = x, r.weight = weight, r.bias = bias, r.y = y, r.of_mean = mean, r.of_scale = scale, r.width = width;
    r.groups = groups, r.positions = positions, r.eps = eps;
    RUN_ROWS(layer_norm, r, rows, rows * width);
}
API void rms_norm(const float *x, const float *grad, float *y, i64 rows, i64 width, double eps, unsigned threads ROOM) {
    struct rows r = {0};
    r.a = x, r.y = y, r.width = width, r.eps = eps;
    (void)grad;
    RUN_ROWS(rms_norm, r, rows, rows * width);
}
API void rms_norm_backward(const float *x, const float *grad, float *y, i64 rows, i64 width, double eps,
                           unsigned threads ROOM) {
    struct rows r = {0};
    r.a = grad, r.b = x, r.y = y, r.width = width, r.eps = eps;
    RUN_ROWS(rms_norm_backward, r, rows, rows * width);
}
API void layer_norm_backward(const float *grad, const float *x, const float *weight, const float *mean,
                             const float *scale, float *y, i64 rows, i64 width, i64 groups, i64 positions,
                             unsigned threads ROOM) {
    struct rows r = {0};
    r.a = grad, r.b = x, r.weight = weight, r.mean = mean, r.scale = scale, r.y = y, r.width = width;
    r.groups = groups, r.positions = positions;
    RUN_ROWS(layer_norm_backward, r, rows, rows * width);
}
