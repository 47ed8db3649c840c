/* Compiled forms of exact functions for GPUs: functions, draws, rows, cells and optimizers are kernels.c's.
 *
 * NVRTC compiles this without fusing multiplications and additions (--fmad=false). A division and a square root of
 * float64 numbers are rounded as IEEE 754 says, and numbers are never flushed to zero. What sums in another order than
 * kernels.c takes maxima alone, or sums of numbers on one grid.
 */
#define THREADS_OF_ROW 256
#define TOGETHER 32 /* parameters of a launch, whose arguments have 4 KB */

#include "kernels/numbers.h"
#include "kernels/functions.h"
#include "kernels/threads.h"
#include "kernels/many.h"
#include "kernels/draws.h"
#include "kernels/sums.h"
#include "kernels/grids.h"
#include "kernels/rows.h"
#include "kernels/pooling.h"
#include "kernels/cells.h"
#include "kernels/optimizers.h"

/* -- sums by halving: a block has some columns, and half of their numbers in the memory that its threads share ------- */

#define SUM_ON_GPU(type, suffix) \
    API void sum##suffix(const type *x, double *y, i64 outer, i64 count, i64 inner, unsigned threads, i64 wide) { \
        SHARED_BY_BLOCK(kept); \
        i64 blocks = (inner + wide - 1) / wide, half = count / 2; \
        for (i64 block = blockIdx.x; block < outer * blocks; block += gridDim.x) { \
            i64 column = block % blocks * wide, columns = inner - column < wide ? inner - column : wide; \
            const type *from = x + block / blocks * count * inner + column; \
            double *to = y + block / blocks * inner + column; \
            EACH(k, half * columns) { \
                i64 i = k / columns, c = k % columns; \
                double both = (double)from[i * inner + c] + (double)from[(half + i) * inner + c]; \
                kept[k] = i == 0 && count % 2 ? both + (double)from[2 * half * inner + c] : both; \
            } \
            for (i64 left = half; left > 1; left /= 2) { \
                i64 fewer = left / 2 * columns; \
                __syncthreads(); \
                EACH(k, fewer) { \
                    double both = kept[k] + kept[fewer + k]; \
                    kept[k] = k < columns && left % 2 ? both + kept[2 * fewer + k] : both; \
                } \
            } \
            __syncthreads(); \
            EACH(c, columns) to[c] = half ? kept[c] : count ? (double)from[c] : 0.0; \
            __syncthreads(); \
        } \
    }
SUM_ON_GPU(float, _float)
SUM_ON_GPU(double, _double)

/* -- grids ------------------------------------------------------------------------------------------------------- */

/* The largest of what the threads of a block have, for all of them. */
template <typename integer> INLINE integer largest_of_block(integer mine) {
    __shared__ integer most;
    __syncthreads();
    ONCE most = 0;
    __syncthreads();
    atomicMax(&most, mine);
    __syncthreads();
    return most;
}

/* A block for each group. */
API void snap_groups(const float *x, double *y, i64 outer, i64 groups, i64 inner, i64 bits, unsigned threads) {
    for (i64 group = blockIdx.x; group < groups; group += gridDim.x) {
        i32 most = 0;
        EACH(k, outer * inner) {
            i32 size = size_of(x[(k / inner * groups + group) * inner + k % inner]);
            most = size > most ? size : most;
        }
        double shift = shifter((largest_of_block(most) >> 23) - 126, bits);
        EACH(k, outer * inner) {
            i64 i = (k / inner * groups + group) * inner + k % inner;
            y[i] = (double)x[i] + shift - shift;
        }
    }
}
API void snap_rows(const float *x, double *y, i64 rows, i64 width, i64 bits, unsigned threads) {
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i32 most = 0;
        EACH(i, width) {
            i32 size = size_of(x[row * width + i]);
            most = size > most ? size : most;
        }
        double shift = shifter((largest_of_block(most) >> 23) - 126, bits);
        EACH(i, width) y[row * width + i] = (double)x[row * width + i] + shift - shift;
    }
}

/* A block for some neighbouring columns, as many as a warp has threads; each thread has every so-manieth row of one.
 * Rows of `x` are `across` numbers apart. */
#define WIDE 32
API void snap_columns(const float *x, double *y, i64 outer, i64 count, i64 width, i64 across, i64 bits,
                      unsigned threads) {
    __shared__ i32 sizes[WIDE];
    i64 blocks = (width + WIDE - 1) / WIDE, lane = threadIdx.x % WIDE, first = threadIdx.x / WIDE;
    i64 step = blockDim.x / WIDE;
    for (i64 block = blockIdx.x; block < outer * blocks; block += gridDim.x) {
        i64 column = block % blocks * WIDE + lane, from = block / blocks * count * across + column;
        i64 to = block / blocks * count * width + column;
        if (first == 0) sizes[lane] = 0;
        __syncthreads();
        i32 most = 0;
        if (column < width)
            for (i64 i = first; i < count; i += step) {
                i32 size = size_of(x[from + i * across]);
                most = size > most ? size : most;
            }
        atomicMax(&sizes[lane], most);
        __syncthreads();
        double shift = shifter((sizes[lane] >> 23) - 126, bits);
        if (column < width)
            for (i64 i = first; i < count; i += step)
                y[to + i * width] = (double)x[from + i * across] + shift - shift;
        __syncthreads();
    }
}

