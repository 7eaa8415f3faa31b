/* Products in 8 bits: weights are whole numbers of 8 bits with a step for each column, a row is rounded to whole numbers n of
 * 16 bits, x = step * n, |n| <= 32512 = 127 * 256. A product of one row waits for its weights, and 8 bits of the row would lose
 * more than the weights do. Sums of whole numbers are exact, so that their order is free, and every set of instructions gives the
 * same bits: FO_DEEP = 512 inputs fit in 32 bits (32512 * 127 * 512 < 2^31), and deeper products are added up as floats, stretch by
 * stretch. Weights lie in blocks of 16 columns, for each four inputs 16 x 4 numbers. */

#define FO_FINEST 32512.0f

#if defined(__AVX512VNNI__)
/* n = 256 * q + fine, each 128 more than it is, as the unsigned side of vpdpbusd; the sums begin with what that adds. */
#define FO_INT8_WIDE 1
typedef struct { uint8_t q[FO_MOST_INT8] __attribute__((aligned(64))), fine[FO_MOST_INT8] __attribute__((aligned(64))); } fo_row;
typedef struct { __m512i q, fine; } i16, fo_four;
typedef __m512i b64;
/* Rounds k numbers, and zeros up to 4 * quads; returns the step. A row that holds NaN or infinity gives NaN everywhere, by its
 * step. A row has room for whole vectors. */
