/* What the core can do, and how long single events of an engine's library take. Seconds unless a name says else. */
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

typedef int64_t words __attribute__((vector_size(64)));
typedef float v16 __attribute__((vector_size(64)));

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

volatile int64_t kept_word;
volatile float kept_number;

/* Of reading `bytes` (a multiple of 512, at a multiple of 64) `times` over with the widest loads there are. */
double seconds_of_reading(const words *from, int64_t bytes, int64_t times) {
  words seen[8] = {};
  int64_t began = now_ns(), num = bytes / 64;
  for (int64_t t = 0; t < times; t++) {
    for (int64_t i = 0; i < num; i += 8)
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) seen[j] |= from[i + j];
    __asm__ volatile("" ::: "memory"); /* each time again */
  }
  int64_t ended = now_ns();
  for (int j = 1; j < 8; j++) seen[0] |= seen[j];
  kept_word = seen[0][0] ^ seen[0][7];
  return (ended - began) * 1e-9;
}

/* Of `times` * 12 multiply-adds of sixteen numbers (32 operations each), in twelve chains. */
double seconds_of_products(int64_t times) {
  v16 sum[12], by = (v16){} + 0.999f;
  for (int j = 0; j < 12; j++) sum[j] = (v16){} + (kept_number + j); /* chains that start alike would be made one */
  int64_t began = now_ns();
  for (int64_t t = 0; t < times; t++) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) sum[j] = sum[j] * by + by;
  }
  int64_t ended = now_ns();
  for (int j = 1; j < 12; j++) sum[0] += sum[j];
  kept_number = sum[0][0];
  return (ended - began) * 1e-9;
}

typedef void step_of(const void *weights, void *state, void *work, const void *const *in, void *const *out);

/* `links` additions, one waiting for the other, in registers. */
static float links_added(float sum, int64_t links) {
  for (int64_t j = 0; j < links; j++) {
    sum += 1e-30f;
    __asm__ volatile("" : "+x"(sum));
  }
  return sum;
}

/* Nanoseconds of each of `num` calls, and of `links` additions after each: the tail of those is the machine's own. ns[num] gets
   what reading the clock twice alone takes (least of a thousand). */
void times_of_events(step_of *step, const void *weights, void *state, void *work, const void *const *in, void *const *out,
                     int64_t num, int64_t *ns, int64_t links, int64_t *links_ns) {
  float sum = kept_number;
  ns[num] = INT64_MAX;
  for (int i = 0; i < 1000; i++) {
    int64_t began = now_ns(), took = now_ns() - began;
    if (took < ns[num]) ns[num] = took;
  }
  for (int64_t i = 0; i < num; i++) {
    int64_t began = now_ns();
    step(weights, state, work, in, out);
    int64_t between = now_ns();
    sum = links_added(sum, links);
    links_ns[i] = now_ns() - between;
    ns[i] = between - began;
  }
  kept_number = sum;
}
