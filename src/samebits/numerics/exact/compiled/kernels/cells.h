/* Cells of recurrent layers: one step, and back through it. */

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
