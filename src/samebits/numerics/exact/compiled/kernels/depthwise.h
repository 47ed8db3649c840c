/* Depthwise convolutions of images and kernels on grids, whose sums of products are exact in any order. */

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
#define TILE 16 /* places at once, in registers */
typedef few lanes __attribute__((aligned(8), may_alias));
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
    d.plane = calloc((size_t)(d.plane_size + TILE), sizeof(double));
    d.spread = calloc((size_t)(d.spread_size + 2 * d.reach + TILE), sizeof(double));
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
    for (i64 place = 0; place < n; place += TILE) {
        lanes sums[TILE / FEW] = {{0}};
        for (i64 k = 0; k < numbers; k++) {
            const double *x = from + place + sign * offsets[k];
            for (int i = 0; i < TILE / FEW; i++) sums[i] += weights[k] * *(const lanes *)(x + i * FEW);
        }
        for (int i = 0; i < TILE / FEW; i++) *(lanes *)(to + place + i * FEW) = sums[i];
    }
}
static double dot(const double *x, const double *y, i64 n) {
    lanes sums[TILE / FEW] = {{0}};
    for (i64 place = 0; place < n; place += TILE)
        for (int i = 0; i < TILE / FEW; i++)
            sums[i] += *(const lanes *)(x + place + i * FEW) * *(const lanes *)(y + place + i * FEW);
    for (int i = 1; i < TILE / FEW; i++) sums[0] += sums[i];
    double total = 0.0;
    for (int i = 0; i < FEW; i++) total += sums[0][i];
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

static void depthwise_images_gradient_planes(const void *arguments, i64 first, i64 last) { /* a: gradients, b: kernels */
    struct depthwise d = begin(arguments);
    const struct moves *m = &d.moves;
    double *sums = calloc((size_t)(d.plane_size + TILE), sizeof(double));
    i64 within = (m->met[0] - 1) * m->plane[1] + m->met[1]; /* from the first number of an image to its last */
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
                gather(d.plane, d.spread + d.reach + d.inside, d.offsets, -1, weights, d.numbers, within);
                for (i64 i = 0; i < within; i++) sums[d.inside + i] += d.plane[i];
            } else
                EACH_OUTPUT(sums[at] += weights[n] * grad[out + c];)
        }
        copy_rows(y, m->size[1], sums + d.inside, m->plane[1], m->met);
    }
    free(sums);
    end(&d);
}
API void depthwise_images_gradient(const double *grad, const double *kernels, double *y, const i64 *moves, i64 images,
                          unsigned threads) {
    struct depthwise d = {.moves = moves_of(moves), .a = grad, .b = kernels, .y = y, .images = images};
    i64 planes = images * d.moves.channels;
    share(depthwise_images_gradient_planes, &d, planes, planes * d.moves.size[0] * d.moves.size[1], threads);
}

static void depthwise_kernels_gradient_planes(const void *arguments, i64 first, i64 last) { /* a: gradients, b: images */
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
API void depthwise_kernels_gradient(const double *grad, const double *x, double *y, const i64 *moves, i64 images,
                           unsigned threads) {
    struct depthwise d = {.moves = moves_of(moves), .a = grad, .b = x, .y = y, .images = images};
    i64 outputs = d.moves.channels * d.moves.each;
    share(depthwise_kernels_gradient_planes, &d, outputs, images * outputs * d.moves.out[0] * d.moves.out[1], threads);
}
