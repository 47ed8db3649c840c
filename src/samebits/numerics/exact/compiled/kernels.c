/* Compiled forms of exact functions: the same steps as in Python, in one pass over memory.
 *
 * Every line below is an addition, a multiplication, a division, a square root, a comparison or a look at bits, each
 * rounded as IEEE 754 says, in the order of the Python function of the same name. A compiler may vectorise that, but may
 * not fuse a multiplication with an addition (-ffp-contract=off) or reorder sums (no -ffast-math). So a kernel gives the
 * bits of its Python function on every host; tests/numerics/test_compiled.py compares the two.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
typedef int64_t i64;

INLINE i64 bits_of(double x) { i64 b; memcpy(&b, &x, 8); return b; }
INLINE double of_bits(i64 b) { double x; memcpy(&x, &b, 8); return x; }
INLINE int32_t size_of(float x) { int32_t b; memcpy(&b, &x, 4); return b & INT32_MAX; } /* its order is that of sizes */
INLINE double magnitude(double x) { return of_bits(bits_of(x) & INT64_MAX); }
INLINE double with_sign(double size, double sign) {
    return of_bits((bits_of(size) & INT64_MAX) | (bits_of(sign) & INT64_MIN));
}
#define INFINITE of_bits(2047LL << 52)
#define NOT_A_NUMBER of_bits((2047LL << 52) | (1LL << 51))
#define ROUNDER 0x1.8p52 /* adding and subtracting it rounds to an integer, ties to even, which its low bits then hold */
INLINE double rounded(double x) { return with_sign(x + ROUNDER - ROUNDER, x); }
INLINE i64 integer(double whole) { return bits_of(whole + ROUNDER) - bits_of(ROUNDER); }
INLINE double whole(i64 k) { return of_bits(bits_of(ROUNDER) + k) - ROUNDER; }
INLINE double power_of_two(i64 n) { return of_bits((n + 1023) << 52); }

#include "kernels/functions.h"
#include "kernels/threads.h"
#include "kernels/many.h"
#include "kernels/sums.h"
#include "kernels/grids.h"
#include "kernels/rows.h"
#include "kernels/cells.h"
#include "kernels/depthwise.h"
#include "kernels/optimizers.h"
