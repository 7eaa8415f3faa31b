"""A model.c written by hand with the interface of generated ones: h = h / 2 + W x + k, y = sum of h, and a library's table."""

from __future__ import annotations

import hashlib
import struct

from flatout.core.records.native import NativeManifest, Port

NAME = "small"
STATE_BYTES, WORK_BYTES, WEIGHTS_BYTES = 64, 64, 64
W = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
"""Two rows of three."""
X, K = Port(name="x", dtype="float32", shape=(1, 3)), Port(name="k", dtype="int64", shape=(1,))
Y, H = Port(name="y", dtype="float32", shape=(1, 1)), Port(name="h", dtype="float32", shape=(1, 2))

MODEL_H = """\
#ifndef SMALL_H
#define SMALL_H
#include <stdint.h>
#define SMALL_STATE_BYTES 64
#define SMALL_WORK_BYTES 64
#define SMALL_WEIGHTS_BYTES 64
#ifdef __cplusplus
extern "C" {
#endif
const void *small_weights(const void *file, uint64_t bytes);
void small_reset(void *state);
void small_step(const void *weights, void *state, void *work, const float *x, const int64_t *k, float *y);
void small_step_many(const void *weights, void *state, void *work, const float *x, const int64_t *k, float *y, int64_t n);
void small_step_streams(
    const void *weights, void *states, void *work, const float *x, const int64_t *k, float *y, int64_t n);
#ifdef __cplusplus
}
#endif
#endif
"""

MODEL_C = """\
#include "model.h"
#include <string.h>
const void *small_weights(const void *file, uint64_t bytes) {
  return bytes == 128 && memcmp(file, "FLATOUTW", 8) == 0 ? (const char *)file + 64 : 0;
}
void small_reset(void *state) { memset(state, 0, 64); }
void small_step(const void *weights, void *state, void *work, const float *x, const int64_t *k, float *y) {
  const float *w = weights;
  float *h = state;
  (void)work;
  for (int i = 0; i < 2; i++)
    h[i] = 0.5f * h[i] + w[3 * i] * x[0] + w[3 * i + 1] * x[1] + w[3 * i + 2] * x[2] + (float)*k;
  *y = h[0] + h[1];
}
static void step(const void *weights, void *state, void *work, const void *const *in, void *const *out) {
  small_step(weights, state, work, in[0], in[1], out[0]);
}
void small_step_many(
    const void *weights, void *state, void *work, const float *x, const int64_t *k, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) small_step(weights, state, work, x + 3 * i, k + i, y + i);
}
static void step_many(
    const void *weights, void *state, void *work, const void *const *in, void *const *out, int64_t n) {
  small_step_many(weights, state, work, in[0], in[1], out[0], n);
}
void small_step_streams(
    const void *weights, void *states, void *work, const float *x, const int64_t *k, float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) small_step(weights, (char *)states + 64 * i, work, x + 3 * i, k + i, y + i);
}
static void step_streams(
    const void *weights, void *states, void *work, const void *const *in, void *const *out, int64_t n) {
  small_step_streams(weights, states, work, in[0], in[1], out[0], n);
}
static void snapshot(const void *state, void *plain) { memcpy(plain, state, 8); }
static void restore(void *state, const void *plain) { memcpy(state, plain, 8); }
typedef struct flatout_native {
  uint32_t abi, num_inputs, num_outputs, reserved;
  const char *isa;
  const uint64_t *input_bytes, *output_bytes;
  uint64_t weights_bytes, state_bytes, work_bytes, streams_work_bytes, snapshot_bytes;
  void (*reset)(void *state);
  void (*step)(const void *, void *, void *, const void *const *, void *const *);
  void (*step_many)(const void *, void *, void *, const void *const *, void *const *, int64_t);
  void (*step_streams)(const void *, void *, void *, const void *const *, void *const *, int64_t);
  void (*snapshot)(const void *, void *);
  void (*restore)(void *, const void *);
} flatout_native;
static const uint64_t input_bytes[] = {12, 8}, output_bytes[] = {4};
__attribute__((visibility("default"))) const flatout_native *flatout_native_model(void) {
  static const flatout_native table = {1, 2, 1, 0, "plain", input_bytes, output_bytes, 64, 64, 64, 64, 8,
    small_reset, step, step_many, step_streams, snapshot, restore};
  return &table;
}
"""


def weights_file() -> bytes:
    """weights.bin."""
    payload = struct.pack("<6f", *W[0], *W[1]).ljust(WEIGHTS_BYTES, b"\0")
    head = b"FLATOUTW" + struct.pack("<IIQ", 1, 0, len(payload)) + hashlib.sha256(payload).digest()
    return head.ljust(64, b"\0") + payload


def manifest() -> NativeManifest:
    """engine.json of it."""
    return NativeManifest(
        name=NAME,
        inputs=(X, K),
        outputs=(Y,),
        state=(H,),
        isas=("plain",),
        weights_bytes=WEIGHTS_BYTES,
        weights_sum=hashlib.sha256(weights_file()[64:]).hexdigest(),
        torch="2.11.0",
        flatout="0",
    )


def expected(num_events: int, *, x: float, k: int) -> list[float]:
    """y after each of so many equal events."""
    h, found = [0.0, 0.0], []
    for _ in range(num_events):
        h = [0.5 * old + sum(row) * x + k for old, row in zip(h, W, strict=True)]
        found.append(sum(h))
    return found
