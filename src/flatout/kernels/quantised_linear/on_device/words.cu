// What the C++ of a kernel cannot say: the instructions of the device, one function each.

typedef unsigned int word;  // two bfloat16, or eight codes of 4 bits
struct __align__(16) Four { word at[4]; };

// Sixteen bytes that are read once: past the nearest cache.
__device__ __forceinline__ Four read_once(const void* at) {
    Four made;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(made.at[0]), "=r"(made.at[1]), "=r"(made.at[2]), "=r"(made.at[3]) : "l"(at));
    return made;
}

__device__ __forceinline__ word read_word_once(const void* at) {
    word made;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(made) : "l"(at));
    return made;
}

// Sixteen bytes that another launch, or another program of this one, has written.
__device__ __forceinline__ Four read_shared_result(const void* at) {
    Four made;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(made.at[0]), "=r"(made.at[1]), "=r"(made.at[2]), "=r"(made.at[3]) : "l"(at) : "memory");
    return made;
}

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

// (code & 15) + 128 in each half: a code under the upper byte of 128 in bfloat16.
__device__ __forceinline__ word over_128(word codes) {
    word made;
    asm("lop3.b32 %0, %1, 0x000f000f, 0x43004300, 0xea;" : "=r"(made) : "r"(codes));
    return made;
}

// Less 136, exactly.
__device__ __forceinline__ word less_136(word pair) {
    word made;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(pair), "r"(0x3f803f80u), "r"(0xc308c308u));
    return made;
}

__device__ __forceinline__ word times(word a, word b) {
    word made;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(made) : "r"(a), "r"(b), "r"(0x80008000u));  // - 0: the sign of a zero stays
    return made;
}

__device__ __forceinline__ float low(word pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(word pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two numbers rounded to bfloat16, halves to the even one.
__device__ __forceinline__ word rounded(float low, float high) {
    word made;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
    return made;
}

// c += a b: 16 rows of a, 16 numbers deep, 8 columns of b, in the fragments of mma.m16n8k16.
__device__ __forceinline__ void multiply(float (&c)[4], const word (&a)[4], word b0, word b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_of(float x) {
    float made;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x));
    return made;
}
