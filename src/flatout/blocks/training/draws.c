/* The numbers that PyTorch's Mersenne Twister would draw for bernoulli_, one after the other, computed by vector instructions.
 *
 * The recurrence and its constants are those of MT19937 (Matsumoto and Nishimura 1998, ACM TOMACS 8(1)). PyTorch's CPU
 * generator draws two words for an element of bernoulli_, of which 53 bits make a double in [0, 1) that is compared with p
 * (ATen/core/TransformationHelper.h, uniform_real; ATen/core/DistributionsHelper.h, bernoulli_distribution). No loop here
 * depends on its last 227 results, so that the compiler makes all of them vector loops.
 */

#include <stdint.h>
#include <string.h>

#define NUM_WORDS 624
#define MIDDLE 397
#define MATRIX 0x9908b0dfu
#define UPPER 0x80000000u
#define LOWER 0x7fffffffu
#define BITS_53 ((UINT64_C(1) << 53) - 1)

#define EXPORT __attribute__((visibility("default")))

static inline uint32_t twist(uint32_t this_word, uint32_t next_word) {
  uint32_t mixed = (this_word & UPPER) | (next_word & LOWER);
  return (mixed >> 1) ^ (-(next_word & 1u) & MATRIX);
}

static void next_block(uint32_t *restrict words) {
  for (int i = 0; i < NUM_WORDS - MIDDLE; i++)
    words[i] = words[i + MIDDLE] ^ twist(words[i], words[i + 1]);
  for (int i = NUM_WORDS - MIDDLE; i < NUM_WORDS - 1; i++)
    words[i] = words[i + MIDDLE - NUM_WORDS] ^ twist(words[i], words[i + 1]);
  words[NUM_WORDS - 1] = words[MIDDLE - 1] ^ twist(words[NUM_WORDS - 1], words[0]);
}

static void temper(const uint32_t *restrict words, uint32_t *restrict out, int num) {
  for (int i = 0; i < num; i++) {
    uint32_t y = words[i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    out[i] = y ^ (y >> 18);
  }
}

/* Elements of `type` that are `one` where the double of a pair of words lies below p, and 0 elsewhere. */
#define WRITE(type)                                                                          \
  static void write_##type(const uint32_t *restrict pairs, int64_t threshold, type one,      \
                           type *restrict out, int num) {                                    \
    for (int i = 0; i < num; i++) {                                                          \
      uint64_t bits = ((uint64_t)pairs[2 * i] << 32 | pairs[2 * i + 1]) & BITS_53;           \
      out[i] = (int64_t)bits < threshold ? one : (type)0;                                    \
    }                                                                                        \
  }
WRITE(uint8_t)
WRITE(uint16_t)
WRITE(uint32_t)
WRITE(uint64_t)

/* Draws `num` elements of `size` bytes, whose 1 has the bits `one`, into `out`.
 *
 * `state` are the generator's words, the low half of each; words from `next` on are not used yet. `threshold` is the least
 * whole number that is not below p * 2^53. Returns the new `next`, which is NUM_WORDS where all words are used.
 */
EXPORT int flatout_bernoulli(uint64_t *state, int next, int64_t threshold, int64_t num, int size, uint64_t one, void *out) {
  uint32_t words[NUM_WORDS], fresh[NUM_WORDS + 1];
  char *to = out;
  int carried = 0; /* one word, where a pair lies across two blocks */
  for (int i = 0; i < NUM_WORDS; i++)
    words[i] = (uint32_t)state[i];
  while (num > 0) {
    if (next == NUM_WORDS) {
      next_block(words);
      next = 0;
    }
    int64_t wanted = 2 * num - carried;
    int taken = wanted < NUM_WORDS - next ? (int)wanted : NUM_WORDS - next;
    temper(words + next, fresh + carried, taken);
    next += taken;
    int have = carried + taken, pairs = have / 2;
    switch (size) {
    case 1: write_uint8_t(fresh, threshold, (uint8_t)one, (uint8_t *)to, pairs); break;
    case 2: write_uint16_t(fresh, threshold, (uint16_t)one, (uint16_t *)to, pairs); break;
    case 4: write_uint32_t(fresh, threshold, (uint32_t)one, (uint32_t *)to, pairs); break;
    default: write_uint64_t(fresh, threshold, one, (uint64_t *)to, pairs);
    }
    to += (int64_t)pairs * size;
    num -= pairs;
    carried = have % 2;
    fresh[0] = fresh[have - carried];
  }
  for (int i = 0; i < NUM_WORDS; i++)
    state[i] = words[i];
  return next;
}
