// What kernels do with a weight that lies in the order in which the matrix units take it (laying.py).
//
// A tile is 16 outputs; a step is 1 KiB of codes of a tile, 128 inputs with 4 bits and 32 with 16. M rows of x, K inputs. The
// matrix units multiply a tile by 8 columns at a time.
//
// With 16 bits all is bfloat16, and a row of x is a column. With 4 bits all is bytes, whose products and sums are exact. A row of
// x, times a power of two that brings the largest to 2^29 or above, is rounded to whole numbers, and their four digits to the
// base 256, from - 128 to 127, are four columns. bfloat16 has eight bits, so that only numbers 2^22 times smaller than the row's
// largest lose any. Codes are multiplied in the upper halves of bytes, as 16 times what they stand for.

constexpr int STEP = BITS == 4 ? 128 : 32;
constexpr int THREADS = 32 * WARPS;
constexpr int AT_ONCE = 3;                  // pieces of x that a thread reads at a time
constexpr int SCALES = BITS == 4 ? 32 : 0;  // bytes of a step's
constexpr int DIGITS = BITS == 4 ? 4 : 1;   // columns of a row
constexpr int HALVES = BITS == 4 ? 2 : 1;   // of a step, of which a lane has sixteen bytes each

struct Codes { Four half[2]; word scales; };

// What a lane has of a step that lies at `codes`, and its scales at `scales`.
__device__ __forceinline__ Codes step_of(const char* codes, const char* scales, int lane) {
    Codes step;
    step.half[0] = *(const Four*)(codes + lane * 16), step.half[1] = *(const Four*)(codes + 512 + lane * 16);
    if (BITS == 4) step.scales = *(const word*)(scales + lane / 4 * 4);
    return step;
}

// Rows of x in shared memory, as `stage` stores them: so many bytes of each. With 16 bits they are 16 longer, so that they begin
// in other banks. With 4, a step is 512 bytes: of each half of the inputs 64 bytes of each digit; in the second half even and
// odd digits have changed places, so that both halves are written to other banks.
__device__ __forceinline__ int row_bytes(int K) { return BITS == 4 ? 4 * K : 2 * K + 16; }

struct Columns { Four half[HALVES]; };

// What a lane has of a step of x: row after row in `rows`, those from `row` on are columns.
__device__ __forceinline__ Columns columns_of(const char* rows, int M, int K, int row, int step, int lane) {
    int column = lane / 4, m = row + column / DIGITS, digit = column % DIGITS;
    Columns result = {};
    if (m >= M) return result;
    const char* x = rows + m * row_bytes(K) + step * STEP * (BITS == 4 ? 4 : 2) + lane % 4 * 16;
    result.half[0] = *(const Four*)(x + digit * 64);
    if (BITS == 4) result.half[HALVES - 1] = *(const Four*)(x + 256 + (digit ^ 1) * 64);
    return result;
}

// c += NUM steps of the weight, one behind the other in a tile, times those of x. Steps go side by side, since each product
// waits for the one before it.
template <int NUM>
__device__ __forceinline__ void take(float (&c)[4], const Codes (&steps)[NUM], const Columns (&columns)[NUM]) {
    if (BITS == 4) {
        int result[NUM][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < NUM; n++) {
                const Four &codes = steps[n].half[j / 2], &x = columns[n].half[j / 2 % HALVES];
                word one = codes.at[j % 2 * 2], two = codes.at[j % 2 * 2 + 1];
                word a[4] = {lower_codes(one), upper_codes(one), lower_codes(two), upper_codes(two)};
                multiply_bytes(result[n], a, x.at[j % 2 * 2], x.at[j % 2 * 2 + 1]);
            }
#pragma unroll
        for (int n = 0; n < NUM; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[i] += (i < 2 ? low(steps[n].scales) : high(steps[n].scales)) * (float)result[n][i];
        return;
    }
    float result[2][NUM][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NUM; n++) {
            const Four *rows = steps[n].half, &x = columns[n].half[0];
            word a[4] = {rows[0].at[2 * h], rows[1].at[2 * h], rows[0].at[2 * h + 1], rows[1].at[2 * h + 1]};
            multiply(result[h][n], a, x.at[2 * h], x.at[2 * h + 1]);
        }
#pragma unroll
    for (int n = 0; n < NUM; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] += result[0][n][i] + result[1][n][i];
}

// The same for all rows, of which PASSES times eight columns are had: x's steps from `step` on.
template <int NUM>
__device__ __forceinline__ void take_all(float (&c)[PASSES][4], const Codes (&steps)[NUM], const char* rows, int M, int K,
                                         int step, int lane) {
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        Columns columns[NUM];
#pragma unroll
        for (int n = 0; n < NUM; n++) columns[n] = columns_of(rows, M, K, p * 8 / DIGITS, step + n, lane);
        take<NUM>(c[p], steps, columns);
    }
}

