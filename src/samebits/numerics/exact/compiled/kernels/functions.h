/* Functions of one number. */

#define LN2_HI 0x1.62e42fee00000p-1
#define LN2_LO 0x1.a39ef35793c76p-33
#define LN2 0x1.62e42fefa39efp-1
#define SQRT_TWO 0x1.6a09e667f3bcdp+0

#define HORNER(x, c) \
    double total = (x) * c[sizeof(c) / 8 - 1] + c[sizeof(c) / 8 - 2]; \
    for (int i = (int)(sizeof(c) / 8) - 3; i >= 0; i--) total = total * (x) + c[i];

CONSTANT EXP[] = {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                             1.0 / 362880};
CONSTANT EXPM1[] = {1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
                               1.0 / 362880, 1.0 / 3628800};
CONSTANT LOG[] = {1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15, 1.0 / 17};
CONSTANT SIN[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800, 1.0 / 6227020800};
CONSTANT COS[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800, 1.0 / 479001600,
                             -1.0 / 87178291200};

INLINE double polynomial_exp(double x) { HORNER(x, EXP) return total; }
INLINE double polynomial_expm1(double x) { HORNER(x, EXPM1) return total; }
INLINE double polynomial_log(double x) { HORNER(x, LOG) return total; }
INLINE double polynomial_sin(double x) { HORNER(x, SIN) return total; }
INLINE double polynomial_cos(double x) { HORNER(x, COS) return total; }

INLINE double of_exp(double x) {
    x = x < -150.0 ? -150.0 : x;
    x = x > 150.0 ? 150.0 : x;
    double k = rounded(x * 0x1.71547652b82fep+0);
    double r = x - k * LN2_HI - k * LN2_LO;
    return of_bits(bits_of(polynomial_exp(r)) + (x == x ? integer(k) << 52 : 0));
}

INLINE double of_expm1(double x) {
    int small = magnitude(x) < 0.35;
    double near = small ? x : 0.0;
    double series = polynomial_expm1(near) * near, far = of_exp(x) - 1.0;
    return small ? series : far;
}

INLINE double of_log(double x) {
    i64 bits = bits_of(x), e = (bits >> 52) - 1023;
    double m = of_bits((bits & ((1LL << 52) - 1)) | (1023LL << 52));
    int large = m > SQRT_TWO;
    m = large ? m * 0.5 : m;
    double s = (m - 1.0) / (m + 1.0);
    double result = polynomial_log(s * s) * s * 2.0 + whole(e + large) * LN2;
    result = x > 0 ? result : x == 0 ? -INFINITE : NOT_A_NUMBER;
    return x == INFINITE ? x : result;
}

INLINE double of_log1p(double x) {
    double result = of_log(x + 1.0);
    return magnitude(x) < 0x1p-26 ? x : result;
}

INLINE double of_sigmoid(double x) { return 1.0 / (of_exp(-x) + 1.0); }

INLINE double of_tanh(double x) {
    double size = magnitude(x);
    double t = of_expm1((size > 20.0 ? 20.0 : size) * 2.0);
    return with_sign(t / (t + 2.0), x);
}

/* A table holds four coefficients for each node of 128 in a unit interval. */
INLINE double node_of(double x, double low, double high) {
    double t = x < low ? low : x;
    return ((t > high ? high : t) - low) * 128.0;
}
INLINE double from_table(const double *c, double d) { return ((c[3] * d + c[2]) * d + c[1]) * d + c[0]; }

#define GELU_SCALE 0x1.9884533d43651p-1
#define GELU_CUBE 0.044715
INLINE double gelu_inner(double x) { return (x * x * x * GELU_CUBE + x) * GELU_SCALE; }
INLINE double of_gelu_tanh(double x) { return (of_tanh(gelu_inner(x)) + 1.0) * x * 0.5; }
INLINE double of_gelu_tanh_slope(double x) {
    double t = of_tanh(gelu_inner(x));
    double inner_slope = (x * x * (3.0 * GELU_CUBE) + 1.0) * GELU_SCALE;
    return ((-(t * t) + 1.0) * inner_slope * x + t + 1.0) * 0.5;
}

INLINE double of_silu(double x) { return of_sigmoid(x) * x; }
INLINE double of_silu_slope(double x) {
    double s = of_sigmoid(x);
    return (-s + 1.0) * s * x + s;
}
INLINE double of_log_sigmoid(double x) {
    double low = x > 0.0 ? 0.0 : x;
    return -of_log1p(of_exp(-magnitude(x))) + low;
}

#define FARTHEST 0x1p19 /* beyond it an angle needs more of pi than is here */
INLINE double circular(double x, i64 quarter) {
    double k = rounded(x * 0x1.45f306dc9c883p-1);
    double r = x - k * 0x1.921fb54400000p+0 - k * 0x1.0b4611a600000p-34 - k * 0x1.3198a2e037073p-69;
    i64 quadrant = (x == x ? integer(k) : 0) + quarter;
    double square = r * r, odd = polynomial_cos(square), even = polynomial_sin(square) * r;
    double size = quadrant & 1 ? odd : even;
    return quadrant & 2 ? -size : size;
}
INLINE double of_sin(double x) { return x == 0 ? x : circular(x, 0); }
INLINE double of_cos(double x) { return circular(x, 1); }

INLINE double root_of_float(double x) { return (double)(float)ROOT((double)(float)x); }
INLINE double near_one(double x, i64 *half) {
    i64 h = ((bits_of(x) >> 52) - 1023) >> 1;
    *half = h = h < -511 ? -511 : h > 511 ? 511 : h;
    return x * power_of_two(-2 * h);
}
INLINE double of_sqrt(double x) {
    i64 half;
    x = near_one(x, &half);
    double near = root_of_float(x), better = (x / near + near) * 0.5;
    return (near == 0 || near == INFINITE ? near : better) * power_of_two(half);
}
INLINE double of_rsqrt(double x) {
    i64 half;
    x = near_one(x, &half);
    double near = 1.0 / root_of_float(x), better = (near * near * x * -0.5 + 1.5) * near;
    return (near == 0 || magnitude(near) == INFINITE ? near : better) * power_of_two(-half);
}
