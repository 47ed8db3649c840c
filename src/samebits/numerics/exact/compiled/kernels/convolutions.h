/* Convolutions of images and kernels on grids over up to three axes, and their gradients. */
#define AXES 3

/* All sizes of a convolution; channels and outputs are those of a group. `room` is an image with its padding. */
struct convolution {
    i64 groups, channels, outputs, size[AXES], out[AXES], kernel[AXES], stride[AXES], padding[AXES], dilation[AXES];
    i64 images;
    const double *a, *b;
    double *y;
    i64 numbers, pixels, area, room[AXES], room_size, parts;
    volatile char *lock;
};
static i64 product(const i64 *sizes) { return sizes[0] * sizes[1] * sizes[2]; }
static i64 place(const i64 *at, const i64 *sizes) { return (at[0] * sizes[1] + at[1]) * sizes[2] + at[2]; }
static void count_to(i64 *at, const i64 *sizes, i64 index) {
    at[2] = index % sizes[2], index /= sizes[2], at[1] = index % sizes[1], at[0] = index / sizes[1];
}
static struct convolution convolution_of(const i64 *n, const double *a, const double *b, double *y) {
    struct convolution c = {.images = n[0], .groups = n[1], .channels = n[2], .outputs = n[3], .a = a, .b = b, .y = y};
    i64 *of_axes[] = {c.size, c.out, c.kernel, c.stride, c.padding, c.dilation};
    for (int i = 0; i < 6; i++)
        for (int axis = 0; axis < AXES; axis++) of_axes[i][axis] = n[4 + AXES * i + axis];
    c.numbers = product(c.kernel), c.pixels = product(c.size), c.area = product(c.out);
    return c;
}
static double *zeros(i64 n) { return calloc((size_t)n, sizeof(double)); }
static i64 *places(i64 n) { return malloc((size_t)n * sizeof(i64)); }

/* Copy a block of planes, rows and columns into a larger one, or out of it. */
static void copy_block(double *to, const i64 *to_sizes, const double *from, const i64 *from_sizes, const i64 *block) {
    for (i64 plane = 0; plane < block[0]; plane++)
        copy_rows(to + plane * to_sizes[1] * to_sizes[2], to_sizes[2], from + plane * from_sizes[1] * from_sizes[2],
                  from_sizes[2], block + 1);
}

/* Where few images meet many threads, an image's tiles are shared too: each part has some columns, or some rows. */
struct range { i64 first, last; };
static struct range range_of(i64 part, i64 parts, i64 n, i64 unit) {
    i64 units = (n + unit - 1) / unit, last = units * (part + 1) / parts * unit;
    return (struct range){units * part / parts * unit, last < n ? last : n};
}
static i64 parts_for(i64 images, i64 n, i64 unit, unsigned threads) {
    i64 units = (n + unit - 1) / unit, wanted = images < threads ? (threads + images - 1) / images : 1;
    return units < wanted ? units : wanted;
}

/* Sums for some rows, which are starts, and some columns of `packed`, each at to[column * across + targets[row]]. */
static void all_tiles(const double *x, const i64 *starts, struct range rows, const i64 *steps, i64 terms,
                      const double *packed, struct range columns, double *to, i64 across, const i64 *targets) {
    double sums[TALL * ABREAST];
    packed += columns.first * terms;
    for (i64 column = columns.first; column < columns.last; column += ABREAST, packed += terms * ABREAST) {
        i64 wide = columns.last - column < ABREAST ? columns.last - column : ABREAST;
        for (i64 row = rows.first; row < rows.last; row += TALL) {
            i64 tall = rows.last - row < TALL ? rows.last - row : TALL;
            tile_of_products(x, starts + row, steps, packed, terms, sums);
            for (i64 j = 0; j < wide; j++)
                for (i64 i = 0; i < tall; i++)
                    to[(column + j) * across + targets[row + i]] += sums[i * ABREAST + j];
        }
    }
}
/* Where the numbers behind those of a tile lie, which nobody asks for. */
static void repeat_last(i64 *starts, i64 rows) {
    for (i64 i = 0; i < TALL - 1; i++) starts[rows + i] = rows ? starts[rows - 1] : 0;
}
static i64 padded(i64 columns) { return (columns + ABREAST - 1) / ABREAST * ABREAST; }