static FO_HOT float fo_quantise(fo_row *row, const float *x, long k, long quads) {
  __m512 top = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  (void)quads;
  for (long i = 0; i < k; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps((__mmask16)(k - i < 16 ? (1u << (k - i)) - 1 : 0xffffu), x + i);
    top = _mm512_max_ps(_mm512_abs_ps(v), top);
    odd = _mm512_fmadd_ps(v, _mm512_setzero_ps(), odd); /* 0, or NaN where a number is not finite */
  }
  const float most = _mm512_reduce_max_ps(top), by = FO_FINEST / (most > 1e-30f ? most : 1e-30f);
  for (long i = 0; i < k; i += 16) {
    const __m512 v = _mm512_maskz_loadu_ps((__mmask16)(k - i < 16 ? (1u << (k - i)) - 1 : 0xffffu), x + i);
    const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(by)));
    const __m512i shifted = _mm512_add_epi32(n, _mm512_set1_epi32(128 * 256 + 128));
    _mm_storeu_si128((__m128i *)(void *)(row->q + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(shifted, 8)));
    _mm_storeu_si128((__m128i *)(void *)(row->fine + i), _mm512_cvtepi32_epi8(shifted));
  }
  return most / FO_FINEST + _mm512_reduce_add_ps(odd);
}
static FO_HOT i16 i16_start(const int32_t *sums) {
  const __m512i s = _mm512_loadu_si512((const void *)sums);
  return (i16){s, s};
}
static FO_HOT b64 b64_load(const int8_t *p) { return _mm512_loadu_si512((const void *)p); }
static FO_HOT fo_four fo_four_load(const fo_row *row, long i) {
  int32_t q, fine;
  memcpy(&q, row->q + 4 * i, 4);
  memcpy(&fine, row->fine + 4 * i, 4);
  return (fo_four){_mm512_set1_epi32(q), _mm512_set1_epi32(fine)};
}
static FO_HOT i16 i16_dot(i16 s, fo_four x, b64 w) {
  /* as text, since gcc 12 copies the sum to and fro around the intrinsic */
  __asm__("vpdpbusd %2, %1, %0" : "+v"(s.q) : "v"(x.q), "v"(w));
  __asm__("vpdpbusd %2, %1, %0" : "+v"(s.fine) : "v"(x.fine), "v"(w));
  return s;
}
static FO_HOT void i16_out(float *y, i16 s, float step, const float *scale, const float *bias) {
  const __m512 n = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(s.q, 8), s.fine));
  const __m512 by = _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale));
  _mm512_storeu_ps(y, _mm512_fmadd_ps(n, by, bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps()));
}
#else
typedef struct { int16_t n[FO_MOST_INT8] __attribute__((aligned(64))); } fo_row;
typedef const int8_t *b64;
static FO_HOT b64 b64_load(const int8_t *p) { return p; }
#if defined(__AVX2__) && defined(__FMA__)
/* In 16 bits, since vpmaddubsw cuts sums of two products off at 32767, and one vpmaddwd does for both halves of n. */
typedef struct { __m256i v[4]; } i16; /* each of four columns, two sums a column */
typedef __m256i fo_four;
static FO_HOT __m256i fo_part_mask(long left) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(left < 8 ? (int)left : 8), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/* Rounds as above. */
static FO_HOT float fo_quantise(fo_row *row, const float *x, long k, long quads) {
  __m256 top = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  (void)quads;
  for (long i = 0; i < k; i += 8) {
    const __m256 v = _mm256_maskload_ps(x + i, fo_part_mask(k - i));
    top = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), top);
    odd = _mm256_fmadd_ps(v, _mm256_setzero_ps(), odd);
  }
  float tops[8], most = 0.0f, none = 0.0f, odds[8];
  _mm256_storeu_ps(tops, top);
  _mm256_storeu_ps(odds, odd);
  for (int l = 0; l < 8; l++) {
    most = fo_pick(tops[l] > most, tops[l], most);
    none += odds[l];
  }
  const __m256 by = _mm256_set1_ps(FO_FINEST / fo_pick(most > 1e-30f, most, 1e-30f));
  for (long i = 0; i < k; i += 8) {
    const __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_maskload_ps(x + i, fo_part_mask(k - i)), by));
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(n, n), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)(row->n + i), _mm256_castsi256_si128(pairs));
  }
  return most / FO_FINEST + none;
}
static FO_HOT i16 i16_start(const int32_t *sums) {
  const __m256i z = _mm256_setzero_si256();
  (void)sums;
  return (i16){{z, z, z, z}};
}
static FO_HOT fo_four fo_four_load(const fo_row *row, long i) {
  long long x;
  memcpy(&x, row->n + 4 * i, 8);
  return _mm256_set1_epi64x(x);
}
static FO_HOT i16 i16_dot(i16 s, fo_four x, b64 w) {
  for (int i = 0; i < 4; i++) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(w + 16 * i)));
    s.v[i] = _mm256_add_epi32(s.v[i], _mm256_madd_epi16(x, wide));
  }
  return s;
}
static FO_HOT void i16_out(float *y, i16 s, float step, const float *scale, const float *bias) {
  for (int i = 0; i < 2; i++) {
    const __m256i sums = _mm256_permute4x64_epi64(_mm256_hadd_epi32(s.v[2 * i], s.v[2 * i + 1]), 0xd8);
    const __m256 by = _mm256_mul_ps(_mm256_set1_ps(step), _mm256_loadu_ps(scale + 8 * i));
    const __m256 start = bias ? _mm256_loadu_ps(bias + 8 * i) : _mm256_setzero_ps();
    _mm256_storeu_ps(y + 8 * i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), by, start));
  }
}
#else
typedef struct { int32_t v[16]; } i16;
typedef const int16_t *fo_four;
/* Rounds as above. */
static FO_HOT float fo_quantise(fo_row *row, const float *x, long k, long quads) {
  float top = 0.0f, odd = 0.0f;
  for (long i = 0; i < k; i++) {
    const float a = fo_abs(x[i]);
    top = fo_pick(a > top, a, top);
    odd += x[i] * 0.0f;
  }
  const float by = FO_FINEST / fo_pick(top > 1e-30f, top, 1e-30f);
  FO_EACH for (long i = 0; i < k; i++) {
    const float v = x[i] * by, held = fo_pick(v > -FO_FINEST, fo_pick(v < FO_FINEST, v, FO_FINEST), -FO_FINEST);
    row->n[i] = (int16_t)(int32_t)((held + 12582912.0f) - 12582912.0f); /* 1.5 * 2^23: to the nearest whole number */
  }
  for (long i = k; i < 4 * quads; i++) row->n[i] = 0;
  return top / FO_FINEST + odd;
}
static FO_HOT i16 i16_start(const int32_t *sums) { (void)sums; return (i16){{0}}; }
static FO_HOT fo_four fo_four_load(const fo_row *row, long i) { return row->n + 4 * i; }
static FO_HOT i16 i16_dot(i16 s, fo_four x, b64 w) {
  for (int l = 0; l < 16; l++)
    s.v[l] += x[0] * w[4 * l] + x[1] * w[4 * l + 1] + x[2] * w[4 * l + 2] + x[3] * w[4 * l + 3];
  return s;
}
static FO_HOT void i16_out(float *y, i16 s, float step, const float *scale, const float *bias) {
  for (int l = 0; l < 16; l++) y[l] = __builtin_fmaf((float)s.v[l], step * scale[l], bias ? bias[l] : 0.0f);
}
#endif
#endif
