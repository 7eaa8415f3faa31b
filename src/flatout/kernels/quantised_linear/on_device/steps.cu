// What kernels do with a weight that lies in the order in which the matrix units take it (laying.py).
//
// A tile is 16 outputs; a step is 1 KiB of codes of a tile, 128 inputs with 4 bits and 32 with 16. M rows of x, K inputs. The
// matrix units multiply a tile by 8 columns at a time.
//
// With 16 bits all is bfloat16, and a row of x is a column. With 4 bits all is bytes, whose products and sums are exact: codes
// are the upper halves of bytes, 16 times what they stand for. A row of x, times a power of two that brings the largest to 2^29
// or above, is rounded to whole numbers, and their four digits to the base 256, from - 128 to 127, are four columns. bfloat16
// has eight bits, so that only numbers 2^22 times smaller than the row's largest lose any.

constexpr int STEP = BITS == 4 ? 128 : 32;
constexpr int THREADS = 32 * WARPS;
constexpr int AT_ONCE = 3;  // pieces of x that a thread reads at a time
constexpr int SCALES = BITS == 4 ? 32 : 0;  // bytes of a step's
constexpr int DIGITS = BITS == 4 ? 4 : 1;  // columns of a row
constexpr int WORDS = BITS == 4 ? 2 : 1;  // sixteen bytes that a lane has of a step of a column

struct Codes { Four half[2]; word scales; };

// What a lane has of a step that lies at `codes`, and its scales at `scales`.
__device__ __forceinline__ Codes step_of(const char* codes, const char* scales, int lane) {
    Codes step;
    step.half[0] = *(const Four*)(codes + lane * 16), step.half[1] = *(const Four*)(codes + 512 + lane * 16);
    if (BITS == 4) step.scales = *(const word*)(scales + lane / 4 * 4);
    return step;
}

// Rows of x in shared memory, as `stage` lays them: so many bytes of each. With 16 bits they are 16 longer, so that they begin
// in other banks. With 4, a step is 512 bytes: of each half of the inputs 64 bytes of each digit; in the second half even and
// odd digits have changed places, so that both halves are written to other banks.
__device__ __forceinline__ int row_bytes(int K) { return BITS == 4 ? 4 * K : 2 * K + 16; }

struct Columns { Four half[WORDS]; };

// What a lane has of a step of x: row after row in `rows`, those from `row` on are columns.
__device__ __forceinline__ Columns columns_of(const char* rows, int M, int K, int row, int step, int lane) {
    int column = lane / 4, m = row + column / DIGITS, digit = column % DIGITS;
    Columns made = {};
    if (m >= M) return made;
    const char* x = rows + m * row_bytes(K) + step * STEP * (BITS == 4 ? 4 : 2) + lane % 4 * 16;
    made.half[0] = *(const Four*)(x + digit * 64);
    if (BITS == 4) made.half[WORDS - 1] = *(const Four*)(x + 256 + (digit ^ 1) * 64);
    return made;
}