/* A kernel's reach into an image with its padding, as far as windows go. */
static void make_room(struct convolution *c) {
    for (int axis = 0; axis < AXES; axis++)
        c->room[axis] = (c->out[axis] - 1) * c->stride[axis] + (c->kernel[axis] - 1) * c->dilation[axis] + 1;
    c->room_size = product(c->room);
}
static void fill_room(const struct convolution *c, double *room, const double *x) {
    i64 block[AXES];
    for (int axis = 0; axis < AXES; axis++) {
        i64 space = c->room[axis] - c->padding[axis];
        block[axis] = c->size[axis] < space ? c->size[axis] : space;
    }
    i64 inside = place(c->padding, c->room);
    for (i64 channel = 0; channel < c->channels; channel++)
        copy_block(room + channel * c->room_size + inside, c->room, x + channel * c->pixels, c->size, block);
}
/* Where windows start, and where the numbers of a window are from there. */
static void find_windows(const struct convolution *c, i64 *starts, i64 *steps) {
    i64 at[AXES];
    for (i64 pixel = 0; pixel < c->area; pixel++) {
        count_to(at, c->out, pixel);
        for (int axis = 0; axis < AXES; axis++) at[axis] *= c->stride[axis];
        starts[pixel] = place(at, c->room);
    }
    for (i64 k = 0; k < c->channels * c->numbers; k++) {
        count_to(at, c->kernel, k % c->numbers);
        for (int axis = 0; axis < AXES; axis++) at[axis] *= c->dilation[axis];
        steps[k] = k / c->numbers * c->room_size + place(at, c->room);
    }
}

static void convolved_images(const void *arguments, i64 first, i64 last) { /* a: images, b: kernels */
    struct convolution c = *(const struct convolution *)arguments;
    i64 terms = c.channels * c.numbers, wide = padded(c.outputs);
    i64 *starts = places(c.area + TALL), *steps = places(terms), *targets = places(c.area);
    double *room = zeros(c.channels * c.room_size), *packed = zeros(c.groups * terms * wide);
    find_windows(&c, starts, steps);
    repeat_last(starts, c.area);
    for (i64 i = 0; i < c.area; i++) targets[i] = i;
    for (i64 group = 0; group < c.groups; group++)
        for (i64 output = 0; output < c.outputs; output++)
            for (i64 k = 0; k < terms; k++)
                packed[group * terms * wide + (output / ABREAST * terms + k) * ABREAST + output % ABREAST] =
                    c.b[(group * c.outputs + output) * terms + k];
    for (i64 at = first; at < last; at++) {
        struct range columns = range_of(at / c.images, c.parts, c.outputs, ABREAST), rows = {0, c.area};
        for (i64 group = 0; group < c.groups; group++) {
            i64 index = at % c.images * c.groups + group;
            double *y = c.y + index * c.outputs * c.area;
            memset(y + columns.first * c.area, 0, (size_t)((columns.last - columns.first) * c.area) * sizeof(double));
            fill_room(&c, room, c.a + index * c.channels * c.pixels);
            all_tiles(room, starts, rows, steps, terms, packed + group * terms * wide, columns, y, c.area, targets);
        }
    }
    free(starts), free(steps), free(targets), free(room), free(packed);
}
API int convolved(const double *x, const double *kernels, double *y, const i64 *sizes, unsigned threads) {
    struct convolution c = convolution_of(sizes, x, kernels, y);
    make_room(&c);
    c.parts = parts_for(c.images, c.outputs, ABREAST, threads);
    share(convolved_images, &c, c.images * c.parts, c.images * c.groups * c.outputs * c.area, threads);
    return 1;
}

/* Pixels whose distance from the padding's start leaves the same remainder by the stride, a phase, meet the same numbers
 * of a kernel. Here `room` is the gradients of an image with as many zeros around as these reach. */
