/* Vectors of the width of a register, for convolutions alone: of images and kernels on grids, whose sums of products are
 * exact, in whatever order they are added. So a product need not be rounded before it is added either: ADD_PRODUCT may be
 * one instruction, here and nowhere else. Compilers keep vectors that are wider than registers in memory. */
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
