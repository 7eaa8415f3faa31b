// What the C++ of a kernel cannot say: the instructions of the device, one function each.

typedef unsigned int word;  // two bfloat16, or eight codes of 4 bits
struct __align__(16) Four { word at[4]; };
struct __align__(8) Two { word at[2]; };

// Sixteen bytes that are read once: past the nearest cache.
__device__ __forceinline__ Four read_once(const void* at) {
    Four result;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.at[0]), "=r"(result.at[1]), "=r"(result.at[2]), "=r"(result.at[3]) : "l"(at));
    return result;
}

// Sixteen bytes that another launch, or another program of this one, has written.
__device__ __forceinline__ Four read_shared_result(const void* at) {
    Four result;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.at[0]), "=r"(result.at[1]), "=r"(result.at[2]), "=r"(result.at[3]) : "l"(at) : "memory");
    return result;
}

__device__ __forceinline__ unsigned short read_shared_half(const void* at) {
    unsigned short result;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(result) : "l"(at) : "memory");
    return result;
}

// The number of this thread, each time anew: what follows from it is not kept in registers from one step of a kernel to the next.
__device__ __forceinline__ int this_thread() {
    int result;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(result));
    return result;
}

__device__ __forceinline__ word shared_address(const void* at) { return (word)__cvta_generic_to_shared(at); }

// Sixteen bytes to shared memory, there after a wait of this thread.
__device__ __forceinline__ void begin_copy(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void begin_word_copy(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Those since the last call are a group.
__device__ __forceinline__ void copies_begun() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups but the last MOST are there.
template <int MOST> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}

// The first NUM threads of a program meet.
template <int NUM> __device__ __forceinline__ void meet_threads() { asm volatile("bar.sync 1, %0;" ::"n"(NUM) : "memory"); }

#if __CUDA_ARCH__ >= 900
// Programs meet in shared memory on a gate, which opens once for each time that all have come and all bytes are there; who waits
// says how many times it has waited before, modulo 2.
struct Gate { unsigned long long state; };

__device__ __forceinline__ void make_gate(Gate& gate, int num) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&gate)), "r"(num) : "memory");
}

__device__ __forceinline__ void gates_are_made() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void come(Gate& gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&gate)) : "memory");
}

__device__ __forceinline__ void come_and_expect(Gate& gate, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&gate)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_at(Gate& gate, int round) {
    asm volatile(
        "{\n.reg .pred open;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n@open bra done;\nbra again;\n"
        "done:\n}" ::"r"(shared_address(&gate)), "r"(round) : "memory");
}

// Bytes to shared memory, counted at the gate; addresses and number are multiples of 16.
__device__ __forceinline__ void begin_bulk_copy(void* to, const void* from, int bytes, Gate& gate) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(&gate)) : "memory");
}
#endif

__device__ __forceinline__ void meet_warp() { __syncwarp(); }

// Until here the launch before may still run: what it writes is seen from here on.
__device__ __forceinline__ void wait_for_the_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may take what room there is; it waits for the end of this one by itself.
__device__ __forceinline__ void let_the_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Codes of 4 bits, with their signs, in the upper halves of bytes, where they are 16 times as much.
__device__ __forceinline__ word upper_codes(word codes) { return codes & 0xf0f0f0f0u; }
__device__ __forceinline__ word lower_codes(word codes) { return codes << 4 & 0xf0f0f0f0u; }

// A whole number to which x rounds, as four bytes from - 128 to 127: its digits to the base 256.
__device__ __forceinline__ word digits(float x) { return ((word)__float2int_rn(x) + 0x00808080u) ^ 0x00808080u; }

// The larger of each two bfloat16, which are not negative; not a number where one is not.
__device__ __forceinline__ word larger_halves(word a, word b) {
    word result;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// The largest of a warp's words.
__device__ __forceinline__ word most_of_warp(word mine) {
    word result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(mine));
    return result;
}

__device__ __forceinline__ word times(word a, word b) {
    word result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(0x80008000u));  // - 0: the sign of a zero stays
    return result;
}

__device__ __forceinline__ float low(word pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(word pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two numbers rounded to bfloat16, halves to the even one.
__device__ __forceinline__ word rounded(float low, float high) {
    word result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// c += a b: 16 rows of a, 16 numbers deep, 8 columns of b, in the fragments of mma.m16n8k16.
__device__ __forceinline__ void multiply(float (&c)[4], const word (&a)[4], word b0, word b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += a b of bytes with signs: 16 rows of a, 32 numbers deep, 8 columns of b, in the fragments of mma.m16n8k32.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const word (&a)[4], word b0, word b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// Programs of a cluster: each sees the others' shared memory.
__device__ __forceinline__ void meet_cluster() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ float read_of_program(const float* at, int rank) {
    float result = 0;
#if __CUDA_ARCH__ >= 900
    word there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(result) : "r"(there) : "memory");
#endif
    return result;
}

// Words that other programs of this launch write, and that are ABSENT before: two bfloat16 or a float that no operation of
// the device gives, whose NaN is 0x7fff and 0x7fffffff. A word is there or not, whatever else was written before or after, so
// that no fence is needed, which would wait for all that is on its way.
constexpr word ABSENT = 0xffffffffu;

__device__ __forceinline__ word read_word(const void* at) {
    word result;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(result) : "l"(at) : "memory");
    return result;
}

__device__ __forceinline__ Two read_two_words(const void* at) {
    Two result;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(result.at[0]), "=r"(result.at[1]) : "l"(at) : "memory");
    return result;
}

__device__ __forceinline__ Four read_four_words(const void* at) {
    Four result;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(result.at[0]), "=r"(result.at[1]), "=r"(result.at[2]), "=r"(result.at[3]) : "l"(at) : "memory");
    return result;
}

__device__ __forceinline__ void write_word(void* at, word data) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(data) : "memory");
}

__device__ __forceinline__ word lanes_where(bool is_so) { return __ballot_sync(0xffffffffu, is_so); }
__device__ __forceinline__ void look_again() {}

// What the next launch reads; gives the number before.
__device__ __forceinline__ word count_up(word* counter) { return atomicAdd(counter, 1u); }
