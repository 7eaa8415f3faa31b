/* Products in 8 bits: a row of numbers is rounded to steps of its largest / 127, weights to steps of each column's. Sums of
 * whole numbers are exact, so that their order is free, and every set of instructions gives the same bits. */

#if defined(__AVX512VNNI__)
typedef struct { __m512i v; } i16;
typedef struct { __m512i v; } b64;
/* x = step * (q + fine / 254) for 4 * quads numbers, each 128 more than it is, 128 behind the k-th; returns the step. Two terms,
 * as a product in 8 bits waits for its weights, which both share, and one term loses more than the weights do. A row that
 * holds NaN or infinity gives NaN everywhere, by its step. q and fine have room for whole vectors. */
static FO_HOT float fo_quantise(uint8_t *q, uint8_t *fine, const float *x, long k, long quads) {
  __m512 top = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  (void)quads;
  for (long i = 0; i < k; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps((__mmask16)(k - i < 16 ? (1u << (k - i)) - 1 : 0xffffu), x + i);
    top = _mm512_max_ps(_mm512_abs_ps(v), top);
    odd = _mm512_fmadd_ps(v, _mm512_setzero_ps(), odd); /* 0, or NaN where a number is not finite */
  }
  const float most = _mm512_reduce_max_ps(top), step = most / 127.0f, by = 127.0f / (most > 1e-30f ? most : 1e-30f);
  for (long i = 0; i < k; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps((__mmask16)(k - i < 16 ? (1u << (k - i)) - 1 : 0xffffu), x + i);
    const __m512 wide = _mm512_mul_ps(v, _mm512_set1_ps(by)), low = _mm512_max_ps(wide, _mm512_set1_ps(-127.0f));
    const __m512 held = _mm512_min_ps(low, _mm512_set1_ps(127.0f));
    const __m512i n = _mm512_cvtps_epi32(held), shift = _mm512_set1_epi32(128);
    const __m512 rest = _mm512_mul_ps(_mm512_sub_ps(held, _mm512_cvtepi32_ps(n)), _mm512_set1_ps(254.0f));
    _mm_storeu_si128((__m128i *)(void *)(q + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(n, shift)));
    _mm_storeu_si128((__m128i *)(void *)(fine + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(_mm512_cvtps_epi32(rest), shift)));
  }
  return step + _mm512_reduce_add_ps(odd);
}
static FO_HOT i16 i16_load(const int32_t *p) { return (i16){_mm512_loadu_si512((const void *)p)}; }
static FO_HOT b64 b64_load(const int8_t *p) { return (b64){_mm512_loadu_si512((const void *)p)}; }
static FO_HOT i16 i16_dot(i16 s, const uint8_t *four, b64 w) {
  int32_t x;
  memcpy(&x, four, 4);
  /* as text, since gcc 12 copies the sum to and fro around the intrinsic */
  __asm__("vpdpbusd %2, %1, %0" : "+v"(s.v) : "v"(_mm512_set1_epi32(x)), "v"(w.v));
  return s;
}
static FO_HOT void i16_out(float *y, i16 s, i16 fine, float step, const float *scale, const float *bias) {
  const __m512 n = _mm512_fmadd_ps(_mm512_cvtepi32_ps(fine.v), _mm512_set1_ps(1.0f / 254.0f), _mm512_cvtepi32_ps(s.v));
  const __m512 by = _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale));
  _mm512_storeu_ps(y, _mm512_fmadd_ps(n, by, bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps()));
}
#else
typedef struct { int32_t v[16]; } i16;
typedef const int8_t *b64;
/* x = step * (q + fine / 254) for 4 * quads numbers, each 128 more than it is, 128 behind the k-th; returns the step. Two terms,
 * as a product in 8 bits waits for its weights, which both share, and one term loses more than the weights do. A row that
 * holds NaN or infinity gives NaN everywhere, by its step. q and fine have room for whole vectors. */
static FO_HOT float fo_quantise(uint8_t *q, uint8_t *fine, const float *x, long k, long quads) {
  float top = 0.0f, odd = 0.0f; /* 0, or NaN where a number is not finite */
  for (long i = 0; i < k; i++) {
    const float a = fo_abs(x[i]);
    top = fo_pick(a > top, a, top);
    odd += x[i] * 0.0f;
  }
  const float step = top / 127.0f, by = 127.0f / fo_pick(top > 1e-30f, top, 1e-30f);
  FO_EACH for (long i = 0; i < k; i++) {
    const float v = x[i] * by, held = fo_pick(v > -127.0f, fo_pick(v < 127.0f, v, 127.0f), -127.0f);
    const float n = (held + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: to the nearest whole number */
    q[i] = (uint8_t)((int32_t)n + 128);
    fine[i] = (uint8_t)((int32_t)(((held - n) * 254.0f + 12582912.0f) - 12582912.0f) + 128);
  }
  for (long i = k; i < 4 * quads; i++) q[i] = fine[i] = 128;
  return step + odd;
}
static FO_HOT i16 i16_load(const int32_t *p) { i16 r; memcpy(&r, p, sizeof r); return r; }
static FO_HOT b64 b64_load(const int8_t *p) { return p; }
static FO_HOT i16 i16_dot(i16 s, const uint8_t *four, b64 w) {
  for (int l = 0; l < 16; l++)
    s.v[l] += four[0] * w[4 * l] + four[1] * w[4 * l + 1] + four[2] * w[4 * l + 2] + four[3] * w[4 * l + 3];
  return s;
}
static FO_HOT void i16_out(float *y, i16 s, i16 fine, float step, const float *scale, const float *bias) {
  for (int l = 0; l < 16; l++) {
    const float n = __builtin_fmaf((float)fine.v[l], 1.0f / 254.0f, (float)s.v[l]);
    y[l] = __builtin_fmaf(n, step * scale[l], bias ? bias[l] : 0.0f);
  }
}
#endif
