/* Cells of recurrent layers: one step, and back through it. What is kept is float32, and all between is float64. */

INLINE double steep_tanh(double x) { return of_sigmoid(x * 2.0) * 2.0 - 1.0; }
INLINE double slope_of_sigmoid(double y) { return (-y + 1.0) * y; }
INLINE double slope_of_tanh(double y) { return -(y * y) + 1.0; }

/* Of a step: what gates get from the input, from the states before and from a bias, and the last state before; of its
 * gradients: those of states. What is kept has fields for both. */
struct cell {
    const float *x, *bias, *before;
    const double *product, *of_state, *of_cell;
    float *gates, *shown, *own, *state, *cell, *slopes, *of_hidden;
    double *earlier;
    i64 width;
};
#ifdef __CUDACC__
/* A block computes rows, a thread one number of a row at a time. */
#define SOME 1
#define CELLS(name) \
    INLINE void name##_rows(const struct cell *s, i64 rows) { \
        for (i64 row = blockIdx.x; row < rows; row += gridDim.x) EACH(i, s->width) name##_some(s, row, i, 1); \
    }
#else
#define SOME 64
#define CELLS(name) \
    static void name##_rows(const void *arguments, i64 first, i64 last) { \
        const struct cell *s = arguments; \
        for (i64 row = first; row < last; row++) \
            for (i64 at = 0; at < s->width; at += SOME) \
                name##_some(s, row, at, s->width - at < SOME ? s->width - at : SOME); \
    }
#endif
#define CELL(name) INLINE void name##_some(const struct cell *s, i64 row, i64 at, i64 n)
#define OF_SOME(i) for (i64 i = 0; i < n; i++)

/* What some gates get from the states before, which are n numbers from a place in a row. */
INLINE void from_before(const struct cell *s, i64 row, i64 wide, i64 place, i64 n, double *restrict hidden) {
    const double *product = s->product + row * wide + place;
    OF_SOME(i) hidden[i] = product[i] + 0.0; /* of which a zero may have either sign */
    if (s->bias) OF_SOME(i) hidden[i] = hidden[i] + s->bias[place + i];
}

