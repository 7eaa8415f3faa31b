/* Products in 8 bits: a row of numbers is rounded to steps of its largest / 127, weights to steps of each column's. Sums of
 * whole numbers are exact, so that their order is free, and every set of instructions gives the same bits. */

/* x = step * (q + fine / 254) for 4 * quads numbers, each 128 more than it is, 128 behind the k-th; returns the step. Two terms,
 * as a product in 8 bits waits for its weights, which both share, and one term loses more than the weights do. A row that
 * holds NaN or infinity gives NaN everywhere, by its step (and so does one whose sum is too large for float32). */
static FO_HOT float fo_quantise(uint8_t *q, uint8_t *fine, const float *x, long k, long quads) {
  float lane[16], top = 0.0f;
  for (int l = 0; l < 16; l++) lane[l] = 0.0f;
  const long whole = k / 16 * 16;
  for (long i = 0; i < whole; i += 16)
    for (int l = 0; l < 16; l++) {
      const float a = fo_abs(x[i + l]);
      lane[l] = a > lane[l] ? a : lane[l];
    }
  for (long i = whole; i < k; i++) {
    const float a = fo_abs(x[i]);
    lane[i - whole] = a > lane[i - whole] ? a : lane[i - whole];
  }
  for (int l = 0; l < 16; l++) top = lane[l] > top ? lane[l] : top;
  const float step = top / 127.0f, by = 127.0f / (top > 1e-30f ? top : 1e-30f);
  const float odd = fo_row_sum(x, k) * 0.0f; /* 0, or NaN where a number is not finite */
  FO_EACH for (long i = 0; i < k; i++) {
    const float v = x[i] * by, held = v > -127.0f ? (v < 127.0f ? v : 127.0f) : -127.0f;
    const float n = (held + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: to the nearest whole number */
    q[i] = (uint8_t)((int32_t)n + 128);
    fine[i] = (uint8_t)((int32_t)(((held - n) * 254.0f + 12582912.0f) - 12582912.0f) + 128);
  }
  for (long i = k; i < 4 * quads; i++) q[i] = fine[i] = 128;
  return step + odd;
}

#if defined(__AVX512VNNI__)
typedef struct { __m512i v; } i16;
typedef struct { __m512i v; } b64;
static FO_HOT i16 i16_load(const int32_t *p) { return (i16){_mm512_loadu_si512((const void *)p)}; }
static FO_HOT b64 b64_load(const int8_t *p) { return (b64){_mm512_loadu_si512((const void *)p)}; }
static FO_HOT i16 i16_dot(i16 s, const uint8_t *four, b64 w) {
  int32_t x;
  memcpy(&x, four, 4);
  return (i16){_mm512_dpbusd_epi32(s.v, _mm512_set1_epi32(x), w.v)};
}
static FO_HOT void i16_out(float *y, i16 s, i16 fine, float step, const float *scale, const float *bias) {
  const __m512 n = _mm512_fmadd_ps(_mm512_cvtepi32_ps(fine.v), _mm512_set1_ps(1.0f / 254.0f), _mm512_cvtepi32_ps(s.v));
  const __m512 by = _mm512_mul_ps(_mm512_set1_ps(step), _mm512_loadu_ps(scale));
  _mm512_storeu_ps(y, _mm512_fmadd_ps(n, by, bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps()));
}
#else
typedef struct { int32_t v[16]; } i16;
typedef const int8_t *b64;
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

/* y (rows, 16 blocks) = bias + x (rows, k) times w: blocks of 16 columns, 4 rows of them interleaved. */
static FO_HOT void fo_product_int8(long rows, const float *x, long ldx, const int8_t *w, long blocks, long k,
                                   const float *scale, const int32_t *sums, const float *bias, float *y, long ldy) {
  const long quads = (k + 3) / 4;
  uint8_t q[FO_MOST_INT8] __attribute__((aligned(64))), fine[FO_MOST_INT8] __attribute__((aligned(64)));
  for (long r = 0; r < rows; r++) {
    const float step = fo_quantise(q, fine, x + r * ldx, k, quads);
    const long c4 = blocks / 4 * 4;
    for (long c = 0; c < c4; c += 4) {
      const int8_t *const a = w + c * quads * 64;
      i16 s0 = i16_load(sums + 16 * c), s1 = i16_load(sums + 16 * c + 16), t0 = s0, t1 = s1;
      i16 s2 = i16_load(sums + 16 * c + 32), s3 = i16_load(sums + 16 * c + 48), t2 = s2, t3 = s3;
      for (long i = 0; i < quads; i++) {
        const b64 w0 = b64_load(a + i * 64), w1 = b64_load(a + (quads + i) * 64);
        const b64 w2 = b64_load(a + (2 * quads + i) * 64), w3 = b64_load(a + (3 * quads + i) * 64);
        s0 = i16_dot(s0, q + 4 * i, w0), t0 = i16_dot(t0, fine + 4 * i, w0);
        s1 = i16_dot(s1, q + 4 * i, w1), t1 = i16_dot(t1, fine + 4 * i, w1);
        s2 = i16_dot(s2, q + 4 * i, w2), t2 = i16_dot(t2, fine + 4 * i, w2);
        s3 = i16_dot(s3, q + 4 * i, w3), t3 = i16_dot(t3, fine + 4 * i, w3);
      }
      float *const to = y + r * ldy + 16 * c;
      i16_out(to, s0, t0, step, scale + 16 * c, bias ? bias + 16 * c : 0);
      i16_out(to + 16, s1, t1, step, scale + 16 * c + 16, bias ? bias + 16 * c + 16 : 0);
      i16_out(to + 32, s2, t2, step, scale + 16 * c + 32, bias ? bias + 16 * c + 32 : 0);
      i16_out(to + 48, s3, t3, step, scale + 16 * c + 48, bias ? bias + 16 * c + 48 : 0);
    }
    for (long c = c4; c < blocks; c++) {
      i16 s = i16_load(sums + 16 * c), t = s;
      for (long i = 0; i < quads; i++) {
        const b64 one = b64_load(w + (c * quads + i) * 64);
        s = i16_dot(s, q + 4 * i, one), t = i16_dot(t, fine + 4 * i, one);
      }
      i16_out(y + r * ldy + 16 * c, s, t, step, scale + 16 * c, bias ? bias + 16 * c : 0);
    }
  }
}
