/* One table for each set of instructions that this file was compiled for, and the choice among them. */
#define FO_SHOWN __attribute__((visibility("default")))
#define FO_PASTED(a, b) a##b
#define FO_PASTE(a, b) FO_PASTED(a, b)
#define FO_QUOTED(a) #a
#define FO_QUOTE(a) FO_QUOTED(a)
#if defined(FLATOUT_PART)
#define FO_TABLE FO_PASTE(fo_NAME_LOWER_table_, FLATOUT_ISA)
#define FO_LINKAGE __attribute__((visibility("hidden")))
#else
#define FO_TABLE fo_NAME_LOWER_table_own
#define FO_LINKAGE static
#ifndef FLATOUT_ISA
#define FLATOUT_ISA own
#endif
#endif
#if !defined(FLATOUT_DISPATCH)
#if defined(FLATOUT_PART)
extern const flatout_native FO_TABLE FO_LINKAGE;
const flatout_native FO_TABLE = {
#else
static const flatout_native FO_TABLE = {
#endif
  1, FO_NUM_INPUTS, FO_NUM_OUTPUTS, 0, FO_QUOTE(FLATOUT_ISA), fo_input_bytes, fo_output_bytes,
  NAME_UPPER_WEIGHTS_BYTES, NAME_UPPER_STATE_BYTES, NAME_UPPER_WORK_BYTES, NAME_UPPER_STREAMS_WORK_BYTES,
  NAME_UPPER_SNAPSHOT_BYTES, fo_reset, fo_step, fo_step_many, fo_step_streams, fo_snapshot, fo_restore_state};
#endif
#if !defined(FLATOUT_PART)
FO_SHOWN const flatout_native *flatout_native_model(void);
#if defined(FLATOUT_DISPATCH)
extern const flatout_native fo_NAME_LOWER_table_plain __attribute__((visibility("hidden")));
#define FO_TRY(isa, has) \
  extern const flatout_native FO_PASTE(fo_NAME_LOWER_table_, isa) __attribute__((visibility("hidden"))); \
  static int fo_has_##isa(void) { return has; }
#if defined(FLATOUT_HAS_AVX512VNNI)
FO_TRY(avx512vnni, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni"))
#endif
#if defined(FLATOUT_HAS_AVX512)
FO_TRY(avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
#endif
#if defined(FLATOUT_HAS_AVX2)
FO_TRY(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
#endif
#if defined(FLATOUT_HAS_NEON)
FO_TRY(neon, 1)
#endif
static const flatout_native *fo_chosen; /* set once, when the library is loaded */
__attribute__((constructor)) static void fo_choose(void) {
#if defined(FLATOUT_HAS_AVX512VNNI)
  if (fo_has_avx512vnni()) { fo_chosen = &fo_NAME_LOWER_table_avx512vnni; return; }
#endif
#if defined(FLATOUT_HAS_AVX512)
  if (fo_has_avx512()) { fo_chosen = &fo_NAME_LOWER_table_avx512; return; }
#endif
#if defined(FLATOUT_HAS_AVX2)
  if (fo_has_avx2()) { fo_chosen = &fo_NAME_LOWER_table_avx2; return; }
#endif
#if defined(FLATOUT_HAS_NEON)
  if (fo_has_neon()) { fo_chosen = &fo_NAME_LOWER_table_neon; return; }
#endif
  fo_chosen = &fo_NAME_LOWER_table_plain;
}
const flatout_native *flatout_native_model(void) { return fo_chosen; }
#else
const flatout_native *flatout_native_model(void) { return &FO_TABLE; }
#endif
#endif
