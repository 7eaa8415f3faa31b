/* A model written by hand with the interface of generated ones: y = W x + h; h' = h / 2 + y. W is 2 by 3, h begins as k.
 * The weights' block holds W, then k. step_many takes a nap between events where the first weight is 1000: to be caught at it. */
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

static void step_at(const float *w, float *h, const void *x, void *y) {
  float in[3], out[2];
  memcpy(in, x, sizeof in);
  for (int i = 0; i < 2; i++) {
    out[i] = w[3 * i] * in[0] + w[3 * i + 1] * in[1] + w[3 * i + 2] * in[2] + h[i];
    h[i] = 0.5f * h[i] + out[i];
  }
  memcpy(y, out, sizeof out);
}

static void step(const void *weights, void *state, void *work, const void *const *in, void *const *out) {
  (void)work;
  step_at(weights, state, in[0], out[0]);
}

static void step_many(const void *weights, void *state, void *work, const void *const *in, void *const *out, int64_t n) {
  (void)work;
  for (int64_t t = 0; t < n; t++) {
    if (*(const float *)weights == 1000.0f) usleep(1000);
    step_at(weights, state, (const char *)in[0] + 12 * t, (char *)out[0] + 8 * t);
  }
}

static void step_streams(const void *weights, void *states, void *work, const void *const *in, void *const *out, int64_t n) {
  (void)work;
  for (int64_t i = 0; i < n; i++)
    step_at(weights, (float *)((char *)states + 64 * i), (const char *)in[0] + 12 * i, (char *)out[0] + 8 * i);
}

static void snapshot(const void *state, void *plain) { memcpy(plain, state, 8); }
static void restore(void *state, const void *plain) { memcpy(state, plain, 8); }

static const uint64_t in_bytes[] = {12}, out_bytes[] = {8};
const flatout_native TABLE = {1, 1, 1, 0, TEXT(FLATOUT_ISA), in_bytes, out_bytes, 64, 64, 0, 0, 8,
                              reset, step, step_many, step_streams, snapshot, restore};
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
