/* Models written by hand with the interface of generated ones. The weights' block holds 16 floats.
 *
 * average  y = W x + h; h' = (h + y) / 4. W is 2 by 3. step_many takes a nap between events where the first weight is 1000.
 * pair     (PAIR is defined) a float[3], k int64, on bool -> s = a * w[0] * k, or 0 where it is not on; c int32[2] = {k, events}.
 */
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef struct flatout_native {
  uint32_t abi;
  uint32_t num_inputs, num_outputs, reserved;
  const char *isa;
  const uint64_t *input_bytes, *output_bytes;
  uint64_t weights_bytes, state_bytes, work_bytes, streams_work_bytes, snapshot_bytes;
  void (*reset)(void *state);
  void (*step)(const void *weights, void *state, void *work, const void *const *in, void *const *out);
  void (*step_many)(const void *weights, void *state, void *work, const void *const *in, void *const *out, int64_t n);
  void (*step_streams)(const void *weights, void *states, void *work, const void *const *in, void *const *out, int64_t n);
  void (*snapshot)(const void *state, void *plain);
  void (*restore)(void *state, const void *plain);
} flatout_native;

#ifndef FLATOUT_DISPATCH
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
#ifndef FLATOUT_ISA
#define FLATOUT_ISA plain
#endif
#define TABLE JOIN(flatout_table, FLATOUT_ISA)

static void reset(void *state) { memset(state, 0, 64); }

#ifdef PAIR
enum { INS = 3, OUTS = 2 };
static const uint64_t in_bytes[] = {12, 8, 1}, out_bytes[] = {12, 8};

static void event(const float *w, void *state, const void *const *in, void *const *out) {
  float a[3], s[3];
  int64_t k, *events = state;
  int32_t c[2];
  memcpy(a, in[0], sizeof a);
  memcpy(&k, in[1], sizeof k);
  for (int i = 0; i < 3; i++) s[i] = *(const char *)in[2] ? a[i] * w[0] * (float)k : 0;
  c[0] = (int32_t)k;
  c[1] = (int32_t)++*events;
  memcpy(out[0], s, sizeof s);
  memcpy(out[1], c, sizeof c);
}
#else
enum { INS = 1, OUTS = 1 };
static const uint64_t in_bytes[] = {12}, out_bytes[] = {8};

static void event(const float *w, void *state, const void *const *in, void *const *out) {
  float x[3], y[2], *h = state;
  memcpy(x, in[0], sizeof x);
  for (int i = 0; i < 2; i++) {
    y[i] = w[3 * i] * x[0] + w[3 * i + 1] * x[1] + w[3 * i + 2] * x[2] + h[i];
    h[i] = 0.25f * (h[i] + y[i]);
  }
  memcpy(out[0], y, sizeof y);
}
#endif

static void event_at(const void *weights, void *state, const void *const *in, void *const *out, int64_t t) {
  const void *x[INS];
  void *y[OUTS];
  for (int i = 0; i < INS; i++) x[i] = (const char *)in[i] + t * (int64_t)in_bytes[i];
  for (int i = 0; i < OUTS; i++) y[i] = (char *)out[i] + t * (int64_t)out_bytes[i];
  event(weights, state, x, y);
}

static void step(const void *weights, void *state, void *work, const void *const *in, void *const *out) {
  (void)work;
  event(weights, state, in, out);
}

static void step_many(const void *weights, void *state, void *work, const void *const *in, void *const *out, int64_t n) {
  (void)work;
  for (int64_t t = 0; t < n; t++) {
    if (*(const float *)weights == 1000.0f) usleep(1000);
    event_at(weights, state, in, out, t);
  }
}

static void step_streams(const void *weights, void *states, void *work, const void *const *in, void *const *out, int64_t n) {
  (void)work;
  for (int64_t i = 0; i < n; i++) event_at(weights, (char *)states + 64 * i, in, out, i);
}

static void snapshot(const void *state, void *plain) { memcpy(plain, state, 8); }
static void restore(void *state, const void *plain) { memcpy(state, plain, 8); }

const flatout_native TABLE = {1,      INS,     OUTS,   0,     TEXT(FLATOUT_ISA), in_bytes, out_bytes,    64,       64,
                              0,      0,       8,      reset, step,              step_many, step_streams, snapshot, restore};
#endif

#ifndef FLATOUT_PART
#ifdef FLATOUT_DISPATCH
extern const flatout_native flatout_table_plain, flatout_table_avx2, flatout_table_avx512, flatout_table_avx512vnni, flatout_table_neon;
#endif
__attribute__((visibility("default"))) const flatout_native *flatout_native_model(void) {
#ifdef FLATOUT_HAS_AVX512VNNI
  if (__builtin_cpu_supports("avx512vnni")) return &flatout_table_avx512vnni;
#endif
#ifdef FLATOUT_HAS_AVX512
  if (__builtin_cpu_supports("avx512vl")) return &flatout_table_avx512;
#endif
#ifdef FLATOUT_HAS_AVX2
  if (__builtin_cpu_supports("avx2")) return &flatout_table_avx2;
#endif
#ifdef FLATOUT_HAS_NEON
  return &flatout_table_neon;
#endif
#ifdef FLATOUT_DISPATCH
  return &flatout_table_plain;
#else
  return &TABLE;
#endif
}
#endif
