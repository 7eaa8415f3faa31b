/* An LSTM cell of 128 on 128, in two halves of 64 units: their blocks are i 0-3, f 4-7, g 8-11, o 12-15. */
#include "peer.h"
#define INPUTS 128
#define OUTPUTS 128
static struct { v16 w[2][256][16], b[2][16]; } weights; /* 256 inputs: x, then h; both biases added */
static float h[128], c[128];

static void reset(void) { memset(h, 0, sizeof h), memset(c, 0, sizeof c); }

static void step(const float *x, float *y) {
  float xh[256];
  memcpy(xh, x, 512), memcpy(xh + 128, h, 512);
  for (int half = 0; half < 2; half++) {
    v16 a[16];
#pragma GCC unroll 16
    for (int b = 0; b < 16; b++) a[b] = weights.b[half][b];
    dense(xh, 256, weights.w[half][0], a, 16, 1);
    for (int b = 0; b < 4; b++) {
      int at = 64 * half + 16 * b;
      v16 cell = sigmoid(a[4 + b]) * load(c + at) + sigmoid(a[b]) * tangent(a[8 + b]);
      store(c + at, cell);
      store(h + at, sigmoid(a[12 + b]) * tangent(cell));
    }
  }
  memcpy(y, h, sizeof h);
}
#include "module.h"
