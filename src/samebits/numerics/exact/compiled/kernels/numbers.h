/* Numbers and their bits, in C and in CUDA. */

#ifndef __CUDACC__
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define CONSTANT static const double
typedef int64_t i64;
typedef int32_t i32;
typedef uint64_t u64;
#define LEAST INT64_MIN
INLINE i64 bits_of(double x) { i64 b; memcpy(&b, &x, 8); return b; }
INLINE double of_bits(i64 b) { double x; memcpy(&x, &b, 8); return x; }
INLINE i32 bits_of_float(float x) { i32 b; memcpy(&b, &x, 4); return b; }
INLINE u64 upper_half(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
#define ROOT(x) __builtin_sqrt(x)
#else
#define API extern "C" __global__
#define INLINE static __device__ __forceinline__
#define CONSTANT static __constant__ double
#define restrict __restrict__
typedef long long i64;
typedef int i32;
typedef unsigned long long u64;
#define LEAST (-0x7fffffffffffffffLL - 1)
INLINE i64 bits_of(double x) { return __double_as_longlong(x); }
INLINE double of_bits(i64 b) { return __longlong_as_double(b); }
INLINE i32 bits_of_float(float x) { return __float_as_int(x); }
INLINE u64 upper_half(u64 a, u64 b) { return __umul64hi(a, b); }
#define ROOT(x) __dsqrt_rn(x)
#endif

INLINE i32 size_of(float x) { return bits_of_float(x) & 0x7fffffff; } /* its order is that of sizes */
INLINE double magnitude(double x) { return of_bits(bits_of(x) & ~LEAST); }
INLINE double with_sign(double size, double sign) {
    return of_bits((bits_of(size) & ~LEAST) | (bits_of(sign) & LEAST));
}
#define INFINITE of_bits(2047LL << 52)
#define NOT_A_NUMBER of_bits((2047LL << 52) | (1LL << 51))
#define ROUNDER 0x1.8p52 /* adding and subtracting it rounds to an integer, ties to even, which its low bits then hold */
INLINE double rounded(double x) { return with_sign(x + ROUNDER - ROUNDER, x); }
INLINE i64 integer(double whole) { return bits_of(whole + ROUNDER) - bits_of(ROUNDER); }
INLINE double whole(i64 k) { return of_bits(bits_of(ROUNDER) + k) - ROUNDER; }
INLINE double power_of_two(i64 n) { return of_bits((n + 1023) << 52); }
