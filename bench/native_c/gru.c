/* A GRU cell of 64 on 64: reset and update gates of both inputs share their sums; blocks are r 0-3, z 4-7, n 8-11. */
#include "peer.h"
#define INPUTS 64
#define OUTPUTS 64
static struct { v16 wx[64][12], wh[64][12], b[16]; } weights; /* b: r, z (both biases added), n of x, n of h */
static float h[64];

static void reset(void) { memset(h, 0, sizeof h); }

static void step(const float *x, float *y) {
  v16 a[16];
#pragma GCC unroll 16
  for (int b = 0; b < 16; b++) a[b] = weights.b[b];
  for (int k = 0; k < 64; k++) {
#pragma GCC unroll 16
    for (int b = 0; b < 12; b++) a[b] += x[k] * weights.wx[k][b];
#pragma GCC unroll 16
    for (int b = 0; b < 8; b++) a[b] += h[k] * weights.wh[k][b];
#pragma GCC unroll 16
    for (int b = 8; b < 12; b++) a[b + 4] += h[k] * weights.wh[k][b];
  }
#pragma GCC unroll 16
  for (int b = 0; b < 4; b++) {
    v16 n = tangent(a[8 + b] + sigmoid(a[b]) * a[12 + b]), z = sigmoid(a[4 + b]);
    store(h + 16 * b, n + z * (load(h + 16 * b) - n));
  }
  memcpy(y, h, sizeof h);
}
#include "module.h"
