/* Times of single events of a model in C, and how fast a buffer of its weights' size is read. Compiled for the machine that measures. */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef void (*step_function)(const void *weights, void *state, void *work, const void *const *in, void *const *out);
/* Eight registers of 64 bytes each: enough loads under way that their latency does not count. */
typedef uint64_t block __attribute__((vector_size(64)));

static inline int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Nanoseconds between readings of the clock that follow each other at once. */
void flatout_measure_clock(int64_t *times_ns, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const int64_t start = now_ns();
    times_ns[i] = now_ns() - start;
  }
}

/* n events, each timed; in[i] holds `num_events` of them, which are taken in turn. `at` has room for `num_inputs` pointers. */
void flatout_measure_events(step_function step, const void *weights, void *state, void *work, const void *const *in, const uint64_t *bytes,
                            int64_t num_inputs, const void **at, void *const *out, int64_t num_events, int64_t *times_ns, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    for (int64_t k = 0; k < num_inputs; k++) at[k] = (const char *)in[k] + (uint64_t)(i % num_events) * bytes[k];
    const int64_t start = now_ns();
    step(weights, state, work, at, out);
    times_ns[i] = now_ns() - start;
  }
}

/* Nanoseconds of `passes` readings of the whole buffer: a multiple of 512 bytes, at a multiple of 64. */
int64_t flatout_measure_read(const void *buffer, uint64_t bytes, int64_t passes, uint64_t *sum) {
  const block *const data = buffer;
  const uint64_t num = bytes / sizeof(block);
  block sums[8];
  memset(sums, 0, sizeof sums);
  const int64_t start = now_ns();
  for (int64_t pass = 0; pass < passes; pass++) {
    for (uint64_t i = 0; i < num; i += 8)
      for (int k = 0; k < 8; k++) sums[k] += data[i + k];
    __asm__ volatile("" ::: "memory"); /* the next pass reads anew */
  }
  const int64_t elapsed = now_ns() - start;
  for (int k = 1; k < 8; k++) sums[0] += sums[k];
  *sum = sums[0][0];
  return elapsed;
}
