/* Rows of numbers: sums, softmax, layer norm. Sums go through 16 lanes, then halves. */

static FO_HOT float fo_row_sum(const float *x, long n) {
  f16 s = f16_zero();
  long i = 0;
  for (; i + 16 <= n; i += 16) s = f16_add(s, f16_load(x + i));
  if (i < n) s = f16_add(s, f16_some(x + i, n - i, 0.0f));
  return f16_sum(s);
}
/* Sum of (x - mean)^2. */
static FO_HOT float fo_row_squares(const float *x, long n, float mean) {
  f16 s = f16_zero(), m = f16_all(mean);
  long i = 0;
  for (; i + 16 <= n; i += 16) {
    f16 d = f16_sub(f16_load(x + i), m);
    s = f16_fma(d, d, s);
  }
  if (i < n) {
    f16 d = f16_sub(f16_some(x + i, n - i, mean), m);
    s = f16_fma(d, d, s);
  }
  return f16_sum(s);
}
static FO_HOT float fo_row_mean(const float *x, long n) { return fo_row_sum(x, n) / (float)n; }
static FO_HOT float fo_row_var(const float *x, long n, float correction) {
  return fo_row_squares(x, n, fo_row_mean(x, n)) / ((float)n - correction);
}
#define FO_ROW(name, type, first, better) \
  static FO_HOT type name(const type *x, long n) { \
    type lane[16]; \
    for (int l = 0; l < 16; l++) lane[l] = first; \
    long i = 0; \
    for (; i + 16 <= n; i += 16) \
      for (int l = 0; l < 16; l++) { type a = lane[l], b = x[i + l]; lane[l] = better; } \
    for (int l = 0; i < n; i++, l++) { type a = lane[l], b = x[i]; lane[l] = better; } \
    for (int h = 8; h; h /= 2) \
      for (int l = 0; l < h; l++) { type a = lane[l], b = lane[l + h]; lane[l] = better; } \
    return lane[0]; \
  }
FO_ROW(fo_row_max, float, -INFINITY, fo_max(a, b))
FO_ROW(fo_row_min, float, INFINITY, fo_min(a, b))
FO_ROW(fo_row_prod, float, 1.0f, a * b)
FO_ROW(fo_row_any, uint8_t, 0, (uint8_t)(a | (b != 0)))
FO_ROW(fo_row_all, uint8_t, 1, (uint8_t)(a & (b != 0)))

/* The first of the largest; the first NaN, where there is one. */
static FO_HOT int64_t fo_row_argmax(const float *x, long n) {
  int64_t at = 0;
  float best = x[0];
  for (long i = 1; i < n; i++) {
    int is_better = (x[i] > best) | ((x[i] != x[i]) & (best == best));
    at = fo_pick_int64(is_better, i, at);
    best = x[at];
  }
  return at;
}
static FO_HOT int64_t fo_row_argmin(const float *x, long n) {
  int64_t at = 0;
  float best = x[0];
  for (long i = 1; i < n; i++) {
    int is_better = (x[i] < best) | ((x[i] != x[i]) & (best == best));
    at = fo_pick_int64(is_better, i, at);
    best = x[at];
  }
  return at;
}
/* `is_safe`: a row of nothing but -infinity gives zeros. */
static FO_HOT void fo_softmax(float *y, const float *x, long n, int is_safe) {
  float top = fo_row_max(x, n);
  float from = fo_pick(is_safe & (top == -INFINITY), 0.0f, top);
  FO_EACH for (long i = 0; i < n; i++) y[i] = fo_exp(x[i] - from);
  float sum = fo_row_sum(y, n), by = 1.0f / (sum + (float)(is_safe & (sum == 0.0f)));
  FO_EACH for (long i = 0; i < n; i++) y[i] *= by;
}
static FO_HOT void fo_log_softmax(float *y, const float *x, long n) {
  float top = fo_row_max(x, n);
  FO_EACH for (long i = 0; i < n; i++) y[i] = fo_exp(x[i] - top);
  float by = top + fo_log(fo_row_sum(y, n));
  FO_EACH for (long i = 0; i < n; i++) y[i] = x[i] - by;
}
/* One function for each choice of weight and bias: compilers warn of pointers that are compared with 0 and then read. */
#define FO_LAYER_NORM(name, made) \
  static FO_HOT void name(float *y, const float *x, long n, float eps, const float *w, const float *b) { \
    float mean = fo_row_mean(x, n), by = 1.0f / __builtin_sqrtf(fo_row_squares(x, n, mean) / (float)n + eps); \
    (void)w, (void)b; \
    FO_EACH for (long i = 0; i < n; i++) y[i] = made; \
  }
FO_LAYER_NORM(fo_layer_norm, (x[i] - mean) * by)
FO_LAYER_NORM(fo_layer_norm_w, (x[i] - mean) * by * w[i])
FO_LAYER_NORM(fo_layer_norm_b, (x[i] - mean) * by + b[i])
FO_LAYER_NORM(fo_layer_norm_wb, __builtin_fmaf((x[i] - mean) * by, w[i], b[i]))
/* y (rows, n) = x (rows, k) times n rows of weights, each `row` apart and padded by zeros to a multiple of 16. */
static FO_HOT void fo_dots(long rows, const float *x, long ldx, const float *w, long row, long n, long k,
                              const float *bias, float *y, long ldy) {
  for (long r = 0; r < rows; r++)
    for (long j = 0; j < n; j++) {
      const float *a = x + r * ldx, *b = w + j * row;
      f16 s = f16_zero(), t = f16_zero();
      long i = 0;
      for (; i + 32 <= k; i += 32) {
        s = f16_fma(f16_load(a + i), f16_load(b + i), s);
        t = f16_fma(f16_load(a + i + 16), f16_load(b + i + 16), t);
      }
      if (i + 16 <= k) { s = f16_fma(f16_load(a + i), f16_load(b + i), s); i += 16; }
      if (i < k) t = f16_fma(f16_some(a + i, k - i, 0.0f), f16_load(b + i), t);
      y[r * ldy + j] = f16_sum(f16_add(s, t)) + (bias ? bias[j] : 0.0f);
    }
}
/* Rows of a table; an index outside of it is held at its end. */
#define FO_GATHER(name, type) \
  static FO_HOT void name(type *y, const type *table, long ld, long count, long n, int64_t index) { \
    index = fo_max_int64(index, 0); \
    index = fo_min_int64(index, count - 1); \
    memcpy(y, table + index * ld, sizeof(type) * (size_t)n); \
  }
FO_GATHER(fo_gather_float32, float)
FO_GATHER(fo_gather_int64, int64_t)
FO_GATHER(fo_gather_int32, int32_t)
FO_GATHER(fo_gather_bool, uint8_t)
