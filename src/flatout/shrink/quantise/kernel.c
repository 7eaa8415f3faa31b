/* Products with weights of 8 or 4 bits, activations rounded to 8 bits as they come, sums in whole numbers.
 *
 * Weights lie in blocks of 16 outputs: for each four inputs, 16 outputs x 4 inputs, one byte each, 128 more than they are (4 bits:
 * 8 more; a byte holds a number of one four of inputs in its low half, and of the next four in its high half). So the weights
 * are the unsigned and the activations the signed side of AVX-512 VNNI's vpdpbusd, and what the shift adds is a multiple of a
 * row's sum. Sums of whole numbers are exact: their order is free and threads do not change a bit.
 *
 * An activation is one or two lines of int8: x = step * (q + fine / 254). A product with one row waits for its weights, which
 * both lines share, so that the second is nearly free and leaves the weights' rounding as the only one that is seen.
 *
 * No -fopenmp at the link: torch's own OpenMP is in the process already, and a second would bring threads of its own. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HOT static inline __attribute__((always_inline))
#define PUBLIC __attribute__((visibility("default")))
enum { LANES = 16, CHUNK = 64 };

/* Rows as the products take them. */
typedef struct {
  long lines, terms, k, quads; /* lines = rows * terms; quads = inputs / 4, rounded up (4 bits: to whole groups) */
  int8_t *q;                   /* [lines][4 * quads] */
  int32_t *sums;               /* [lines][groups] */
  float *steps;                /* [rows] */
} rounded;

