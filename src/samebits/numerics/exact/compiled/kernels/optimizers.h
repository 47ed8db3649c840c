/* Optimizers: weights and sums of gradients are float64, states float32. */

struct update { double *p; const double *sums; float *first, *second; double terms, factor, n[3]; float scale; int divide; };
INLINE float gradient_of(const struct update *u, i64 i) {
    double total = u->divide ? u->sums[i] / u->terms : u->sums[i] * u->factor;
    return (float)total * u->scale;
}
PART(sgd_part, struct update, u) {
    BEGIN(struct update, u)
    float lr = (float)u->n[0], momentum = (float)u->n[1], decay = (float)u->n[2];
    EVERY(i) {
        float p = (float)u->p[i], g = gradient_of(u, i);
        g = u->n[2] != 0 ? g + p * decay : g;
        if (u->n[1] != 0) u->first[i] = g = u->first[i] * momentum + g;
        u->p[i] = (double)(p - g * lr);
    }
}
PART(adamw_part, struct update, u) {
    BEGIN(struct update, u)
    float decay = (float)u->n[0], rate = (float)u->n[1], correction = (float)u->n[2], eps = (float)1e-8;
    double *restrict weights = u->p;
    float *restrict means = u->first, *restrict squares = u->second;
    EVERY(i) {
        float p = (float)weights[i], g = gradient_of(u, i), mean = means[i], square = squares[i];
        p = u->n[0] != 1 ? p * decay : p;
        mean = mean + (g - mean) * (float)(1.0 - 0.9);
        square = square * (float)0.999 + g * g * (float)(1.0 - 0.999);
        means[i] = mean;
        squares[i] = square;
        float root = (float)ROOT((double)square) / correction + eps;
        weights[i] = (double)(p - mean / root * rate);
    }
}
#ifdef __CUDACC__
/* Updates of several parameters, one after the other by all threads. */
struct one_update { double *p; const double *sums; float *first, *second; i64 n; double numbers[3]; };
struct updates { i64 count; double terms; const float *scale; struct one_update of[TOGETHER]; };
#define UPDATE(name) \
    API void name(const struct updates all) { \
        i64 terms = (i64)all.terms; \
        for (i64 k = 0; k < all.count; k++) { \
            const struct one_update *one = &all.of[k]; \
            struct update u = {one->p, one->sums, one->first, one->second, all.terms, 1.0 / all.terms, \
                               {one->numbers[0], one->numbers[1], one->numbers[2]}, all.scale ? *all.scale : 1, \
                               (terms & (terms - 1)) != 0}; \
            name##_part(&u, one->n); \
        } \
    }
#else
#define UPDATE(name) \
    API void name(double *p, const double *sums, float *first, float *second, i64 n, double terms, double scale, \
                  double n0, double n1, double n2, unsigned threads) { \
        i64 count = (i64)terms; \
        struct update u = {p, sums, first, second, terms, 1.0 / terms, {n0, n1, n2}, (float)scale, \
                           (count & (count - 1)) != 0}; \
        RUN(name##_part, u, n, n); \
    }
#endif
UPDATE(sgd)
UPDATE(adamw)
