/* Scalar float32 functions for generated model.c files.
 *
 * Every function is branch-free (fo_pick, no tables, nothing from libm), so that a compiler turns a plain loop
 * over it into vector code, and what it leaves over takes as long whatever the numbers are. Fused multiply-adds are written out and contraction must be off, so that every
 * instruction set gives the same bits (payloads of NaN aside).
 *
 * Flags: -fno-math-errno -fno-trapping-math -ffp-contract=off, never -ffast-math.
 * Denormals: arguments below FLT_MIN may be read as 0, and results (or a factor of them) below FLT_MIN may be 0.
 * NaN, infinities and zeros give what PyTorch's float32 gives, unless a comment says otherwise.
 * "ulp" is the largest error found against double precision, in units of the exact result's last place: over every
 * float32 for exp, tanh, sigmoid, erf and log, millions of random ones for elu, softplus and pow, every seventh for the
 * rest (where the truth may be 0.03 more).
 * "own fit": a minimax polynomial found for this file by reweighted least squares (Lawson), its coefficients rounded to
 * float32 from the lowest up, each time with the rest fitted again.
 */
#ifndef FLATOUT_SCALAR_H
#define FLATOUT_SCALAR_H

#include <stdint.h>
#include <string.h>

#define FO_INLINE static inline __attribute__((always_inline, unused))
#define FO_INF __builtin_inff()
#define FO_NAN __builtin_nanf("")
#define FO_TINY 1.17549435e-38f /* FLT_MIN, the smallest normal number */

FO_INLINE uint32_t fo_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