CELL(lstm) {
    i64 width = s->width, here = row * width + at;
    const float *x = s->x + row * 4 * width + at, *before = s->before + here;
    float *gates = s->gates + row * 4 * width + at, *cell = s->cell + here, *state = s->state + here;
    float *shown = s->shown + here;
    double of[4][SOME], now[SOME];
    for (i64 k = 0; k < 4; k++) {
        from_before(s, row, 4 * width, k * width + at, n, of[k]);
        OF_SOME(i) of[k][i] = x[k * width + i] + of[k][i];
    }
    OF_SOME(i) of[2][i] = of[2][i] * 2.0;
    for (i64 k = 0; k < 4; k++) OF_SOME(i) of[k][i] = of_sigmoid(of[k][i]);
    OF_SOME(i) of[2][i] = of[2][i] * 2.0 - 1.0;
    /* one function a loop, else compilers do not make vectors of it */
    OF_SOME(i) cell[i] = (float)(of[1][i] * before[i] + of[0][i] * of[2][i]);
    OF_SOME(i) now[i] = steep_tanh(cell[i]);
    OF_SOME(i) state[i] = (float)(of[3][i] * now[i]);
    OF_SOME(i) shown[i] = (float)now[i];
    for (i64 k = 0; k < 4; k++) OF_SOME(i) gates[k * width + i] = (float)of[k][i];
}
CELLS(lstm)
CELL(lstm_slopes) {
    i64 width = s->width, here = row * width + at;
    const float *gates = s->gates + row * 4 * width + at, *before = s->before + here, *shown = s->shown + here;
    const double *of_state = s->of_state + here, *of_cell = s->of_cell + here;
    float *slopes = s->slopes + row * 4 * width + at;
    double *earlier = s->earlier + here;
    OF_SOME(i) {
        double entry = gates[i], forget = gates[width + i], candidate = gates[2 * width + i], out = gates[3 * width + i];
        double now = shown[i], cell = of_cell[i] + of_state[i] * out * slope_of_tanh(now);
        slopes[i] = (float)(cell * candidate * slope_of_sigmoid(entry));
        slopes[width + i] = (float)(cell * before[i] * slope_of_sigmoid(forget));
        slopes[2 * width + i] = (float)(cell * entry * slope_of_tanh(candidate));
        slopes[3 * width + i] = (float)(of_state[i] * now * slope_of_sigmoid(out));
        earlier[i] = cell * forget;
    }
}
CELLS(lstm_slopes)
CELL(gru) {
    i64 width = s->width, here = row * width + at;
    const float *x = s->x + row * 3 * width + at, *before = s->before + here;
    float *gates = s->gates + row * 2 * width + at, *shown = s->shown + here, *own = s->own + here;
    float *state = s->state + here;
    double of[3][SOME];
    for (i64 k = 0; k < 3; k++) from_before(s, row, 3 * width, k * width + at, n, of[k]);
    OF_SOME(i) own[i] = (float)of[2][i];
    for (i64 k = 0; k < 2; k++) {
        OF_SOME(i) of[k][i] = of_sigmoid(x[k * width + i] + of[k][i]);
        OF_SOME(i) gates[k * width + i] = (float)of[k][i];
    }
    OF_SOME(i) of[2][i] = x[2 * width + i] + of[0][i] * (double)own[i];
    OF_SOME(i) of[2][i] = steep_tanh(of[2][i]);
    OF_SOME(i) shown[i] = (float)of[2][i];
    OF_SOME(i) state[i] = (float)((before[i] - of[2][i]) * of[1][i] + of[2][i]);
}
CELLS(gru)
CELL(gru_slopes) {
    i64 width = s->width, here = row * width + at;
    const float *gates = s->gates + row * 2 * width + at, *before = s->before + here, *shown = s->shown + here;
    const float *own = s->own + here;
    const double *of_state = s->of_state + here;
    float *of_x = s->slopes + row * 3 * width + at, *of_hidden = s->of_hidden + row * 3 * width + at;
    double *earlier = s->earlier + here;
    OF_SOME(i) {
        double reset = gates[i], renewal = gates[width + i], candidate = shown[i], grad = of_state[i];
        double inner = grad * (-renewal + 1.0) * slope_of_tanh(candidate);
        of_hidden[i] = of_x[i] = (float)(inner * own[i] * slope_of_sigmoid(reset));
        of_hidden[width + i] = of_x[width + i] = (float)((before[i] - candidate) * grad * slope_of_sigmoid(renewal));
        of_x[2 * width + i] = (float)inner;
        of_hidden[2 * width + i] = (float)(inner * reset);
        earlier[i] = grad * renewal;
    }
}
CELLS(gru_slopes)

API void lstm(const float *x, const double *product, const float *bias, const float *before, float *state, float *cell,
              float *gates, float *shown, i64 rows, i64 width, unsigned threads) {
    struct cell s = {0};
    s.x = x, s.product = product, s.bias = bias, s.before = before, s.state = state, s.cell = cell, s.gates = gates;
    s.shown = shown, s.width = width;
    RUN(lstm_rows, s, rows, rows * width * 4);
}
API void lstm_slopes(const double *of_state, const double *of_cell, const float *before, float *gates, float *shown,
                     float *slopes, double *earlier, i64 rows, i64 width, unsigned threads) {
    struct cell s = {0};
    s.of_state = of_state, s.of_cell = of_cell, s.before = before, s.gates = gates, s.shown = shown, s.slopes = slopes;
    s.earlier = earlier, s.width = width;
    RUN(lstm_slopes_rows, s, rows, rows * width * 4);
}
API void gru(const float *x, const double *product, const float *bias, const float *before, float *state, float *gates,
             float *shown, float *own, i64 rows, i64 width, unsigned threads) {
    struct cell s = {0};
    s.x = x, s.product = product, s.bias = bias, s.before = before, s.state = state, s.gates = gates, s.shown = shown;
    s.own = own, s.width = width;
    RUN(gru_rows, s, rows, rows * width * 3);
}
API void gru_slopes(const double *of_state, const float *before, float *gates, float *shown, float *own, float *of_x,
                    float *of_hidden, double *earlier, i64 rows, i64 width, unsigned threads) {
    struct cell s = {0};
    s.of_state = of_state, s.before = before, s.gates = gates, s.shown = shown, s.own = own, s.slopes = of_x;
    s.of_hidden = of_hidden, s.earlier = earlier, s.width = width;
    RUN(gru_slopes_rows, s, rows, rows * width * 3);
}