#if defined(__AVX512VNNI__) && defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
enum { TALL = 4, WIDE = 4 }; /* lines and blocks of a tile: its sums stay in registers */
typedef struct { __m512i v; } sums16;
typedef struct { __m512i v; } bytes64;
HOT sums16 sums16_zero(void) { return (sums16){_mm512_setzero_si512()}; }
HOT bytes64 bytes64_load(const uint8_t *p) { return (bytes64){_mm512_loadu_si512((const void *)p)}; }
HOT bytes64 low4(bytes64 a) { return (bytes64){_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
HOT bytes64 high4(bytes64 a) { return (bytes64){_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
HOT sums16 sums16_dot(sums16 s, bytes64 w, const int8_t *four) {
  int32_t x;
  memcpy(&x, four, 4);
  /* as text, since gcc 12 copies the sum to and fro around the intrinsic */
  __asm__("vpdpbusd %2, %1, %0" : "+v"(s.v) : "v"(w.v), "v"(_mm512_set1_epi32(x)));
  return s;
}
HOT void sums16_store(int32_t *p, sums16 s) { _mm512_storeu_si512((void *)p, s.v); }
#elif defined(__AVX2__)
#include <immintrin.h>
/* In 16 bits, since vpmaddubsw cuts sums of two products off at 32767. */
enum { TALL = 2, WIDE = 2 };
typedef struct { __m256i v[4]; } sums16; /* each of four outputs, two sums an output */
typedef struct { __m256i v[2]; } bytes64;
HOT sums16 sums16_zero(void) {
  const __m256i z = _mm256_setzero_si256();
  return (sums16){{z, z, z, z}};
}
HOT bytes64 bytes64_load(const uint8_t *p) {
  const __m256i *at = (const __m256i *)(const void *)p;
  return (bytes64){{_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)}};
}
HOT __m256i low_half(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
HOT bytes64 low4(bytes64 a) { return (bytes64){{low_half(a.v[0]), low_half(a.v[1])}}; }
HOT bytes64 high4(bytes64 a) {
  return (bytes64){{low_half(_mm256_srli_epi16(a.v[0], 4)), low_half(_mm256_srli_epi16(a.v[1], 4))}};
}
HOT sums16 sums16_dot(sums16 s, bytes64 w, const int8_t *four) {
  int32_t x;
  memcpy(&x, four, 4);
  const __m256i a = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(x)));
  for (int i = 0; i < 4; i++) {
    const __m128i part = i % 2 ? _mm256_extracti128_si256(w.v[i / 2], 1) : _mm256_castsi256_si128(w.v[i / 2]);
    s.v[i] = _mm256_add_epi32(s.v[i], _mm256_madd_epi16(_mm256_cvtepu8_epi16(part), a));
  }
  return s;
}
HOT void sums16_store(int32_t *p, sums16 s) {
  for (int i = 0; i < 4; i += 2) {
    const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(s.v[i], s.v[i + 1]), 0xd8);
    _mm256_storeu_si256((__m256i *)(void *)(p + 4 * i), both);
  }
}
#else
enum { TALL = 2, WIDE = 2 };
typedef struct { int32_t v[LANES]; } sums16;
typedef struct { uint8_t v[64]; } bytes64;
HOT sums16 sums16_zero(void) { return (sums16){{0}}; }
HOT bytes64 bytes64_load(const uint8_t *p) { bytes64 r; memcpy(&r, p, sizeof r); return r; }
HOT bytes64 low4(bytes64 a) { for (int i = 0; i < 64; i++) a.v[i] &= 15; return a; }
HOT bytes64 high4(bytes64 a) { for (int i = 0; i < 64; i++) a.v[i] >>= 4; return a; }
HOT sums16 sums16_dot(sums16 s, bytes64 w, const int8_t *four) {
  for (int l = 0; l < LANES; l++)
    s.v[l] += four[0] * w.v[4 * l] + four[1] * w.v[4 * l + 1] + four[2] * w.v[4 * l + 2] + four[3] * w.v[4 * l + 3];
  return s;
}
HOT void sums16_store(int32_t *p, sums16 s) { memcpy(p, s.v, sizeof s.v); }
#endif

HOT float nearest(float v) { return (v + 12582912.0f) - 12582912.0f; } /* 1.5 * 2^23: whole numbers from here on */
HOT float held(float v, float low, float high) { v = v > low ? v : low; return v < high ? v : high; }

/* One row to int8, in one or two lines. `step` > 0: given, with its zero; else the row's largest / 127. A row that holds NaN or
 * infinity gives NaN everywhere, by its step. */
static float round_row(int8_t *q, int8_t *fine, const float *x, long k, long padded, float step, float zero) {
  float top = 0.0f, odd = 0.0f;
#pragma omp simd reduction(max : top) reduction(+ : odd)
  for (long i = 0; i < k; i++) {
    const float a = x[i] < 0.0f ? -x[i] : x[i];
    top = a > top ? a : top;
    odd += x[i] * 0.0f; /* 0, or NaN where a number is not finite */
  }
  if (!(step > 0.0f)) step = top / 127.0f;
  const float by = 1.0f / (step > 1e-30f ? step : 1e-30f), bottom = fine ? -127.0f : -128.0f;
  if (fine) {
#pragma omp simd
    for (long i = 0; i < k; i++) {
      const float v = held(x[i] * by, bottom, 127.0f), n = nearest(v);
      q[i] = (int8_t)(int32_t)n;
      fine[i] = (int8_t)(int32_t)nearest((v - n) * 254.0f);
    }
    memset(fine + k, 0, (size_t)(padded - k));
  } else {
#pragma omp simd
    for (long i = 0; i < k; i++) q[i] = (int8_t)(int32_t)held(nearest(x[i] * by) + zero, bottom, 127.0f);
  }
  memset(q + k, 0, (size_t)(padded - k));
  return step + odd;
}

static void sum_groups(int32_t *sums, const int8_t *q, long size, long groups) {
  for (long g = 0; g < groups; g++) {
    int32_t sum = 0;
    for (long i = g * size; i < (g + 1) * size; i++) sum += q[i];
    sums[g] = sum;
  }
}

/* ------------------------------------------------------------------------------------------------- 8 bits: lines x blocks */

HOT void tile8(int lines, int blocks, const int8_t *q, long padded, const uint8_t *w, long quads, int32_t *out) {
  sums16 s[TALL * WIDE];
  for (int i = 0; i < lines * blocks; i++) s[i] = sums16_zero();
  for (long j = 0; j < quads; j++) {
    bytes64 b[WIDE];
    for (int c = 0; c < blocks; c++) b[c] = bytes64_load(w + (c * quads + j) * 64);
    for (int l = 0; l < lines; l++)
      for (int c = 0; c < blocks; c++) s[l * blocks + c] = sums16_dot(s[l * blocks + c], b[c], q + l * padded + 4 * j);
  }
  for (int i = 0; i < lines * blocks; i++) sums16_store(out + i * LANES, s[i]);
}

/* 4 bits: each group of `size` inputs has a scale for each output; sums of groups are added as floats, group by group. */
HOT void tile4(int lines, int blocks, const int8_t *q, long padded, const uint8_t *w, long quads, long size, const int32_t *sums,
               const float *scales, float *out) {
  const long groups = 4 * quads / size, bytes = quads / 2 * 64, per = size / 8;
  for (int i = 0; i < lines * blocks * LANES; i++) out[i] = 0.0f;
  for (long g = 0; g < groups; g++) {
    sums16 s[TALL * WIDE];
    for (int i = 0; i < lines * blocks; i++) s[i] = sums16_zero();
    for (long j = g * per; j < (g + 1) * per; j++)
      for (int c = 0; c < blocks; c++) {
        const bytes64 both = bytes64_load(w + c * bytes + j * 64), low = low4(both), high = high4(both);
        for (int l = 0; l < lines; l++) {
          s[l * blocks + c] = sums16_dot(s[l * blocks + c], low, q + l * padded + 8 * j);
          s[l * blocks + c] = sums16_dot(s[l * blocks + c], high, q + l * padded + 8 * j + 4);
        }
      }
    for (int l = 0; l < lines; l++)
      for (int c = 0; c < blocks; c++) {
        int32_t whole[LANES];
        sums16_store(whole, s[l * blocks + c]);
        const float *by = scales + (c * groups + g) * LANES;
        float *y = out + (l * blocks + c) * LANES;
#pragma omp simd
        for (int i = 0; i < LANES; i++) y[i] += by[i] * (float)(whole[i] - 8 * sums[l * groups + g]);
      }
  }
}

/* What a layer's calls share; kernel.py has the same. */
typedef struct {
  const uint8_t *w;
  const float *scales, *bias; /* 8 bits: [blocks][16]; 4 bits: [blocks][groups][16]. bias [blocks][16] */
  long k, n, group, terms;    /* inputs, outputs; group 0: 8 bits; terms: lines of a row */
  float step, zero;           /* step > 0: activations' own, with its zero; else each row's largest / 127 */
} weights;

/* `lines` of one tile against `blocks` blocks from block `c` on; y [rows][n]. */
HOT void finish(int lines, int blocks, const rounded *a, const weights *m, long line, long c, float *y) {
  const long padded = 4 * a->quads, groups = m->group ? padded / m->group : 1;
  const int8_t *q = a->q + line * padded;
  const int32_t *sums = a->sums + line * groups;
  float f[TALL * WIDE * LANES];
  if (m->group) {
    tile4(lines, blocks, q, padded, m->w + c * a->quads / 2 * 64, a->quads, m->group, sums, m->scales + c * groups * LANES, f);
  } else {
    int32_t whole[TALL * WIDE * LANES];
    tile8(lines, blocks, q, padded, m->w + c * a->quads * 64, a->quads, whole);
    for (int l = 0; l < lines; l++)
      for (int b = 0; b < blocks; b++) {
        const long at = (l * blocks + b) * LANES;
        const float *by = m->scales + (c + b) * LANES;
#pragma omp simd
        for (int i = 0; i < LANES; i++) f[at + i] = by[i] * (float)(whole[at + i] - 128 * sums[l]);
      }
  }
  const int terms = (int)a->terms;
  for (int l = 0; l < lines; l += terms)
    for (int b = 0; b < blocks; b++) {
      const float *one = f + (l * blocks + b) * LANES, *two = f + ((l + terms - 1) * blocks + b) * LANES;
      const float step = a->steps[(line + l) / terms], fine = terms == 2 ? 1.0f / 254.0f : 0.0f;
      const float *bias = m->bias + (c + b) * LANES;
      float *to = y + (line + l) / terms * m->n + (c + b) * LANES;
      const long left = m->n - (c + b) * LANES;
      float v[LANES];
#pragma omp simd
      for (int i = 0; i < LANES; i++) v[i] = step * (one[i] + fine * two[i]) + bias[i];
      memcpy(to, v, sizeof(float) * (size_t)(left < LANES ? left : LANES));
    }
}

/* All tiles of lines [from, to) and blocks [c, c + blocks): the weights of these blocks stay in the cache. */
#define TILES(blocks)                                                                   \
  {                                                                                     \
    for (; to - line >= TALL; line += TALL) finish(TALL, blocks, a, m, line, c, y);     \
    for (; to - line >= 2; line += 2) finish(2, blocks, a, m, line, c, y);              \
    for (; to - line >= 1; line += 1) finish(1, blocks, a, m, line, c, y);              \
  }
static void strip(const rounded *a, const weights *m, long line, long to, long c, long blocks, float *y) {
  if (blocks == WIDE) TILES(WIDE) else for (const long end = c + blocks; c < end; c++) {
      const long first = line;
      TILES(1)
      line = first;
    }
}

static void product(const rounded *a, const weights *m, float *y, int threads) {
  const long blocks = (m->n + LANES - 1) / LANES, strips = (blocks + WIDE - 1) / WIDE, chunks = (a->lines + CHUNK - 1) / CHUNK;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (threads > 1)
  for (long chunk = 0; chunk < chunks; chunk++)
    for (long s = 0; s < strips; s++) {
      const long from = chunk * CHUNK, to = from + CHUNK < a->lines ? from + CHUNK : a->lines, c = s * WIDE;
      strip(a, m, from, to, c, blocks - c < WIDE ? blocks - c : WIDE, y);
    }
}

/* ---------------------------------------------------------------------------------------------------------------- the calls */

static size_t room(size_t bytes) { return (bytes + 63) / 64 * 64; }

static long quads_of(long k, long group) { return group ? (k + group - 1) / group * group / 4 : (k + 3) / 4; }

/* Threads that are worth their start, some microseconds, for so many multiply-adds. */
HOT int worth(double products, int threads) { return products > 262144.0 ? threads : 1; }

static int make(rounded *a, const weights *m, const float *x, long rows, int threads) {
  const long quads = quads_of(m->k, m->group), padded = 4 * quads, size = m->group ? m->group : padded, groups = padded / size;
  const long terms = m->terms, k = m->k;
  const size_t lines = (size_t)(rows * terms);
  const size_t q = room(lines * (size_t)padded), sums = room(lines * (size_t)groups * 4), steps = room((size_t)rows * 4);
  char *bytes = aligned_alloc(64, q + sums + steps);
  if (!bytes) return 0;
  *a = (rounded){(long)lines, terms, k, quads, (int8_t *)bytes, (int32_t *)(bytes + q), (float *)(bytes + q + sums)};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * k > 65536)
  for (long r = 0; r < rows; r++) {
    int8_t *coarse = a->q + r * terms * padded, *fine = terms == 2 ? coarse + padded : 0;
    a->steps[r] = round_row(coarse, fine, x + r * k, k, padded, m->step, m->zero);
    for (long t = 0; t < terms; t++) sum_groups(a->sums + (r * terms + t) * groups, coarse + t * padded, size, groups);
  }
  return 1;
}

