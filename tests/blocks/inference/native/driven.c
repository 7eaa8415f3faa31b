/* Steps a model outside Python: driven EVENTS INPUTS WEIGHTS OUTPUTS [modes]. INPUTS holds events' inputs, taken in turn; the last
 * outputs and a snapshot go to OUTPUTS. Memory begins uninitialised. With `modes`, the control register has other values before
 * each call, and is looked at after it (valgrind does not keep all of it). */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "table.h"
const flatout_native *flatout_native_model(void);

static void *kept[300]; /* so that nothing counts as leaked */
static void *memory(uint64_t bytes) {
  static int at;
  return kept[at++] = aligned_alloc(64, (bytes + 63) / 64 * 64 + (bytes ? 0 : 64));
}

static void *whole(const char *path, uint64_t *bytes) {
  FILE *file = fopen(path, "rb");
  if (!file || fseek(file, 0, SEEK_END)) exit(2);
  *bytes = (uint64_t)ftell(file);
  void *found = memory(*bytes);
  rewind(file);
  if (fread(found, 1, *bytes, file) != *bytes) exit(2);
  fclose(file);
  return found;
}

int main(int argc, char **argv) {
  if (argc < 5) return 2;
  const flatout_native *t = flatout_native_model();
  const long events = atol(argv[1]);
  uint64_t bytes, weights_bytes, each = 0;
  const char *inputs = whole(argv[2], &bytes), *weights = whole(argv[3], &weights_bytes);
  if (weights_bytes != t->weights_bytes) return 3;
  for (uint32_t i = 0; i < t->num_inputs; i++) each += t->input_bytes[i];
  const uint64_t kept = bytes / each;
  void *state = memory(t->state_bytes), *work = memory(t->work_bytes), *plain = memory(t->snapshot_bytes);
  void *in[64], *out[64];
  for (uint32_t i = 0; i < t->num_inputs; i++) in[i] = memory(t->input_bytes[i]);
  for (uint32_t i = 0; i < t->num_outputs; i++) out[i] = memory(t->output_bytes[i]);
  t->reset(state);
  for (long e = 0; e < events; e++) {
    const char *from = inputs + (uint64_t)e % kept * each;
    for (uint32_t i = 0; i < t->num_inputs; from += t->input_bytes[i++]) memcpy(in[i], from, t->input_bytes[i]);
    const unsigned modes[] = {0x1f80u, 0x9f80u, 0x1fc0u, 0x1fbfu}; /* the default, flushing on, zeros in, all flags raised */
    if (argc > 5) _mm_setcsr(modes[e % 4]);
    t->step(weights, state, work, (const void *const *)in, out);
    if (argc > 5 && _mm_getcsr() != modes[e % 4]) return 4;
  }
  t->snapshot(state, plain);
  FILE *file = fopen(argv[4], "wb");
  unsigned sum = 0; /* branches on every byte of what came out, for memcheck to see what was never written */
  for (uint32_t i = 0; i < t->num_outputs; i++) {
    for (uint64_t b = 0; b < t->output_bytes[i]; b++) sum += ((const unsigned char *)out[i])[b] > 7;
    fwrite(out[i], 1, t->output_bytes[i], file);
  }
  for (uint64_t b = 0; b < t->snapshot_bytes; b++) sum += ((const unsigned char *)plain)[b] > 7;
  fwrite(plain, 1, t->snapshot_bytes, file);
  fclose(file);
  printf("%u\n", sum);
  return 0;
}
