// Kernels in CUDA C on a CPU: each thread is a fiber. Programs come one after the other, or those of a launch all at once.
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
struct __align__(8) Two { word at[2]; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, gridDim;

namespace host {
const int MOST = 1024, SHARED = 1 << 20;
static ucontext_t fibers[MOST], home;
static std::vector<char> stacks(MOST * 65536);
static bool done[MOST];
static int now, num;  // the fiber, and how many are a program
static std::vector<char> shared(SHARED);
static char* shared_of_program() { return &shared[now / num * (long)SHARED]; }
static word table[MOST][16];
static void (*body)();

static void enter() { body(); done[now] = true; swapcontext(&fibers[now], &home); }
static void yield() { swapcontext(&fibers[now], &home); }

struct Barrier { int arrived, round; };
static Barrier programs[MOST], warps[MOST / 32];

// Until `size` threads are here.
static void meet(Barrier& barrier, int size) {
    int round = barrier.round;
    if (++barrier.arrived == size) { barrier.arrived = 0, barrier.round++; return; }
    while (barrier.round == round) yield();
}
static void meet_warp() { meet(warps[now / 32], 32); }

static void begun(int thread);

static void run(void (*kernel)(), int threads, int programs) {
    body = kernel, num = threads;
    if (threads * programs > MOST) abort();
    shared.resize((long)SHARED * programs);
    for (int i = 0; i < threads * programs; i++) {
        done[i] = false;
        begun(i);
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = &stacks[i * 65536];
        fibers[i].uc_stack.ss_size = 65536;
        fibers[i].uc_link = nullptr;
        makecontext(&fibers[i], enter, 0);
    }
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < threads * programs; i++) {
            if (done[i]) continue;
            any = true, now = i, threadIdx.x = i % threads;
            if (programs > 1) blockIdx = {i / threads, 0, 0};
            swapcontext(&home, &fibers[i]);
        }
    }
}
}  // namespace host

template <int NUM> static void meet_threads() {
    static host::Barrier barriers[host::MOST];
    host::meet(barriers[host::now / host::num], NUM);
}
static void meet_warp() { host::meet_warp(); }
static void __syncthreads() { host::meet(host::programs[host::now / host::num], host::num); }
static void __threadfence() {}
static unsigned int atomicAdd(unsigned int* at, unsigned int by) { unsigned int old = *at; *at += by; return old; }
static float __uint_as_float(word x) { float f; memcpy(&f, &x, 4); return f; }
static word __float_as_uint(float f) { word x; memcpy(&x, &f, 4); return x; }
#define rsqrtf on_host_rsqrtf // newer C libraries have one
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a < b ? b : a; }
static word max(word a, word b) { return a < b ? b : a; }

static float __shfl_xor_sync(word, float value, int far) {
    host::table[host::now][0] = __float_as_uint(value);
    host::meet_warp();
    float result = __uint_as_float(host::table[host::now ^ far][0]);
    host::meet_warp();
    return result;
}

// Copies that have begun, of each thread; those of a group are done when the group is waited for.
struct Copy { void* to; const void* from; int bytes; };
static std::vector<std::vector<Copy>> groups[host::MOST];
static std::vector<Copy> group[host::MOST];
static void begin_copy(void* to, const void* from) { group[host::now].push_back({to, from, 16}); }
static void begin_word_copy(void* to, const void* from) { group[host::now].push_back({to, from, 4}); }
static void copies_begun() { groups[host::now].push_back(group[host::now]), group[host::now].clear(); }
template <int MOST> static void wait_for_copies() {
    auto& mine = groups[host::now];
    for (; mine.size() > MOST; mine.erase(mine.begin()))
        for (const Copy& copy : mine[0]) memcpy(copy.to, copy.from, copy.bytes);
}
void host::begun(int thread) { groups[thread].clear(), group[thread].clear(); }
// A gate's copies are done when somebody waits at it.
struct Gate { unsigned short num, left, rounds, bytes_16; };
static std::vector<std::pair<Gate*, Copy>> bulk;
static void pass(Gate& gate) { if (!gate.left && !gate.bytes_16) gate.left = gate.num, gate.rounds++; }
static void make_gate(Gate& gate, int num) { gate = {(unsigned short)num, (unsigned short)num, 0, 0}; }
static void gates_are_made() {}
static void come(Gate& gate) { gate.left--, pass(gate); }
static void come_and_expect(Gate& gate, int bytes) { gate.bytes_16 += bytes / 16, come(gate); }
static void begin_bulk_copy(void* to, const void* from, int bytes, Gate& gate) { bulk.push_back({&gate, {to, from, bytes}}); }
static void wait_at(Gate& gate, int round) {
    while (gate.rounds % 2 == round) {
        for (size_t i = 0; i < bulk.size();) {
            if (bulk[i].first != &gate) { i++; continue; }
            Copy copy = bulk[i].second;
            memcpy(copy.to, copy.from, copy.bytes);
            gate.bytes_16 -= copy.bytes / 16;
            bulk.erase(bulk.begin() + i);
            pass(gate);
        }
        if (gate.rounds % 2 == round) host::yield();
    }
}
const word ABSENT = 0xffffffffu;
static word read_word(const void* at) { return *(const word*)at; }
static Two read_two_words(const void* at) { return *(const Two*)at; }
static Four read_four_words(const void* at) { return *(const Four*)at; }
static void write_word(void* at, word data) { *(word*)at = data; }
static word lanes_where(bool is_so) {
    host::table[host::now][0] = is_so;
    host::meet_warp();
    word result = 0;
    for (int lane = 0; lane < 32; lane++) result |= host::table[host::now / 32 * 32 + lane][0] << lane;
    host::meet_warp();
    return result;
}
static void look_again() { host::yield(); }
static word count_up(word* counter) { return (*counter)++; }
static void meet_cluster() {}
static float read_of_program(const float* at, int) { return *at; }
static unsigned short read_shared_half(const void* at) { return *(const unsigned short*)at; }

