/* Vectors of the width of a register, for sums of products of numbers on grids alone, which are exact in whatever order
 * they are added. So a product need not be rounded before it is added either: ADD_PRODUCT may be one instruction, here and
 * nowhere else. Compilers keep vectors that are wider than registers in memory. */
#if defined(__AVX512F__)
#include <immintrin.h>
typedef __m512d few;
#define ADD_PRODUCT(sum, x, y) _mm512_fmadd_pd(x, y, sum)
#define EVERYWHERE(x) _mm512_set1_pd(x)
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
typedef __m256d few;
#define ADD_PRODUCT(sum, x, y) _mm256_fmadd_pd(x, y, sum)
#define EVERYWHERE(x) _mm256_set1_pd(x)
#elif defined(__aarch64__)
#include <arm_neon.h>
typedef float64x2_t few;
#define ADD_PRODUCT(sum, x, y) vfmaq_f64(sum, x, y)
#define EVERYWHERE(x) vdupq_n_f64(x)
#else
typedef double few __attribute__((vector_size(16)));
#define ADD_PRODUCT(sum, x, y) ((sum) + (x) * (y))
#define EVERYWHERE(x) (few){x, x}
#endif
#define FEW ((i64)(sizeof(few) / sizeof(double)))
#define ABREAST (2 * FEW)
#define TALL 6

/* sums[row][column] = sum of x[starts[row] + steps[k]] * packed[k][column] over k: TALL rows, ABREAST columns. */
static __attribute__((noinline)) void tile_of_products(const double *x, const i64 *starts, const i64 *steps,
                                                       const double *packed, i64 terms, double *sums) {
    few total[TALL][2] = {{{0}}};
    const double *rows[TALL];
    for (int row = 0; row < TALL; row++) rows[row] = x + starts[row];
    for (i64 k = 0; k < terms; k++, packed += ABREAST) {
        few left, right;
        memcpy(&left, packed, sizeof left);
        memcpy(&right, packed + FEW, sizeof right);
        i64 step = steps[k];
        for (int row = 0; row < TALL; row++) {
            few number = EVERYWHERE(rows[row][step]);
            total[row][0] = ADD_PRODUCT(total[row][0], number, left);
            total[row][1] = ADD_PRODUCT(total[row][1], number, right);
        }
    }
    memcpy(sums, total, sizeof total);
}