struct phase { i64 row, rows, term, terms; };
static i64 phase_of(i64 *at, const i64 *stride) {
    i64 left[AXES];
    for (int axis = 0; axis < AXES; axis++) left[axis] = at[axis] % stride[axis], at[axis] /= stride[axis];
    return place(left, stride);
}
static i64 phase_of_pixel(const struct convolution *c, i64 *at, i64 pixel) {
    count_to(at, c->size, pixel);
    for (int axis = 0; axis < AXES; axis++) at[axis] += c->padding[axis];
    return phase_of(at, c->stride);
}
static i64 phase_of_number(const struct convolution *c, i64 *at, i64 number) {
    count_to(at, c->kernel, number);
    for (int axis = 0; axis < AXES; axis++) at[axis] *= c->dilation[axis];
    return phase_of(at, c->stride);
}
static struct phase *phases_of(const struct convolution *c, i64 count) {
    struct phase *phases = calloc((size_t)count, sizeof(struct phase));
    i64 at[AXES], row = 0, term = 0;
    for (i64 k = 0; k < c->pixels; k++) phases[phase_of_pixel(c, at, k)].rows++;
    for (i64 k = 0; k < c->numbers; k++) phases[phase_of_number(c, at, k)].terms += c->outputs;
    for (i64 k = 0; k < count; row += phases[k].rows + TALL, term += phases[k++].terms)
        phases[k].row = row, phases[k].term = term;
    return phases;
}

static void images_gradients(const void *arguments, i64 first, i64 last) { /* a: gradients, b: kernels */
    struct convolution c = *(const struct convolution *)arguments;
    i64 front[AXES], at[AXES], count = product(c.stride), wide = padded(c.channels), terms = c.outputs * c.numbers;
    for (int axis = 0; axis < AXES; axis++) {
        i64 behind = (c.size[axis] - 1 + c.padding[axis]) / c.stride[axis] + 1;
        front[axis] = (c.kernel[axis] - 1) * c.dilation[axis] / c.stride[axis];
        c.room[axis] = front[axis] + (behind > c.out[axis] ? behind : c.out[axis]);
    }
    c.room_size = product(c.room);
    struct phase *phases = phases_of(&c, count), *p;
    i64 *starts = places(c.pixels + count * TALL), *targets = places(c.pixels + count * TALL), *steps = places(terms);
    i64 *rows = calloc((size_t)count, sizeof(i64)), *met = calloc((size_t)count, sizeof(i64));
    double *room = zeros(c.outputs * c.room_size), *packed = zeros(c.groups * terms * wide);
    for (i64 pixel = 0; pixel < c.pixels; pixel++) {
        i64 phase = phase_of_pixel(&c, at, pixel), row = phases[phase].row + rows[phase]++;
        for (int axis = 0; axis < AXES; axis++) at[axis] += front[axis];
        starts[row] = place(at, c.room);
        targets[row] = pixel;
    }
    for (i64 k = 0; k < terms; k++) {
        i64 phase = phase_of_number(&c, at, k % c.numbers), term = met[phase]++;
        p = phases + phase;
        steps[p->term + term] = k / c.numbers * c.room_size - place(at, c.room);
        for (i64 group = 0; group < c.groups; group++)
            for (i64 channel = 0; channel < c.channels; channel++)
                packed[(group * terms + p->term) * wide + (channel / ABREAST * p->terms + term) * ABREAST +
                       channel % ABREAST] =
                    c.b[((group * c.outputs + k / c.numbers) * c.channels + channel) * c.numbers + k % c.numbers];
    }
    i64 inside = place(front, c.room);
    for (p = phases; p < phases + count; p++) repeat_last(starts + p->row, p->rows);
    for (i64 image = first; image < last; image++) {
        struct range columns = range_of(image / c.images, c.parts, c.channels, ABREAST);
        for (i64 group = 0; group < c.groups; group++) {
            i64 index = image % c.images * c.groups + group;
            double *y = c.y + index * c.channels * c.pixels;
            memset(y + columns.first * c.pixels, 0, (size_t)((columns.last - columns.first) * c.pixels) * sizeof(double));
            for (i64 output = 0; output < c.outputs; output++)
                copy_block(room + output * c.room_size + inside, c.room, c.a + (index * c.outputs + output) * c.area,
                           c.out, c.out);
            for (p = phases; p < phases + count; p++)
                all_tiles(room, starts + p->row, (struct range){0, p->rows}, steps + p->term, p->terms,
                          packed + (group * terms + p->term) * wide, columns, y, c.pixels, targets + p->row);
        }
    }
    free(phases), free(starts), free(targets), free(steps), free(rows), free(met), free(room), free(packed);
}
API int convolved_images_gradient(const double *grad, const double *kernels, double *y, const i64 *sizes,
                                  unsigned threads) {
    struct convolution c = convolution_of(sizes, grad, kernels, y);
    if (largest_bits(kernels, c.groups * c.outputs * c.channels * c.numbers) >= bits_of(INFINITE))
        return 0; /* the zeros around gradients would make NaN of them */
    c.parts = parts_for(c.images, c.channels, ABREAST, threads);
    share(images_gradients, &c, c.images * c.parts, c.images * c.groups * c.channels * c.pixels, threads);
    return 1;
}