// What all threads of a program share while x is staged.
struct Staging { float squares[8 * WARPS]; word tops[8 * WARPS]; float factors[8]; };

// The digits of four numbers, as words: one of each digit.
__device__ __forceinline__ Four digits_of(word one, word two) {
    word of_number[4] = {digits(low(one)), digits(high(one)), digits(low(two)), digits(high(two))};
    word lower[2], upper[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        lower[i] = __byte_perm(of_number[2 * i], of_number[2 * i + 1], 0x5140);
        upper[i] = __byte_perm(of_number[2 * i], of_number[2 * i + 1], 0x7362);
    }
    return {__byte_perm(lower[0], lower[1], 0x5410), __byte_perm(lower[0], lower[1], 0x7632),
            __byte_perm(upper[0], upper[1], 0x5410), __byte_perm(upper[0], upper[1], 0x7632)};
}

// The pieces of `norm` that a thread needs at first: asked for before they are waited for.
__device__ __forceinline__ void read_first_norms(Four (&norms)[AT_ONCE], const char* norm, int thread, int K) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        if (norm && thread + i * THREADS < K / 8) norms[i] = read_once(norm + (thread + i * THREADS) * 16);
}

// x into shared memory as `columns_of` wants it, times `norm` where there is one. What a product gives is then to be multiplied
// by `factors` of its row, which are there after the next time that all threads meet. `norms`: those that `read_first_norms`
// gives. `read(eights, m, from)`: the eight numbers of row m from 8 (from + i THREADS) on, for each i that is in the row; all
// threads call it.
template <class Read>
__device__ __forceinline__ void stage(char* rows, Staging& shared, const char* norm, const Four (&norms)[AT_ONCE], int M, int K,
                                      float eps, Read read) {
    constexpr int FAR = BITS == 4 ? THREADS / 16 * 512 : THREADS * 16;  // from a thread's piece to its next one
    int thread = this_thread(), warp = thread / 32, lane = thread % 32;
    // Where this thread's first piece of a row lies, with 4 bits its digit 0; digit 1 is `other` on, 2 and 3 are 128 further.
    unsigned number = thread, half = number / 8 % 2;
    int mine = BITS == 16 ? number * 16 : number / 16 * 512 + half * 320 + number % 4 * 16 + number / 4 % 2 * 8;
    int other = half ? -64 : 64;
    for (int m = 0; m < M; m++) {
        char* to = rows + m * row_bytes(K) + mine;
        float square = 0;
        word top = 0;
        for (int from = 0; from < K / 8; from += AT_ONCE * THREADS) {
            Four eights[AT_ONCE];
            read(eights, m, from + thread);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++, to += FAR) {
                int at = from + i * THREADS + thread;
                if (at >= K / 8) break;
                Four eight = eights[i];
                if (norm) {
                    Four by = from ? read_once(norm + at * 16) : norms[i];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float a = low(eight.at[j]), b = high(eight.at[j]);
                        square += a * a + b * b;
                        eight.at[j] = times(eight.at[j], by.at[j]);
                    }
                }
                if (BITS == 16) {
                    *(Four*)to = eight;
                    continue;
                }
                // As they are for now, where this thread will write two of their digits.
                *(Two*)to = {eight.at[0], eight.at[1]}, *(Two*)(to + other) = {eight.at[2], eight.at[3]};
#pragma unroll
                for (int j = 0; j < 4; j++) top = larger_halves(top, eight.at[j] & 0x7fff7fff);
            }
        }
        if (norm) {
#pragma unroll
            for (int far = 16; far; far /= 2) square += __shfl_xor_sync(0xffffffffu, square, far);
            if (lane == 0) shared.squares[m * WARPS + warp] = square;
        }
        if (BITS == 4) {
            top = most_of_warp(max(top << 16, top));
            if (lane == 0) shared.tops[m * WARPS + warp] = top;
        }
    }
    meet_threads<THREADS>();
    for (int m = 0; m < M; m++) {
        float back = 1;
        if (BITS == 4) {
            int exponent = max((int)(most_of_warp(lane < WARPS ? shared.tops[m * WARPS + lane] : 0) >> 23), 30);
            word by = (283 - exponent) * 0x00800080u;  // 2^29 over the largest number's power of two
            back = __uint_as_float(exponent == 255 ? 0x7fffffff : (word)(exponent - 29) << 23);
            char* to = rows + m * row_bytes(K) + mine;
            for (int at = thread; at < K / 8; at += THREADS, to += FAR) {
                Two one = *(Two*)to, two = *(Two*)(to + other);
                Four first = digits_of(times(one.at[0], by), times(one.at[1], by));
                Four second = digits_of(times(two.at[0], by), times(two.at[1], by));
#pragma unroll
                for (int d = 0; d < 4; d++) *(Two*)(to + d % 2 * other + d / 2 * 128) = {first.at[d], second.at[d]};
            }
        }
        if (norm) {
            float square = lane < WARPS ? shared.squares[m * WARPS + lane] : 0;
#pragma unroll
            for (int far = 16; far; far /= 2) square += __shfl_xor_sync(0xffffffffu, square, far);
            back *= rsqrtf(__fdividef(square, K) + eps);
        }
        if (thread == m) shared.factors[m] = back;
    }
    if (BITS == 4) meet_threads<THREADS>();
}

