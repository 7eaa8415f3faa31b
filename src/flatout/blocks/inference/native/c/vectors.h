/* Sixteen floats as one value, on any vector unit. Sums have one order on all of them: lane by lane, then halves. */

#define FO_HOT inline __attribute__((always_inline, unused))
#define FO_COLD __attribute__((noinline, unused))

#if defined(__AVX512F__)
#include <immintrin.h>
#define FO_WIDE 1 /* 32 registers of 16 lanes */
typedef struct { __m512 v; } f16;
static FO_HOT f16 f16_zero(void) { return (f16){_mm512_setzero_ps()}; }
static FO_HOT f16 f16_load(const float *p) { return (f16){_mm512_loadu_ps(p)}; }
static FO_HOT void f16_store(float *p, f16 a) { _mm512_storeu_ps(p, a.v); }
static FO_HOT f16 f16_add(f16 a, f16 b) { return (f16){_mm512_add_ps(a.v, b.v)}; }
static FO_HOT f16 f16_sub(f16 a, f16 b) { return (f16){_mm512_sub_ps(a.v, b.v)}; }
static FO_HOT f16 f16_mul(f16 a, f16 b) { return (f16){_mm512_mul_ps(a.v, b.v)}; }
static FO_HOT f16 f16_fma(f16 a, f16 b, f16 c) { return (f16){_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static FO_HOT f16 f16_all(float x) { return (f16){_mm512_set1_ps(x)}; }
static FO_HOT float f16_sum(f16 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define FO_WIDE 0
typedef struct { __m256 v, u; } f16;
static FO_HOT f16 f16_zero(void) { return (f16){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static FO_HOT f16 f16_load(const float *p) { return (f16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static FO_HOT void f16_store(float *p, f16 a) { _mm256_storeu_ps(p, a.v); _mm256_storeu_ps(p + 8, a.u); }
static FO_HOT f16 f16_add(f16 a, f16 b) { return (f16){_mm256_add_ps(a.v, b.v), _mm256_add_ps(a.u, b.u)}; }
static FO_HOT f16 f16_sub(f16 a, f16 b) { return (f16){_mm256_sub_ps(a.v, b.v), _mm256_sub_ps(a.u, b.u)}; }
static FO_HOT f16 f16_mul(f16 a, f16 b) { return (f16){_mm256_mul_ps(a.v, b.v), _mm256_mul_ps(a.u, b.u)}; }
static FO_HOT f16 f16_fma(f16 a, f16 b, f16 c) {
  return (f16){_mm256_fmadd_ps(a.v, b.v, c.v), _mm256_fmadd_ps(a.u, b.u, c.u)};
}
static FO_HOT f16 f16_all(float x) { return (f16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static FO_HOT float f16_sum(f16 a) {
  __m256 h = _mm256_add_ps(a.v, a.u);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
#elif defined(__aarch64__)
#include <arm_neon.h>
#define FO_WIDE 0
typedef struct { float32x4_t v[4]; } f16;
#define FO_4(e) (f16){{({ enum { i = 0 }; e; }), ({ enum { i = 1 }; e; }), ({ enum { i = 2 }; e; }), ({ enum { i = 3 }; e; })}}
static FO_HOT f16 f16_zero(void) { return FO_4((void)i; vdupq_n_f32(0)); }
static FO_HOT f16 f16_all(float x) { return FO_4((void)i; vdupq_n_f32(x)); }
static FO_HOT f16 f16_load(const float *p) { return FO_4(vld1q_f32(p + 4 * i)); }
static FO_HOT void f16_store(float *p, f16 a) { for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]); }
static FO_HOT f16 f16_add(f16 a, f16 b) { return FO_4(vaddq_f32(a.v[i], b.v[i])); }
static FO_HOT f16 f16_sub(f16 a, f16 b) { return FO_4(vsubq_f32(a.v[i], b.v[i])); }
static FO_HOT f16 f16_mul(f16 a, f16 b) { return FO_4(vmulq_f32(a.v[i], b.v[i])); }
static FO_HOT f16 f16_fma(f16 a, f16 b, f16 c) { return FO_4(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
static FO_HOT float f16_sum(f16 a) {
  float32x4_t q = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
#else
#define FO_WIDE 0
#define FO_PLAIN 1 /* no vector unit that is known here: code that is short rather than fast */
typedef struct { float v[16]; } f16;
#define FO_16(e) f16 r; for (int i = 0; i < 16; i++) r.v[i] = (e); return r
static FO_COLD f16 f16_zero(void) { FO_16(0.0f); }
static FO_COLD f16 f16_all(float x) { FO_16(x); }
static FO_COLD f16 f16_load(const float *p) { FO_16(p[i]); }
static FO_COLD void f16_store(float *p, f16 a) { for (int i = 0; i < 16; i++) p[i] = a.v[i]; }
static FO_COLD f16 f16_add(f16 a, f16 b) { FO_16(a.v[i] + b.v[i]); }
static FO_COLD f16 f16_sub(f16 a, f16 b) { FO_16(a.v[i] - b.v[i]); }
static FO_COLD f16 f16_mul(f16 a, f16 b) { FO_16(a.v[i] * b.v[i]); }
static FO_COLD f16 f16_fma(f16 a, f16 b, f16 c) { FO_16(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
static FO_COLD float f16_sum(f16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  return a.v[0];
}
#endif

/* The first n of 16 numbers, and `fill` for the rest. */
static FO_HOT f16 f16_some(const float *p, long n, float fill) {
  float t[16];
  for (long i = 0; i < 16; i++) t[i] = fill;
  memcpy(t, p, sizeof(float) * (size_t)n);
  return f16_load(t);
}

#if defined(__clang__)
#define FO_EACH _Pragma("clang loop vectorize(assume_safety)")
#else
#define FO_EACH _Pragma("GCC ivdep")
#endif

/* Numbers too small to be normal count as 0 inside, as they cost a hundred times the others; what was set before is set again. */
#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned fo_mode;
static FO_HOT fo_mode fo_flush(void) { fo_mode m = _mm_getcsr(); _mm_setcsr(m | 0x8040u); return m; }
static FO_HOT void fo_restore(fo_mode m) { _mm_setcsr(m); }
#elif defined(__aarch64__)
typedef uint64_t fo_mode;
static FO_HOT fo_mode fo_flush(void) {
  fo_mode m;
  __asm__ volatile("mrs %0, fpcr" : "=r"(m));
  __asm__ volatile("msr fpcr, %0" : : "r"(m | (UINT64_C(1) << 24)));
  return m;
}
static FO_HOT void fo_restore(fo_mode m) { __asm__ volatile("msr fpcr, %0" : : "r"(m)); }
#else
typedef int fo_mode;
static FO_HOT fo_mode fo_flush(void) { return 0; }
static FO_HOT void fo_restore(fo_mode m) { (void)m; }
#endif