/* The largest size is in a place that is zero before; the shift is in memory, where a graph reads that of its step. */
API void snap_to(const float *x, double *y, float *largest, i64 last, const double *of, unsigned threads) {
    i32 most = 0;
    double shift = *of;
    EVERY(i) {
        i32 size = size_of(x[i]);
        most = size > most ? size : most;
        y[i] = (double)x[i] + shift - shift;
    }
    most = largest_of_block(most);
    ONCE atomicMax((i32 *)largest, most);
}
API void snap_sum(const float *x, double *y, float *largest, i64 rows, i64 last, const double *of, unsigned threads) {
    i32 most = 0;
    double shift = *of;
    EVERY(i) {
        double total = 0.0;
        for (i64 row = 0; row < rows; row++) {
            i32 size = size_of(x[row * last + i]);
            most = size > most ? size : most;
            total += (double)x[row * last + i] + shift - shift;
        }
        y[i] = total;
    }
    most = largest_of_block(most);
    ONCE atomicMax((i32 *)largest, most);
}

API void finish(const double *x, float *y, i64 last, unsigned threads) {
    EVERY(i) y[i] = (float)(x[i] + 0.0);
}

/* -- products by digits: see integer_products.py ------------------------------------------------------------------- */

#define DIGIT 7 /* bits */
#define FARTHEST 900

INLINE bool is_finite(double x) { return (bits_of(x) & ~LEAST) < bits_of(INFINITE); }
/* The bits of the sign as a number in float16, or of what is not finite. */
INLINE short sign_of(double x) {
    if (x != x) return 0x7e00;
    int size = x == 0.0 ? 0 : is_finite(x) ? 0x3c00 : 0x7c00;
    return (short)(x < 0.0 ? size | 0x8000 : size);
}
/* A block for each row; those behind the last one, and numbers behind the last of each, are zeros. */
API void digits(const double *x, signed char *y, short *signs, i64 *tops, i64 padded_rows, i64 rows, i64 width, i64 padded,
                i64 count, i64 backwards) {
    for (i64 row = blockIdx.x; row < padded_rows; row += gridDim.x) {
        const double *from = x + row * width;
        i64 here = row < rows ? width : 0, mine = 0;
        EACH(i, here) {
            i64 size = bits_of(from[i]) & ~LEAST;
            mine = size > mine ? size : mine;
        }
        i64 top = ((largest_of_block(mine) - 1) >> 52) - 1022;
        top = top < -FARTHEST ? -FARTHEST : top > FARTHEST ? FARTHEST : top;
        double scale = power_of_two(count * DIGIT - 1 - top);
        EACH(i, padded) {
            double number = i < here ? from[i] : 0.0;
            i64 left = is_finite(number) ? integer(number * scale) : 0;
            for (i64 place = 0; place < count; place++) {
                i64 low = place < count - 1 ? ((left + 64) & 127) - 64 : left;
                y[(row * count + (backwards ? count - 1 - place : place)) * padded + i] = (signed char)low;
                left = (left - low) >> DIGIT;
            }
            signs[row * padded + i] = sign_of(number);
        }
        ONCE if (row < rows) tops[row] = top;
    }
}
API void joined(const i32 *products, const float *signs, const i64 *tops, const i64 *others, double *y, i64 rows, i64 width,
                i64 padded_rows, i64 padded, i64 count) {
    i64 last = rows * width;
    EVERY(i) {
        i64 row = i / width, column = i % width, at = row * padded + column;
        double total = 0.0, sign = signs[at];
        for (i64 weight = 2 * count - 2; weight >= 0; weight--)
            total = total * 128.0 + (double)products[weight * padded_rows * padded + at];
        total = total * power_of_two(tops[row] - (count * DIGIT - 1));
        total = total * power_of_two(others[column] - (count * DIGIT - 1));
        y[i] = is_finite(sign) ? total : sign;
    }
}

/* -- sums over all windows that hold an element, in the order of a window's elements ---------------------------------- */

struct moves { i64 groups, batch, channels, size[3], positions[3], kernel[3], stride[3], padding[3], dilation[3]; };
API void folded(const double *rows, double *y, const struct moves m) {
    i64 windows = m.positions[0] * m.positions[1] * m.positions[2], taps = m.kernel[0] * m.kernel[1] * m.kernel[2];
    i64 last = m.batch * m.groups * m.channels * m.size[0] * m.size[1] * m.size[2];
    EVERY(i) {
        i64 rest = i, at[3];
        for (int axis = 2; axis >= 0; axis--) at[axis] = rest % m.size[axis], rest /= m.size[axis];
        i64 channel = rest % m.channels, sample = rest / m.channels / m.groups;
        i64 first = (rest / m.channels % m.groups * m.batch + sample) * windows;
        double total = 0.0;
        for (i64 tap = 0; tap < taps; tap++) {
            i64 of[3] = {tap / m.kernel[2] / m.kernel[1], tap / m.kernel[2] % m.kernel[1], tap % m.kernel[2]};
            i64 window = 0;
            bool held = true;
            for (int axis = 0; axis < 3; axis++) {
                i64 from = at[axis] + m.padding[axis] - of[axis] * m.dilation[axis], place = from / m.stride[axis];
                held = held && from >= 0 && from % m.stride[axis] == 0 && place < m.positions[axis];
                window = window * m.positions[axis] + place;
            }
            if (held) total = total + rows[((first + window) * m.channels + channel) * taps + tap];
        }
        y[i] = total;
    }
}