static int this_thread() { return threadIdx.x; }
static Four read_once(const void* at) { return *(const Four*)at; }
static Four read_shared_result(const void* at) { return *(const Four*)at; }
static void wait_for_the_launch_before() {}
static void let_the_next_begin() {}
static float low(word pair) { return __uint_as_float(pair << 16); }
static float high(word pair) { return __uint_as_float(pair & 0xffff0000u); }
static word narrow(float f) { word x = __float_as_uint(f); return f != f ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16; }
static word rounded(float low, float high) { return narrow(low) | narrow(high) << 16; }
static int __float2int_rn(float x) { return (int)std::nearbyint(x); }
static word __byte_perm(word a, word b, word which) {
    uint64_t both = (uint64_t)b << 32 | a;
    word result = 0;
    for (int i = 0; i < 4; i++) result |= (word)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return result;
}
static word upper_codes(word codes) { return codes & 0xf0f0f0f0u; }
static word lower_codes(word codes) { return codes << 4 & 0xf0f0f0f0u; }
static word digits(float x) {
    long left = __float2int_rn(x);
    word result = 0;
    for (int i = 0; i < 4; i++) {
        int digit = (int)((left + 128) & 255) - 128;
        result |= (word)(digit & 255) << 8 * i, left = (left - digit) / 256;
    }
    return result;
}
static word larger_halves(word a, word b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }
static float __fdividef(float a, float b) { return a / b; }
static word most_of_warp(word mine) {
    host::table[host::now][0] = mine;
    host::meet_warp();
    word result = 0;
    for (int lane = 0; lane < 32; lane++) result = max(result, host::table[host::now / 32 * 32 + lane][0]);
    host::meet_warp();
    return result;
}
static word times(word a, word b) { return rounded(low(a) * low(b), high(a) * high(b)); }
static float exp2_of(float x) { return std::exp2(x); }

// Fragments of mma.m16n8k16 and m16n8k32, as the PTX manual draws them; NUM numbers of a kind are a word.
template <class Sum, int NUM>
static void multiply_as(Sum (&c)[4], const word (&a)[4], word b0, word b1, Sum (*number)(word, int)) {
    word* mine = host::table[host::now];
    memcpy(mine, a, 16);
    mine[4] = b0, mine[5] = b1;
    host::meet_warp();
    int lane = host::now % 32, from = host::now - lane;
    for (int i = 0; i < 4; i++) {
        int row = i / 2, n = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int t = 0; t < 4; t++)
            for (int half = 0; half < 2; half++) {
                word x = host::table[from + lane / 4 * 4 + t][row + 2 * half], y = host::table[from + n * 4 + t][4 + half];
                for (int k = 0; k < NUM; k++) sum += (double)number(x, k) * number(y, k);
            }
        c[i] = (Sum)sum;
    }
    host::meet_warp();
}
static void multiply(float (&c)[4], const word (&a)[4], word b0, word b1) {
    multiply_as<float, 2>(c, a, b0, b1, [](word x, int k) { return k ? high(x) : low(x); });
}
static void multiply_bytes(int (&c)[4], const word (&a)[4], word b0, word b1) {
    multiply_as<int, 4>(c, a, b0, b1, [](word x, int k) { return (int)(signed char)(x >> 8 * k); });
}