/* Small images are taken some at once, since a tile is worth its stores from so many pixels on. */
#define ENOUGH 128
static void kernels_gradients(const void *arguments, i64 first, i64 last) { /* a: gradients, b: images */
    struct convolution c = *(const struct convolution *)arguments;
    i64 terms = c.channels * c.numbers, wide = padded(c.outputs), weights = c.groups * c.outputs * terms;
    i64 most = c.area < ENOUGH ? (ENOUGH + c.area - 1) / c.area : 1, image_size = c.channels * c.room_size;
    i64 *starts = places(most * c.area), *steps = places(terms + TALL), *targets = places(terms);
    double *room = zeros(most * image_size), *packed = zeros(wide * most * c.area);
    int alone = last - first == c.images * c.parts; /* sums of several threads are added at their ends */
    double *y = alone ? c.y : zeros(weights);
    find_windows(&c, starts, steps); /* of a sum over pixels, these are the steps */
    for (i64 i = c.area; i < most * c.area; i++) starts[i] = starts[i - c.area] + image_size;
    repeat_last(steps, terms);
    for (i64 i = 0; i < terms; i++) targets[i] = i;
    for (i64 at = first, many; at < last; at += many) {
        i64 image = at % c.images, left = last - at < c.images - image ? last - at : c.images - image;
        struct range rows = range_of(at / c.images, c.parts, terms, TALL), columns = {0, c.outputs};
        many = left < most ? left : most;
        for (i64 group = 0; group < c.groups; group++) {
            for (i64 i = 0; i < many; i++) {
                i64 index = (image + i) * c.groups + group;
                const double *grad = c.a + index * c.outputs * c.area;
                fill_room(&c, room + i * image_size, c.b + index * c.channels * c.pixels);
                for (i64 output = 0; output < c.outputs; output++)
                    for (i64 pixel = 0; pixel < c.area; pixel++)
                        packed[((output / ABREAST * many + i) * c.area + pixel) * ABREAST + output % ABREAST] =
                            grad[output * c.area + pixel];
            }
            all_tiles(room, steps, rows, starts, many * c.area, packed, columns, y + group * c.outputs * terms, terms,
                      targets);
        }
    }
    if (!alone) {
        while (__atomic_test_and_set(c.lock, __ATOMIC_ACQUIRE)) {}
        for (i64 i = 0; i < weights; i++) c.y[i] += y[i];
        __atomic_clear(c.lock, __ATOMIC_RELEASE);
        free(y);
    }
    free(starts), free(steps), free(targets), free(room), free(packed);
}
API int convolved_kernels_gradient(const double *grad, const double *x, double *y, const i64 *sizes, unsigned threads) {
    volatile char lock = 0;
    struct convolution c = convolution_of(sizes, grad, x, y);
    c.lock = &lock;
    make_room(&c);
    memset(y, 0, (size_t)(c.groups * c.outputs * c.channels * c.numbers) * sizeof(double));
    c.parts = parts_for(c.images, c.channels * c.numbers, TALL, threads);
    share(kernels_gradients, &c, c.images * c.parts, c.images * c.groups * c.outputs * c.area, threads);
    return 1;
}
