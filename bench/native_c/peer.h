/* Vectors of sixteen numbers for the hand-written peers, in gcc's and clang's vector extension.
   Weights are packed with outputs in the lanes: w[k * blocks + b] holds what input k gives to outputs 16 b .. 16 b + 15. */
#include <stdint.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
#define INLINE static inline __attribute__((always_inline))

INLINE v16 splat(float a) { return (v16){} + a; }
INLINE v16 load(const float *p) { v16 a; memcpy(&a, p, sizeof a); return a; }
INLINE void store(float *p, v16 a) { memcpy(p, &a, sizeof a); }
INLINE v16 pick(i16 where, v16 a, v16 b) { return (v16)((where & (i16)a) | (~where & (i16)b)); }
INLINE v16 relu(v16 a) { return pick(a > 0.0f, a, splat(0)); }
INLINE float total(v16 a) { float s = 0; for (int i = 0; i < 16; i++) s += a[i]; return s; }

/* 2^n p(r) with |r| <= ln(2) / 2; p and the two parts of ln(2) are those of expf in Cephes (Moshier, 1989). */
INLINE v16 exponential(v16 x) {
  x = pick(x < 87.0f, x, splat(87.0f));
  x = pick(x > -87.0f, x, splat(-87.0f));
  const v16 magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number */
  v16 z = x * 1.44269504f + magic, n = z - magic, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  v16 p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * (v16)(((i16)z - (i16)magic + 127) << 23);
}
INLINE v16 sigmoid(v16 x) { return 1.0f / (1.0f + exponential(-x)); }
INLINE v16 tangent(v16 x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

/* x (1 + erf(x / sqrt(2))) / 2; erf after Abramowitz and Stegun 7.1.26, error below 1.5e-7. */
INLINE v16 gelu(v16 x) {
  v16 a = x * 0.70710678f, size = pick(a > 0.0f, a, -a), t = 1.0f / (1.0f + 0.3275911f * size);
  v16 p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  v16 erf = 1.0f - p * t * exponential(-size * size);
  return 0.5f * x * (1.0f + pick(a > 0.0f, erf, -erf));
}

/* y += w x, the sums held in registers: blocks * chains of them, `chains` of inputs side by side where blocks are few. */
INLINE void dense(const float *x, int inputs, const v16 *w, v16 *y, const int blocks, const int chains) {
  v16 sum[16] = {};
  for (int k = 0; k < inputs; k += chains)
#pragma GCC unroll 16
    for (int c = 0; c < chains; c++)
#pragma GCC unroll 16
      for (int b = 0; b < blocks; b++) sum[c * blocks + b] += x[k + c] * w[(k + c) * blocks + b];
#pragma GCC unroll 16
  for (int c = 0; c < chains; c++)
#pragma GCC unroll 16
    for (int b = 0; b < blocks; b++) y[b] += sum[c * blocks + b];
}
