// Kernels in CUDA C on a CPU: each thread of a program is a fiber, and programs come one after the other.
// Stands in for words.cu, whose functions it defines anew: those that a warp does together exchange through a table.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned int word;
struct __align__(16) Four { word at[4]; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx;

namespace host {
const int MOST = 1024;
static ucontext_t fibers[MOST], home;
static std::vector<char> stacks(MOST * 65536);
static bool done[MOST];
static int now, num;
static word table[MOST][16];
static void (*body)();

static void enter() { body(); done[now] = true; swapcontext(&fibers[now], &home); }
static void yield() { swapcontext(&fibers[now], &home); }

struct Barrier { int arrived, round; };
static Barrier all, warps[MOST / 32];

// Until `size` threads are here.
static void meet(Barrier& barrier, int size) {
    int round = barrier.round;
    if (++barrier.arrived == size) { barrier.arrived = 0, barrier.round++; return; }
    while (barrier.round == round) yield();
}
static void meet_warp() { meet(warps[now / 32], 32); }

static void program(void (*run)(), int threads) {
    body = run, num = threads;
    for (int i = 0; i < threads; i++) {
        done[i] = false;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * 65536];
        fibers[i].uc_stack.ss_size = 65536;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < threads; i++)
            if (!done[i]) any = true, now = i, threadIdx.x = i, swapcontext(&home, &fibers[i]);
    }
}
}  // namespace host

static void __syncthreads() { host::meet(host::all, host::num); }
static void __threadfence() {}
static unsigned int atomicAdd(unsigned int* at, unsigned int by) { unsigned int old = *at; *at += by; return old; }
static float __uint_as_float(word x) { float f; memcpy(&f, &x, 4); return f; }
static word __float_as_uint(float f) { word x; memcpy(&x, &f, 4); return x; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static int min(int a, int b) { return a < b ? a : b; }

static float __shfl_xor_sync(word, float value, int far) {
    host::table[host::now][0] = __float_as_uint(value);
    host::meet_warp();
    float made = __uint_as_float(host::table[host::now ^ far][0]);
    host::meet_warp();
    return made;
}

static Four read_once(const void* at) { return *(const Four*)at; }
static Four read_shared_result(const void* at) { return *(const Four*)at; }
static word read_word_once(const void* at) { return *(const word*)at; }
static void wait_for_the_launch_before() {}
static void let_the_next_begin() {}
static float low(word pair) { return __uint_as_float(pair << 16); }
static float high(word pair) { return __uint_as_float(pair & 0xffff0000u); }
static word narrow(float f) { word x = __float_as_uint(f); return (x + 0x7fff + (x >> 16 & 1)) >> 16; }
static word rounded(float low, float high) { return narrow(low) | narrow(high) << 16; }
static word over_128(word codes) { return (codes & 0x000f000f) | 0x43004300; }
static word less_136(word pair) { return rounded(low(pair) - 136, high(pair) - 136); }
static word times(word a, word b) { return rounded(low(a) * low(b), high(a) * high(b)); }
static float exp2_of(float x) { return std::exp2(x); }

// Fragments of mma.m16n8k16, as the PTX manual draws them.
static void multiply(float (&c)[4], const word (&a)[4], word b0, word b1) {
    word* mine = host::table[host::now];
    memcpy(mine, a, 16);
    mine[4] = b0, mine[5] = b1;
    host::meet_warp();
    int lane = host::now % 32, first = host::now - lane;
    for (int i = 0; i < 4; i++) {
        int row = i / 2, n = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int t = 0; t < 4; t++)
            for (int half = 0; half < 2; half++) {
                word x = host::table[first + lane / 4 * 4 + t][row + 2 * half], y = host::table[first + n * 4 + t][4 + half];
                sum += (double)low(x) * low(y) + (double)high(x) * high(y);
            }
        c[i] = (float)sum;
    }
    host::meet_warp();
}


