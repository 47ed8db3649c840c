/* Cells of recurrent layers: one step, and back through it. */

INLINE double steep_tanh(double x) { return of_sigmoid(x * 2.0) * 2.0 - 1.0; }
INLINE double slope_of_sigmoid(double y) { return (-y + 1.0) * y; }
INLINE double slope_of_tanh(double y) { return -(y * y) + 1.0; }

struct cell { const float *x; const double *a, *b, *c, *d, *e; double *y, *z, *v, *w; i64 width; };
#define CELL(name) \
    INLINE void name##_row(const struct cell *s, i64 row, i64 n)
#ifdef __CUDACC__
/* A block computes rows. */
#define CELLS(name) \
    INLINE void name##_rows(const struct cell *s, i64 rows) { \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) name##_row(s, row, s->width); \
    }
#else
#define CELLS(name) \
    static void name##_rows(const void *arguments, i64 first, i64 last) { \
        const struct cell *s = arguments; \
        for (i64 row = first; row < last; row++) name##_row(s, row, s->width); \
    }
#endif

CELL(lstm) { /* a: hidden, b: cell; y: gates */
    const float *x = s->x + row * 4 * n;
    const double *hidden = s->a + row * 4 * n, *before = s->b + row * n;
    double *restrict gates = s->y + row * 4 * n, *restrict shown = s->z + row * n;
    double *restrict state = s->v + row * n, *restrict cell = s->w + row * n;
    EACH(i, 4 * n) gates[i] = x[i] + hidden[i];
    ALL_DONE;
    EACH(i, n) gates[2 * n + i] = gates[2 * n + i] * 2.0;
    ALL_DONE;
    EACH(i, 4 * n) gates[i] = of_sigmoid(gates[i]);
    ALL_DONE;
    EACH(i, n) gates[2 * n + i] = gates[2 * n + i] * 2.0 - 1.0;
    /* one function a loop, else compilers do not make vectors of it */
    EACH(i, n) cell[i] = (double)(float)(gates[n + i] * before[i] + gates[i] * gates[2 * n + i]);
    EACH(i, n) shown[i] = steep_tanh(cell[i]);
    EACH(i, n) state[i] = gates[3 * n + i] * shown[i];
}
CELLS(lstm)
CELL(lstm_slopes) { /* a, b: gradients, c: cell, d: gates */
    const double *of_state = s->a + row * n, *of_cell = s->b + row * n, *before = s->c + row * n;
    const double *gates = s->d + row * 4 * n, *shown = s->e + row * n;
    double *restrict slopes = s->y + row * 4 * n, *restrict earlier = s->z + row * n;
    EACH(i, n) {
        double entry = gates[i], forget = gates[n + i], candidate = gates[2 * n + i], out = gates[3 * n + i];
        double cell = of_cell[i] + of_state[i] * out * slope_of_tanh(shown[i]);
        slopes[i] = cell * candidate * slope_of_sigmoid(entry);
        slopes[n + i] = cell * before[i] * slope_of_sigmoid(forget);
        slopes[2 * n + i] = cell * entry * slope_of_tanh(candidate);
        slopes[3 * n + i] = of_state[i] * shown[i] * slope_of_sigmoid(out);
        earlier[i] = cell * forget;
    }
}
CELLS(lstm_slopes)
CELL(gru) { /* a: hidden, b: state; y: gates */
    const float *x = s->x + row * 3 * n;
    const double *hidden = s->a + row * 3 * n, *before = s->b + row * n;
    double *restrict gates = s->y + row * 2 * n, *restrict candidate = s->z + row * n;
    double *restrict own = s->v + row * n, *restrict state = s->w + row * n;
    EACH(i, 2 * n) gates[i] = of_sigmoid(x[i] + hidden[i]);
    EACH(i, n) own[i] = (double)(float)hidden[2 * n + i];
    ALL_DONE;
    EACH(i, n) candidate[i] = x[2 * n + i] + gates[i] * own[i];
    EACH(i, n) candidate[i] = steep_tanh(candidate[i]);
    EACH(i, n) state[i] = (before[i] - candidate[i]) * gates[n + i] + candidate[i];
}
CELLS(gru)
CELL(gru_slopes) { /* a: gradient, b: state, c: gates */
    const double *grad = s->a + row * n, *before = s->b + row * n, *gates = s->c + row * 2 * n;
    const double *candidate = s->d + row * n, *own = s->e + row * n;
    double *restrict of_x = s->y + row * 3 * n, *restrict of_hidden = s->z + row * 3 * n;
    double *restrict earlier = s->v + row * n;
    EACH(i, n) {
        double reset = gates[i], renewal = gates[n + i];
        double inner = grad[i] * (-renewal + 1.0) * slope_of_tanh(candidate[i]);
        of_hidden[i] = of_x[i] = inner * own[i] * slope_of_sigmoid(reset);
        of_hidden[n + i] = of_x[n + i] = (before[i] - candidate[i]) * grad[i] * slope_of_sigmoid(renewal);
        of_x[2 * n + i] = inner;
        of_hidden[2 * n + i] = inner * reset;
        earlier[i] = grad[i] * renewal;
    }
}
CELLS(gru_slopes)

API void lstm(const float *x, const double *hidden, const double *before, double *gates, double *shown, double *state,
              double *cell, i64 rows, i64 width, unsigned threads) {
    struct cell s = {x, hidden, before, 0, 0, 0, gates, shown, state, cell, width};
    RUN(lstm_rows, s, rows, rows * width * 4);
}
API void lstm_slopes(const double *of_state, const double *of_cell, const double *before, const double *gates,
                     const double *shown, double *slopes, double *earlier, i64 rows, i64 width, unsigned threads) {
    struct cell s = {0, of_state, of_cell, before, gates, shown, slopes, earlier, 0, 0, width};
    RUN(lstm_slopes_rows, s, rows, rows * width * 4);
}
API void gru(const float *x, const double *hidden, const double *before, double *gates, double *candidate, double *own,
             double *state, i64 rows, i64 width, unsigned threads) {
    struct cell s = {x, hidden, before, 0, 0, 0, gates, candidate, own, state, width};
    RUN(gru_rows, s, rows, rows * width * 3);
}
API void gru_slopes(const double *grad, const double *before, const double *gates, const double *candidate,
                    const double *own, double *of_x, double *of_hidden, double *earlier, i64 rows, i64 width,
                    unsigned threads) {
    struct cell s = {0, grad, before, gates, candidate, own, of_x, of_hidden, earlier, 0, width};
    RUN(gru_slopes_rows, s, rows, rows * width * 3);
}