FO_INLINE uint64_t fo_bits64(double x) {
  uint64_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

FO_INLINE float fo_from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

/* One of two numbers, by a condition of 0 or 1. By masks, as compilers make jumps of "c ? a : b" wherever they do not vectorise
 * it: then the time of a step would depend on its numbers. */
FO_INLINE float fo_pick(int c, float yes, float no) {
  uint32_t m = -(uint32_t)c;
  return fo_from_bits((fo_bits(yes) & m) | (fo_bits(no) & ~m));
}
FO_INLINE double fo_pick64(int c, double yes, double no) {
#if defined(__clang__) /* sees through masks, and jumps over what costs much */
  return __builtin_unpredictable(c) ? yes : no;
#else
  uint64_t m = -(uint64_t)c, u = (fo_bits64(yes) & m) | (fo_bits64(no) & ~m);
  double x;
  memcpy(&x, &u, sizeof x);
  return x;
#endif
}
FO_INLINE int64_t fo_pick_int64(int c, int64_t yes, int64_t no) {
  int64_t m = -(int64_t)c;
  return (yes & m) | (no & ~m);
}

FO_INLINE float fo_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FO_INLINE double fo_fma64(double a, double b, double c) { return __builtin_fma(a, b, c); }
FO_INLINE float fo_copysign(float size, float sign) { return __builtin_copysignf(size, sign); }

/* ---- Exact: one instruction or a few, the same value as PyTorch's. ---- */

FO_INLINE float fo_abs(float x) { return __builtin_fabsf(x); }
FO_INLINE float fo_floor(float x) { return __builtin_floorf(x); }
FO_INLINE float fo_ceil(float x) { return __builtin_ceilf(x); }
FO_INLINE float fo_trunc(float x) { return __builtin_truncf(x); }
/* Halves go to even, in the default rounding mode. */
FO_INLINE float fo_round(float x) { return __builtin_rintf(x); }
/* 0 at NaN, as torch.sign. */
FO_INLINE float fo_sign(float x) { return fo_pick(x > 0.0f, 1.0f, fo_pick(x < 0.0f, -1.0f, 0.0f)); }
/* NaN if either is, as torch.minimum. */
FO_INLINE float fo_min(float x, float y) { return fo_pick((x < y) | (x != x), x, y); }
/* NaN if either is, as torch.maximum. */
FO_INLINE float fo_max(float x, float y) { return fo_pick((x > y) | (x != x), x, y); }
FO_INLINE float fo_relu(float x) { return fo_pick(x < 0.0f, 0.0f, x); }
FO_INLINE float fo_leaky_relu(float x, float slope) { return fo_pick(x > 0.0f, x, x * slope); }

/* NaN stays NaN; hi wins where lo > hi. */
FO_INLINE float fo_hardtanh(float x, float lo, float hi) {
  x = fo_pick(x < lo, lo, x);
  return fo_pick(x > hi, hi, x);
}

/* min(max(x + 3, 0), 6) / 6 in PyTorch's order of operations. */
FO_INLINE float fo_hardsigmoid(float x) { return fo_hardtanh(x + 3.0f, 0.0f, 6.0f) / 6.0f; }
/* x min(max(x + 3, 0), 6) / 6 in PyTorch's order of operations. */
FO_INLINE float fo_hardswish(float x) { return x * fo_hardtanh(x + 3.0f, 0.0f, 6.0f) / 6.0f; }
/* The processor's square root: 0.5 ulp. */
FO_INLINE float fo_sqrt(float x) { return __builtin_sqrtf(x); }
/* 1 / sqrt(x), both rounded: 1.5 ulp. */
FO_INLINE float fo_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
/* The processor's division: 0.5 ulp. */
FO_INLINE float fo_recip(float x) { return 1.0f / x; }

FO_INLINE int64_t fo_min_int64(int64_t x, int64_t y) { return fo_pick_int64(x < y, x, y); }
FO_INLINE int64_t fo_max_int64(int64_t x, int64_t y) { return fo_pick_int64(x > y, x, y); }
FO_INLINE int64_t fo_abs_int64(int64_t x) { return (x ^ (x >> 63)) - (x >> 63); }
/* Held at the ends of the range; NaN becomes the lower one. */
FO_INLINE int64_t fo_to_int64(float x) {
  float y = fo_pick(x > -9.2233720368547758e18f, x, -9.2233720368547758e18f);
  return (int64_t)fo_pick(y < 9.2233714871e18f, y, 9.2233714871e18f);
}
FO_INLINE int32_t fo_to_int32(float x) {
  float y = fo_pick(x > -2147483648.0f, x, -2147483648.0f);
  return (int32_t)fo_pick(y < 2147483520.0f, y, 2147483520.0f);
}

/* ---- Exponentials. x = n ln 2 + r with |r| <= 0.3466, and exp(x) = 2^n (1 + p) with p = exp(r) - 1. ---- */

#define FO_LOG2_E 1.44269502f
#define FO_LN2_HI 0.693147182f      /* ln 2 rounded to float32, */
#define FO_LN2_LO (-1.90465421e-9f) /* and what is left of it. */

/* Adding 1.5 2^23 rounds to an integer (halves to even) that then sits in the sum's low bits, with a bias if given. */
#define FO_ROUNDER(bias) (12582912.0f + (float)(bias))

/* Returns n + rounder, and r by a Cody-Waite reduction in two fused steps. */
FO_INLINE float fo_split_ln2(float x, float rounder, float *r) {
  float t = fo_fma(x, FO_LOG2_E, rounder), n = t - rounder;
  *r = fo_fma(n, -FO_LN2_LO, fo_fma(n, -FO_LN2_HI, x));
  return t;
}

/* p = r + r^2 h(r): own fit of degree 6, 1.4e-8 relative to p, 3.1e-9 to 1 + p. */
FO_INLINE float fo_expm1_core(float r) {
  float r2 = r * r;
  float low = fo_fma(0.166665465f, r, 0.49999997f);
  float high = fo_fma(0.00836625323f, r, 0.0416674428f);
  return fo_fma(fo_fma(fo_fma(0.00138699473f, r2, high), r2, low), r2, r);
}

/* 2^n from t = n + FO_ROUNDER(127), or from a smaller bias b 2^(n - 127 + b); its exponent bits lie within 1..254. */
FO_INLINE float fo_power_of_two(float t) { return fo_from_bits(fo_bits(t) << 23); }

/* exp(x) for x <= 0, 0 below ln FLT_MIN. NaN passes, because it passes through p. 1.05 ulp. */
FO_INLINE float fo_exp_nonpos(float x) {
  float r, s = fo_power_of_two(fo_split_ln2(x, FO_ROUNDER(127), &r));
  float y = fo_fma(s, fo_expm1_core(r), s);
  return fo_pick(x < -87.3365402f, 0.0f, y);
}

/* 2^n (1 + p), n added to the exponent's bits so that n = 128 works: 1.05 ulp. */
FO_INLINE float fo_exp(float x) {
  float r, t = fo_split_ln2(x, FO_ROUNDER(0), &r);
  float y = fo_from_bits(fo_bits(1.0f + fo_expm1_core(r)) + (fo_bits(t) << 23));
  y = fo_pick(x < 88.7228394f, y, x * FO_INF); /* NaN too */
  return fo_pick(x < -87.3365402f, 0.0f, y);
}

/* As fo_exp, with r = (x - n) ln 2 in two parts: 1.05 ulp. */
FO_INLINE float fo_exp2(float x) {
  float t = x + FO_ROUNDER(0), f = x - (t - FO_ROUNDER(0));
  float p = fo_expm1_core(fo_fma(f, FO_LN2_HI, f * FO_LN2_LO));
  float y = fo_from_bits(fo_bits(1.0f + p) + (fo_bits(t) << 23));
  y = fo_pick(x < 128.0f, y, x * FO_INF);
  return fo_pick(x < -126.0f, 0.0f, y);
}

/* 2^n p + (2^n - 1), halved until the end so that n = 128 works: 1.58 ulp. */
FO_INLINE float fo_expm1(float x) {
  float a = fo_pick(x < -18.0f, -18.0f, x); /* -1 from there on */
  float r, half = fo_power_of_two(fo_split_ln2(a, FO_ROUNDER(126), &r));
  float y = 2.0f * fo_fma(half, fo_expm1_core(r), half - 0.5f);
  return fo_copysign(fo_pick(x < 88.7228394f, y, x * FO_INF), x);
}

/* z / (1 + z), z = exp(-|x|), taken from 1 or from z by a fused multiply-add: 1.69 ulp. */
FO_INLINE float fo_sigmoid(float x) {
  float z = fo_exp_nonpos(-fo_abs(x)), side = fo_pick(x < 0.0f, z, 1.0f);
  return fo_fma(-side, z / (1.0f + z), side);
}

/* (1 - z) / (1 + z), z = exp(-2|x|), with 1 - z as an expm1: 2.34 ulp. */
FO_INLINE float fo_tanh(float x) {
  float r, a = -2.0f * fo_abs(x);
  a = fo_pick(a < -20.0f, -20.0f, a); /* 1 from there on */
  float s = fo_power_of_two(fo_split_ln2(a, FO_ROUNDER(127), &r)), p = fo_expm1_core(r);
  return fo_copysign(fo_fma(s, p, s - 1.0f) / (1.0f + fo_fma(s, p, s)), x);
}

/* (e + e / (e + 1)) / 2, e = expm1(|x|), halved so that it overflows only with the result: 2.28 ulp. */
FO_INLINE float fo_sinh(float x) {
  float r, a = fo_abs(x), quarter = fo_power_of_two(fo_split_ln2(a, FO_ROUNDER(125), &r));
  float half = 2.0f * fo_fma(quarter, fo_expm1_core(r), quarter - 0.25f);
  float y = half + half / fo_fma(2.0f, half, 1.0f);
  return fo_copysign(fo_pick(a <= 89.4159851f, y, a * FO_INF), x);
}

/* h + 1 / (4 h), h = exp(|x|) / 2: 1.51 ulp. */
FO_INLINE float fo_cosh(float x) {
  float r, a = fo_abs(x), quarter = fo_power_of_two(fo_split_ln2(a, FO_ROUNDER(125), &r));
  float half = 2.0f * fo_fma(quarter, fo_expm1_core(r), quarter);
  return fo_pick(a <= 89.4159851f, half + 0.25f / half, a * FO_INF);
}

/* alpha scale expm1(x input_scale) up to 0, scale x above, as aten::elu (celu and selu too): 2.5 ulp. */
FO_INLINE float fo_elu(float x, float alpha, float scale, float input_scale) {
  return fo_pick(x <= 0.0f, fo_expm1(x * input_scale) * (alpha * scale), x * scale);
}

/* x sigmoid(x): 2.68 ulp above -87, NaN at -inf, as PyTorch. */
FO_INLINE float fo_silu(float x) { return x * fo_sigmoid(x); }

/* x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2: 2.68 ulp above -1, 4.3e-8 below. */
FO_INLINE float fo_gelu_tanh(float x) {
  return x * fo_sigmoid(x * fo_fma(x * x, 0.0713548163f, 1.59576912f));
}

/* x ((1 + e)^2 - 1) / ((1 + e)^2 + 1), e = exp(x), both sides divided by e^2 above 0: 3.64 ulp above -87. */
FO_INLINE float fo_mish(float x) {
  float z = fo_exp_nonpos(-fo_abs(x));
  float num = fo_pick(x < 0.0f, fo_fma(z, z, 2.0f * z), fo_fma(2.0f, z, 1.0f));
  float den = num + fo_pick(x < 0.0f, 2.0f, 2.0f * z * z);
  return x * num / den;
}

/* ---- The error function: 1 - erf(a) = exp(-g(a)), and g(a) / a is close to a polynomial for a >= 0. ---- */

#define FO_2_SQRTPI 1.12837923f /* 2 / sqrt(pi) rounded to float32; the fits' first coefficient holds the rest */

/* -expm1(-g), g an own fit of degree 9 that gives erf to 4e-9: 1.83 ulp. */
FO_INLINE float fo_erf(float x) {
  float r, a = fo_abs(x);
  a = fo_pick(a > 3.9375f, 3.9375f, a); /* 1 from there on */
  float q = fo_fma(-9.2638229e-06f, a, 0.000117710959f);
  q = fo_fma(fo_fma(q, a, -0.000633093354f), a, 0.00166751118f);
  q = fo_fma(fo_fma(q, a, -0.000160894357f), a, -0.0191527884f);
  q = fo_fma(fo_fma(q, a, 0.102777757f), a, 0.636619389f);
  q = fo_fma(q, a, -5.4120612e-08f);
  float s = fo_power_of_two(fo_split_ln2(-fo_fma(a, FO_2_SQRTPI, a * q), FO_ROUNDER(127), &r));
  return fo_copysign(fo_fma(s, fo_expm1_core(r), s - 1.0f), x);
}

/* max(x, 0) - |x| / 2 exp(-g(|x| / sqrt(2))), own fit to |x| = 5.8: 3.62 ulp above -1, 4.8e-8 below. */
FO_INLINE float fo_gelu(float x) {
  float b = fo_abs(x);
  b = fo_pick(b > 32.0f, 32.0f, b); /* exp(-g) is 0 there: inf gives inf and -inf gives 0, where PyTorch's CPU gives NaN */
  float a = 0.707106769f * b;
  float q = fo_fma(6.41424833e-07f, a, -1.349584e-05f);
  q = fo_fma(fo_fma(q, a, 0.000121800236f), a, -0.000600352534f);
  q = fo_fma(fo_fma(q, a, 0.0015534272f), a, -6.02533737e-06f);
  q = fo_fma(fo_fma(q, a, -0.0192530416f), a, 0.10280709f);
  q = fo_fma(fo_fma(q, a, 0.636616349f), a, -5.87336935e-09f);
  float tail = fo_exp_nonpos(-fo_fma(a, FO_2_SQRTPI, a * q));
  return fo_fma(-0.5f * b, tail, fo_relu(x));
}

/* ---- Logarithms. x = 2^k (1 + f) with -0.2929 <= f <= 0.4142, and ln(1 + f) = f + g. ---- */

#define FO_SQRT_HALF_BITS 0x3f3504f3u
#define FO_ONE_BITS 0x3f800000u

/* k + 127 for a normal x > 0. */
FO_INLINE uint32_t fo_biased_exponent(float x) { return (fo_bits(x) + (FO_ONE_BITS - FO_SQRT_HALF_BITS)) >> 23; }

/* Returns f; k as a float. */
FO_INLINE float fo_split_log(float x, float *k) {
  uint32_t e = fo_biased_exponent(x);
  *k = (float)((int32_t)e - 127);
  return fo_from_bits(fo_bits(x) - (e << 23) + FO_ONE_BITS) - 1.0f;
}

/* g + c = -f^2 / 2 + (f^3 P(f) + c): own fit, 7.7e-10 of the logarithm. */
FO_INLINE float fo_log_core(float f, float c) {
  float f2 = f * f, f4 = f2 * f2;
  float p0 = fo_fma(-0.250000089f, f, 0.333333135f), p2 = fo_fma(-0.166679889f, f, 0.200020716f);
  float p4 = fo_fma(-0.124062337f, f, 0.142203584f), p6 = fo_fma(-0.116701007f, f, 0.118835494f);
  float p = fo_fma(fo_fma(0.0674927011f, f4, fo_fma(p6, f2, p4)), f4, fo_fma(p2, f2, p0));
  return fo_fma(-0.5f, f2, fo_fma(f2 * f, p, c));
}

/* y, but -inf where x is 0, NaN below, x where it is inf or NaN. */
FO_INLINE float fo_log_ends(float x, float y) {
  y = fo_pick(x < FO_TINY, fo_pick(x > -FO_TINY, -FO_INF, FO_NAN), y);
  return fo_pick(x < FO_INF, y, x);
}

/* k ln 2 + f + g, ln 2 in two parts: 0.85 ulp. */
FO_INLINE float fo_log(float x) {
  float k, f = fo_split_log(x, &k);
  return fo_log_ends(x, fo_fma(k, FO_LN2_HI, f + fo_log_core(f, k * FO_LN2_LO)));
}

/* k + (f + g) / ln 2, the factor in two parts: 1.02 ulp; powers of two are exact. */
FO_INLINE float fo_log2(float x) {
  float k, f = fo_split_log(x, &k), g = fo_log_core(f, 0.0f);
  return fo_log_ends(x, k + fo_fma(f, FO_LOG2_E, fo_fma(f, 1.92596303e-8f, g * FO_LOG2_E)));
}

/* k log10(2) + (f + g) / ln 10, both factors in two parts: 0.95 ulp. */
FO_INLINE float fo_log10(float x) {
  float k, f = fo_split_log(x, &k), g = fo_log_core(f, 0.0f);
  float low = fo_fma(f, -1.010305e-08f, fo_fma(g, 0.434294492f, k * -1.43209888e-08f));
  return fo_log_ends(x, fo_fma(k, 0.30103001f, fo_fma(f, 0.434294492f, low)));
}

/* ln(1 + x) for -1 < x < 2^100: k from 1 + x rounded, then f = 2^-k x + (2^-k - 1) in one rounding. NaN passes. */
FO_INLINE float fo_log1p_core(float x, float shift) {
  uint32_t e = fo_biased_exponent(1.0f + x);
  float k = (float)((int32_t)e - 127) + shift, s = fo_from_bits((254u - e) << 23), f = fo_fma(s, x, s - 1.0f);
  return fo_fma(k, FO_LN2_HI, f + fo_log_core(f, k * FO_LN2_LO));
}

/* As fo_log without the rounding of 1 + x; beyond 2^64 x is scaled by 2^-32: 1.38 ulp. */
FO_INLINE float fo_log1p(float x) {
  float far = fo_pick(x > 0x1p64f, 32.0f, 0.0f);
  float y = fo_log1p_core(fo_pick(x > 0x1p64f, x * 0x1p-32f, x), far);
  return fo_copysign(fo_log_ends(1.0f + x, y), x);
}

/* (max(v, 0) + log1p(exp(-|v|))) / beta with v = beta x, x itself where v > threshold: 1.65 ulp. */
FO_INLINE float fo_softplus(float x, float beta, float threshold) {
  float v = x * beta;
  float y = (fo_pick(v < 0.0f, 0.0f, v) + fo_log1p_core(fo_exp_nonpos(-fo_abs(v)), 0.0f)) / beta;
  return fo_pick(v > threshold, x, y);
}

/* ---- Powers. ---- */

/* log2 of a normal x > 0 in double: 2 atanh(s) / ln 2, s = f / (2 + f), own fit in s^2, 1.3e-11. */
FO_INLINE double fo_log2_wide(float x) {
  float k, f = fo_split_log(x, &k);
  double s = (double)f / (2.0 + (double)f), u = s * s;
  double p = fo_fma64(0.3407404256546937, u, 0.41167211199654891);
  p = fo_fma64(fo_fma64(p, u, 0.57708359611736504), u, 0.96179667327635021);
  return fo_fma64(s, fo_fma64(p, u, 2.8853900817901454), (double)k);
}

/* 2^t for a double t, |t| <= 200, in float32. */
FO_INLINE float fo_exp2_wide(double t) {
  double whole = (t + 6755399441055744.0) - 6755399441055744.0; /* 1.5 2^52: to an integer */
  float n = (float)whole, f = (float)(t - whole);
  float p = fo_expm1_core(fo_fma(f, FO_LN2_HI, f * FO_LN2_LO));
  float y = fo_from_bits(fo_bits(1.0f + p) + (fo_bits(n + FO_ROUNDER(0)) << 23));
  y = fo_pick(t < 128.0, y, FO_INF);
  return fo_pick(t < -126.0, 0.0f, y);
}

/* 2^(y log2|x|), the exponent in double, signs and special cases as C's powf: 1.15 ulp. */
FO_INLINE float fo_pow(float x, float y) {
  float a = fo_abs(x), b = fo_abs(y), half = 0.5f * y;
  int whole = fo_trunc(y) == y, odd = whole & (fo_trunc(half) != half), minus = (fo_bits(x) >> 31) != 0u;
  float end = a * fo_pick(a < FO_INF, 0.0f, 1.0f); /* added, as a choice would be a jump in clang */
  double l = fo_log2_wide(a) + (double)(end - fo_pick(a < FO_TINY, FO_INF, 0.0f));
  double t = (double)y * l;
  t = fo_pick64(t > 200.0, 200.0, t);
  t = fo_pick64(t < -200.0, -200.0, t);
  float z = fo_pick(t == t, fo_exp2_wide(t), FO_NAN);
  z = fo_pick((a == 1.0f) & (b == FO_INF), 1.0f, z);
  z = fo_pick((x < 0.0f) & (a >= FO_TINY) & (a < FO_INF) & !whole, FO_NAN, z);
  z = fo_pick(minus & odd, -z, z);
  return fo_pick((y == 0.0f) | (x == 1.0f), 1.0f, z);
}

/* ---- Angles. ---- */

/* |x| = n pi/2 + r in double (Cody-Waite, pi/2 in two parts), good for |x| < 2^50. Returns r; n's low bits. */
FO_INLINE float fo_split_quadrant(float x, uint32_t *n) {
  double d = (double)fo_abs(x), t = fo_fma64(d, 0.63661977236758138, 6755399441055744.0); /* as in fo_exp2_wide */
  double whole = t - 6755399441055744.0;
  *n = (uint32_t)(fo_bits64(t) & 3u);
  return (float)fo_fma64(whole, -6.1232339957367660e-17, fo_fma64(whole, -1.5707963267948966, d));
}

/* sin(r + n pi/2) for |r| <= pi/4, its sign flipped by the bit in `sign`: own fits, 4e-9 and 1.2e-10. */
FO_INLINE float fo_sin_core(float r, uint32_t n, uint32_t sign) {
  float u = r * r;
  float s = fo_fma(u * r, fo_fma(fo_fma(-0.000195182918f, u, 0.00833218917f), u, -0.166666552f), r);
  float c = fo_fma(fo_fma(2.44323273e-05f, u, -0.00138873095f), u, 0.0416666456f);
  c = fo_fma(u * u, c, fo_fma(-0.5f, u, 1.0f));
  return fo_from_bits(fo_bits(fo_pick((n & 1u) != 0u, c, s)) ^ ((n & 2u) << 30) ^ sign);
}

/* 1.58 ulp for |x| < 2^50, NaN beyond (there one ulp of x is more than 10^7 periods). */
FO_INLINE float fo_sin(float x) {
  uint32_t n;
  float r = fo_split_quadrant(x, &n), y = fo_sin_core(r, n, fo_bits(x) & 0x80000000u);
  return fo_pick(fo_abs(x) < 0x1p50f, y, FO_NAN);
}

/* 1.57 ulp for |x| < 2^50, NaN beyond. */
FO_INLINE float fo_cos(float x) {
  uint32_t n;
  float r = fo_split_quadrant(x, &n), y = fo_sin_core(r, n + 1u, 0u);
  return fo_pick(fo_abs(x) < 0x1p50f, y, FO_NAN);
}

/* z + z^3 A(z^2) with z = |x| or 1 / |x|, own fit 2.7e-9: 1.34 ulp. */
FO_INLINE float fo_atan(float x) {
  float a = fo_abs(x), z = fo_pick(a > 1.0f, 1.0f, a) / fo_pick(a > 1.0f, a, 1.0f), u = z * z;
  float p = fo_fma(fo_fma(-0.00178276841f, u, 0.0108685475f), u, -0.0310968552f);
  p = fo_fma(fo_fma(p, u, 0.0578813367f), u, -0.0839930549f);
  p = fo_fma(fo_fma(p, u, 0.109508805f), u, -0.142640159f);
  p = fo_fma(fo_fma(p, u, 0.199985296f), u, -0.333332986f);
  float y = fo_fma(p, u * z, z);
  return fo_copysign(fo_pick(a > 1.0f, 1.57079637f - (y + 4.37113883e-8f), y), x);
}

/* ---- Remainders, exact for every pair of float32. ---- */

/* x - n y in double with |result| <= 0.52 |y|. A step is exact and takes 52 bits off the quotient of up to 277. */
FO_INLINE double fo_nearest_remainder(double x, double y) {
  double inverse = 1.0 / y;
  x = fo_fma64(-__builtin_rint(x * inverse), y, x);
  x = fo_fma64(-__builtin_rint(x * inverse), y, x);
  x = fo_fma64(-__builtin_rint(x * inverse), y, x);
  x = fo_fma64(-__builtin_rint(x * inverse), y, x);
  x = fo_fma64(-__builtin_rint(x * inverse), y, x);
  return fo_fma64(-__builtin_rint(x * inverse), y, x);
}

/* x - trunc(x / y) y with the sign of x, exact; as C's fmodf. */
FO_INLINE float fo_fmod(float x, float y) {
  float a = fo_abs(x), size = fo_abs(y);
  double r = fo_nearest_remainder((double)a, (double)size);
  float z = fo_copysign((float)fo_pick64(r < 0.0, r + (double)size, r), x);
  return fo_pick((size == FO_INF) & (a < FO_INF), x, z);
}

/* x - floor(x / y) y with the sign of y, from the exact fmod in one rounding; as torch.remainder. */
FO_INLINE float fo_remainder(float x, float y) {
  float z = fo_fmod(x, y);
  return fo_pick((z != 0.0f) & ((z < 0.0f) != (y < 0.0f)), z + y, z);
}

#endif
