typedef struct flatout_native {
  uint32_t abi; /* 1 */
  uint32_t num_inputs, num_outputs, reserved;
  const char *isa;
  const uint64_t *input_bytes, *output_bytes; /* of one event */
  uint64_t weights_bytes, state_bytes, work_bytes, streams_work_bytes, snapshot_bytes;
  void (*reset)(void *state);
  void (*step)(const void *weights, void *state, void *work, const void *const *in, void *const *out);
  void (*step_many)(const void *weights, void *state, void *work, const void *const *in, void *const *out, int64_t n);
  void (*step_streams)(const void *weights, void *states, void *work, const void *const *in, void *const *out, int64_t n);
  void (*snapshot)(const void *state, void *plain);
  void (*restore)(void *state, const void *plain);
} flatout_native;