// c += NUM steps of the weight, one behind the other in a tile, times those of x. Steps go side by side, since each product
// waits for the one before it.
template <int NUM>
__device__ __forceinline__ void take(float (&c)[4], const Codes (&steps)[NUM], const Columns (&columns)[NUM]) {
    if (BITS == 4) {
        int made[NUM][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < NUM; n++) {
                const Four &codes = steps[n].half[j / 2], &x = columns[n].half[j / 2 % WORDS];
                word one = codes.at[j % 2 * 2], two = codes.at[j % 2 * 2 + 1];
                word a[4] = {lower_codes(one), upper_codes(one), lower_codes(two), upper_codes(two)};
                multiply_bytes(made[n], a, x.at[j % 2 * 2], x.at[j % 2 * 2 + 1]);
            }
#pragma unroll
        for (int n = 0; n < NUM; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[i] += (i < 2 ? low(steps[n].scales) : high(steps[n].scales)) * (float)made[n][i];
        return;
    }
    float made[2][NUM][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < NUM; n++) {
            const Four *rows = steps[n].half, &x = columns[n].half[0];
            word a[4] = {rows[0].at[2 * h], rows[1].at[2 * h], rows[0].at[2 * h + 1], rows[1].at[2 * h + 1]};
            multiply(made[h][n], a, x.at[2 * h], x.at[2 * h + 1]);
        }
#pragma unroll
    for (int n = 0; n < NUM; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[i] += made[0][n][i] + made[1][n][i];
}

// The same for all rows, of which PASSES times eight columns are had: x's steps from `step` on.
template <int NUM>
__device__ __forceinline__ void take_all(float (&c)[PASSES][4], const Codes (&steps)[NUM], const char* rows, int M, int K, int step,
                                         int lane) {
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

// Where the digits of eight inputs of a row lie, those of digit `digit`; `at` counts such pieces.
__device__ __forceinline__ char* digits_at(char* row, int at, int digit) {
    int half = at / 8 % 2;
    return row + at / 16 * 512 + half * 256 + (digit ^ half) * 64 + at % 4 * 16 + at / 4 % 2 * 8;
}

// The digits of four numbers, as words: one of each digit.
__device__ __forceinline__ Four digits_of(float a, float b, float c, float d) {
    word of_number[4] = {digits(a), digits(b), digits(c), digits(d)};
    word low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        low[i] = __byte_perm(of_number[2 * i], of_number[2 * i + 1], 0x5140);
        high[i] = __byte_perm(of_number[2 * i], of_number[2 * i + 1], 0x7362);
    }
    return {__byte_perm(low[0], low[1], 0x5410), __byte_perm(low[0], low[1], 0x7632), __byte_perm(high[0], high[1], 0x5410),
            __byte_perm(high[0], high[1], 0x7632)};
}

// x into shared memory as `columns_of` wants it, times `norm` where there is one. What a product gives is then to be multiplied
// by `factors` of its row, which are there after the next time that all threads meet. `first_norm`: what this thread needs of
// `norm` at first. `read(eights, m, from)`: the eight numbers of row m from 8 (from + i THREADS) on, for each i that is in the
// row; all threads call it.
template <class Read>
__device__ __forceinline__ void stage(char* rows, Staging& shared, const char* norm, const Four& first_norm, int M, int K, float eps,
                                      Read read) {
    int thread = this_thread(), warp = thread / 32, lane = thread % 32;
    for (int m = 0; m < M; m++) {
        char* row = rows + m * row_bytes(K);
        float square = 0;
        word top = 0;
        for (int from = 0; from < K / 8; from += AT_ONCE * THREADS) {
            Four eights[AT_ONCE];
            read(eights, m, from + thread);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                int at = from + i * THREADS + thread;
                if (at >= K / 8) break;
                Four eight = eights[i];
                if (norm) {
                    Four by = at == thread ? first_norm : read_once(norm + at * 16);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float a = low(eight.at[j]), b = high(eight.at[j]);
                        square += a * a + b * b;
                        eight.at[j] = times(eight.at[j], by.at[j]);
                    }
                }
                if (BITS == 16) {
                    *(Four*)(row + at * 16) = eight;
                    continue;
                }
                // As they are for now, where this thread will write two of their digits.
                *(Two*)digits_at(row, at, 0) = {eight.at[0], eight.at[1]}, *(Two*)digits_at(row, at, 1) = {eight.at[2], eight.at[3]};
#pragma unroll
                for (int j = 0; j < 4; j++) top = max(top, max(eight.at[j] & 0x7fff0000, eight.at[j] << 16 & 0x7fff0000));
            }
        }
        if (norm) {
#pragma unroll
            for (int far = 16; far; far /= 2) square += __shfl_xor_sync(0xffffffffu, square, far);
            if (lane == 0) shared.squares[m * WARPS + warp] = square;
        }
        if (BITS == 4) {
            top = most_of_warp(top);
            if (lane == 0) shared.tops[m * WARPS + warp] = top;
        }
    }
    meet_threads<THREADS>();
    for (int m = 0; m < M; m++) {
        float back = 1;
        if (BITS == 4) {
            int exponent = max((int)(most_of_warp(lane < WARPS ? shared.tops[m * WARPS + lane] : 0) >> 23), 30);
            float by = __uint_as_float((word)(283 - exponent) << 23);  // 2^29 over the largest number's power of two
            back = __uint_as_float(exponent == 255 ? 0x7fffffff : (word)(exponent - 29) << 23);
            char* row = rows + m * row_bytes(K);
            for (int at = thread; at < K / 8; at += THREADS) {
                Two one = *(Two*)digits_at(row, at, 0), two = *(Two*)digits_at(row, at, 1);
                Four first = digits_of(low(one.at[0]) * by, high(one.at[0]) * by, low(one.at[1]) * by, high(one.at[1]) * by);
                Four second = digits_of(low(two.at[0]) * by, high(two.at[0]) * by, low(two.at[1]) * by, high(two.at[1]) * by);
#pragma unroll
                for (int d = 0; d < 4; d++) *(Two*)digits_at(row, at, d) = {first.at[d], second.at[d]};
            }
        }
        if (thread == m) {
            float square = 0;
            for (int i = 0; norm && i < WARPS; i++) square += shared.squares[m * WARPS + i];
            shared.factors[m] = norm ? rsqrtf(square / K + eps) * back : back;
        }
    }
    if (BITS == 4) meet_threads<THREADS>();
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1 + exp2_of(-1.4426950408889634f * gate)) * up; }

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