/* y [rows][n] = x [rows][k] times weights, plus bias. 0 when out of memory. */
PUBLIC int flatout_product(const weights *m, const float *x, long rows, float *y, int threads) {
  rounded a;
  threads = worth((double)rows * (double)m->k * (double)m->n, threads);
  if (!make(&a, m, x, rows, threads)) return 0;
  product(&a, m, y, threads);
  free(a.q);
  return 1;
}

/* -------------------------------------------------------------------------------------------------------- recurrent layers */

/* e^x by the polynomial of Cephes' expf (Moshier, 1992), about 1e-7 of the result. */
HOT float power_of_e(float x) {
  const float v = held(x, -87.0f, 88.0f), n = nearest(v * 1.44269504088896341f);
  const float r = (v - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  union { int32_t i; float f; } two = {.i = ((int32_t)n + 127) * 8388608}; /* 2^n: n in the place of the exponent */
  const float y = (p * r * r + r + 1.0f) * two.f;
  return x != x ? x : y;
}
HOT float sigmoid(float x) { return 1.0f / (1.0f + power_of_e(-x)); }
HOT float tangent(float x) { return 1.0f - 2.0f / (power_of_e(2.0f * x) + 1.0f); }

static void lstm_gates(const float *restrict a, const float *restrict b, float *restrict c, float *restrict h, long n) {
#pragma omp simd
  for (long i = 0; i < n; i++) {
    const float in = sigmoid(a[i] + b[i]), forget = sigmoid(a[n + i] + b[n + i]);
    const float new = tangent(a[2 * n + i] + b[2 * n + i]), out = sigmoid(a[3 * n + i] + b[3 * n + i]);
    const float cell = forget * c[i] + in * new;
    c[i] = cell;
    h[i] = out * tangent(cell);
  }
}

static void gru_gates(const float *restrict a, const float *restrict b, const float *restrict old, float *restrict h, long n) {
#pragma omp simd
  for (long i = 0; i < n; i++) {
    const float reset = sigmoid(a[i] + b[i]), keep = sigmoid(a[n + i] + b[n + i]);
    const float new = tangent(a[2 * n + i] + reset * b[2 * n + i]);
    h[i] = (1.0f - keep) * new + keep * old[i];
  }
}

/* x [steps][batch][k], h and c [batch][n] at the start, y [steps][batch][n], last_h and last_c at the end; c 0: a GRU. `turned`:
 * from the last step to the first. 0 when out of memory. */
PUBLIC int flatout_recurrent(const weights *in, const weights *hidden, const float *x, long steps, long batch, const float *h,
                             const float *c, float *y, float *last_h, float *last_c, int turned, int threads) {
  const long n = hidden->k, gates = hidden->n, row = batch * gates;
  float *all = malloc(sizeof(float) * (size_t)((steps + 1) * row));
  int done = all && flatout_product(in, x, steps * batch, all, threads);
  if (c) memcpy(last_c, c, sizeof(float) * (size_t)(batch * n));
  const float *before = h;
  for (long s = 0; done && s < steps; s++) {
    const long t = turned ? steps - 1 - s : s;
    float *from = all + steps * row, *to = y + t * batch * n;
    done = flatout_product(hidden, before, batch, from, threads);
    for (long b = 0; done && b < batch; b++) {
      const float *ga = all + t * row + b * gates, *gb = from + b * gates;
      if (c) lstm_gates(ga, gb, last_c + b * n, to + b * n, n);
      else gru_gates(ga, gb, before + b * n, to + b * n, n);
    }
    before = to;
  }
  memcpy(last_h, before, sizeof(float) * (size_t)(batch * n));
  free(all);
  return done;
}