__device__ __forceinline__ float gated(float gate, float up) {
    return __fdividef(gate, 1 + exp2_of(-1.4426950408889634f * gate)) * up;
}

// The sums of what a warp has had of a tile, for `finish`, which wants them of each warp and each of the program's `num` tiles;
// then they are 0. All lanes come here.
__device__ __forceinline__ void keep_part(float* sums, int num, int warp, int tile, int lane, int M, float (&c)[PASSES][4]) {
    float* to = sums + (warp * num + tile) * M * 16 + lane / 4;
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        if (BITS == 4) {  // a lane has two digits of a row, and its neighbour the other two
            int m = 2 * p + lane % 4 / 2;
            float by = lane % 2 ? 4096 : 0.0625f;  // 65536 or 1, over 16
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float sum = (256 * c[p][2 * i + 1] + c[p][2 * i]) * by;
                sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                if (lane % 2 == i && m < M) to[m * 16 + 8 * i] = sum;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int m = lane % 4 * 2 + j;
                if (m < M) to[m * 16] = c[p][j], to[m * 16 + 8] = c[p][j + 2];
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) c[p][i] = 0;
    }
}

// The results of a program's tiles, `results` of each row, once `sums` are there: `write(m, at, value, is_real)` by all threads.
template <class Write>
__device__ __forceinline__ void finish(const float* sums, const float* factors, int num, bool is_gated, int results, int M,
                                       Write write) {
    int thread = this_thread();
    for (int m = 0; m < M; m++)
        for (int at = thread; at - thread < results; at += THREADS) {
            int tile = is_gated ? at >> 3 : at >> 4, row = at & (is_gated ? 7 : 15);
            const float* sum = sums + (tile * M + m) * 16 + row;
            float value = 0, up = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++, sum += num * M * 16) {  // the warps in their order
                if (at >= results) continue;
                value += sum[0];
                if (is_gated) up += sum[8];
            }
            value *= factors[m];
            write(m, at, is_gated ? gated(value, up * factors[m]) : value, at < results);
        }
}
