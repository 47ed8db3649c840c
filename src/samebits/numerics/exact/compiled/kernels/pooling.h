/* The largest numbers of windows of images, and the sums of the gradients of the windows whose largest a number was. */

struct pooling { i64 images, size[3], positions[3], kernel[3], stride[3], padding[3], dilation[3]; };
struct pool { const float *x; const i64 *from; float *y; i64 *places; const struct pooling *p; };
/* The place of number `i` of so many along each axis, and which image it is of. */
INLINE i64 place_of(i64 i, const i64 *counts, i64 *place) {
    for (int axis = 2; axis >= 0; axis--) { place[axis] = i % counts[axis]; i /= counts[axis]; }
    return i;
}
INLINE i64 at_most(i64 one, i64 other) { return one < other ? one : other; }
INLINE i64 quotient_up(i64 n, i64 d) { return n > 0 ? (n + d - 1) / d : 0; }
#define EACH_WITHIN(low, high, i, j, k) \
    for (i64 i = low[0]; i < high[0]; i++) \
        for (i64 j = low[1]; j < high[1]; j++) \
            for (i64 k = low[2]; k < high[2]; k++)

/* Of equal numbers the first is the largest, and NaN is larger than any. */
PART(max_pool_part, struct pool, s) {
    BEGIN(struct pool, s)
    const struct pooling *p = s->p;
    EVERY(i) {
        i64 start[3], low[3], high[3], image = place_of(i, p->positions, start);
        for (int axis = 0; axis < 3; axis++) {
            start[axis] = start[axis] * p->stride[axis] - p->padding[axis];
            low[axis] = quotient_up(-start[axis], p->dilation[axis]);
            high[axis] = at_most(p->kernel[axis], quotient_up(p->size[axis] - start[axis], p->dilation[axis]));
        }
        const float *x = s->x + image * p->size[0] * p->size[1] * p->size[2];
        i64 chosen = -1;
        float most = 0.0f;
        EACH_WITHIN(low, high, a, b, c) {
            i64 at = ((start[0] + a * p->dilation[0]) * p->size[1] + start[1] + b * p->dilation[1]) * p->size[2] +
                     start[2] + c * p->dilation[2];
            float number = x[at];
            if (chosen < 0 || number > most || (number != number && most == most)) { most = number; chosen = at; }
        }
        s->y[i] = most + 0.0f;
        s->places[i] = chosen;
    }
}
/* x are the gradients of the windows. Their sum is on a grid of its own for each number. */
PART(max_pool_backward_part, struct pool, s) {
    BEGIN(struct pool, s)
    const struct pooling *p = s->p;
    i64 windows = p->positions[0] * p->positions[1] * p->positions[2];
    EVERY(i) {
        i64 at[3], low[3], high[3], image = place_of(i, p->size, at);
        for (int axis = 0; axis < 3; axis++) {
            i64 padded = at[axis] + p->padding[axis], reach = (p->kernel[axis] - 1) * p->dilation[axis];
            low[axis] = quotient_up(padded - reach, p->stride[axis]);
            high[axis] = at_most(p->positions[axis], padded / p->stride[axis] + 1);
        }
        const float *grad = s->x + image * windows;
        const i64 *from = s->from + image * windows;
        i64 here = (at[0] * p->size[1] + at[1]) * p->size[2] + at[2], count = 0;
        double most = 0.0, infinite = 0.0, total = 0.0;
        EACH_WITHIN(low, high, a, b, c) {
            i64 window = (a * p->positions[1] + b) * p->positions[2] + c;
            if (from[window] != here) continue;
            double size = magnitude((double)grad[window]);
            count++;
            if (!(size < INFINITE)) infinite = infinite + (double)grad[window];
            else if (size > most) most = size;
        }
        double shift = shifter((bits_of(most) >> 52) - 1022 + (bits_of((double)count) >> 52) - 1022, 53);
        EACH_WITHIN(low, high, a, b, c) {
            i64 window = (a * p->positions[1] + b) * p->positions[2] + c;
            if (from[window] == here && magnitude((double)grad[window]) < INFINITE)
                total = total + ((double)grad[window] + shift - shift);
        }
        s->y[i] = infinite != 0.0 ? (float)(infinite == infinite ? infinite : NOT_A_NUMBER) : (float)total;
    }
}
#ifdef __CUDACC__
API void max_pool(float *y, const float *x, i64 *places, const struct pooling p) {
    struct pool s = {x, 0, y, places, &p};
    max_pool_part(&s, p.images * p.positions[0] * p.positions[1] * p.positions[2]);
}
API void max_pool_backward(float *y, const float *grad, const i64 *places, const struct pooling p) {
    struct pool s = {grad, places, y, 0, &p};
    max_pool_backward_part(&s, p.images * p.size[0] * p.size[1] * p.size[2]);
}
#else
API void max_pool(float *y, const float *x, i64 *places, const struct pooling *p, unsigned threads) {
    struct pool s = {x, 0, y, places, p};
    i64 windows = p->images * p->positions[0] * p->positions[1] * p->positions[2];
    share(max_pool_part, &s, windows, windows * p->kernel[0] * p->kernel[1] * p->kernel[2], threads);
}
API void max_pool_backward(float *y, const float *grad, const i64 *places, const struct pooling *p, unsigned threads) {
    struct pool s = {grad, places, y, 0, p};
    i64 numbers = p->images * p->size[0] * p->size[1] * p->size[2];
    share(max_pool_backward_part, &s, numbers, numbers, threads);
}
#endif
