// What kernels do with a weight that lies in the order in which the matrix units take it (laying.py).
//
// A tile is 16 outputs; a step is 1 KiB of codes of a tile, 128 inputs with 4 bits and 32 with 16. M rows of x, K inputs.
//
// With 16 bits all is bfloat16. With 4 bits the matrix units see codes + 256 or + 16 in half precision, which take one
// instruction for two; what this is too much is known from the sum of x. Rows of x become half precision too, times a power of
// two that brings the largest to 2^14: bfloat16 has fewer bits, so that only numbers 2^28 times smaller than the row's largest
// lose any.

constexpr int STEP = BITS == 4 ? 128 : 32;
constexpr int THREADS = 32 * WARPS;
constexpr int AT_ONCE = 3;  // pieces of x that a thread reads at a time
constexpr int SCALES = BITS == 4 ? 32 : 0;  // bytes of a step's

struct Codes { Four half[2]; word scales; };

// What a lane has of a step that lies at `codes`, and its scales at `scales`.
__device__ __forceinline__ Codes step_of(const char* codes, const char* scales, int lane) {
    Codes step;
    step.half[0] = *(const Four*)(codes + lane * 16), step.half[1] = *(const Four*)(codes + 512 + lane * 16);
    if (BITS == 4) step.scales = *(const word*)(scales + lane / 4 * 4);
    return step;
}

// c += NUM steps of the weight, one behind the other in a tile, times those of x: `x` is where this lane's sixteen bytes of the
// first begin, and `sums` those of this lane's two columns. Column m of what the matrix units multiply is row m of x, which four
// lanes hold; `has_row` says whether this lane's column is a row. Steps go side by side, since each product waits for the one
// before it.
template <int NUM>
__device__ __forceinline__ void take(float (&c)[4], const Codes (&steps)[NUM], const char* x, const float* sums, bool has_row) {
    float even[NUM][4], odd[NUM][4];
#pragma unroll
    for (int n = 0; n < NUM; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            // A code is 8 more than what it stands for.
            even[n][i] = BITS == 4 ? (i < 2 ? -264 : -24) * sums[8 * n + i % 2] : 0;
            odd[n][i] = 0;
        }
#pragma unroll
    for (int j = 0; j < (BITS == 4 ? 4 : 1); j++) {
        Four columns[NUM];
#pragma unroll
        for (int n = 0; n < NUM; n++) {
            columns[n] = {};
            if (has_row) columns[n] = *(const Four*)(x + 2 * STEP * n + 64 * j);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int n = 0; n < NUM; n++) {
                const Codes& step = steps[n];
                float(&made)[4] = h ? odd[n] : even[n];
                if (BITS == 16) {
                    word a[4] = {step.half[0].at[2 * h], step.half[1].at[2 * h], step.half[0].at[2 * h + 1],
                                 step.half[1].at[2 * h + 1]};
                    multiply(made, a, columns[n].at[2 * h], columns[n].at[2 * h + 1]);
                } else {
                    word codes = step.half[j / 2].at[2 * (j % 2) + h], others = swapped(codes);
                    word a[4] = {over_256(codes), over_16(codes), over_256(others), over_16(others)};
                    multiply_halves(made, a, columns[n].at[2 * h], columns[n].at[2 * h + 1]);
                }
            }
    }
#pragma unroll
    for (int n = 0; n < NUM; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float scale = BITS == 16 ? 1 : i < 2 ? low(steps[n].scales) : high(steps[n].scales);
            c[i] += scale * (even[n][i] + odd[n][i]);
        }
}

// What all threads of a program share while x is staged.
struct Staging { float squares[8 * WARPS]; word tops[8 * WARPS]; float factors[8]; };

// x into shared memory as `take` wants it, times `norm` where there is one. What a product gives is then to be multiplied by
// `factors` of its row, which are there after the next time that all threads meet; with 4 bits `sums` gets those of each step of
// each row, [steps, 8]. `first_norm`: what this thread needs of `norm` at first. `read(eights, m, from)`: the eight numbers of
// row m from 8 (from + i THREADS) on, for each i that is in the row; all threads call it.
template <class Read>
__device__ __forceinline__ void stage(char* rows, float* sums, Staging& shared, const char* norm, const Four& first_norm, int M,
                                      int K, int stride, float eps, Read read) {
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (int m = 0; m < M; m++) {
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
                *(Four*)(rows + (long)m * stride + at * 16) = eight;
#pragma unroll
                for (int j = 0; BITS == 4 && j < 4; j++)
                    top = max(top, max(eight.at[j] & 0x7fff0000, eight.at[j] << 16 & 0x7fff0000));
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
        int exponent = 141;  // of 2^14: as they are
        if (BITS == 4) {
            exponent = max((int)(most_of_warp(lane < WARPS ? shared.tops[m * WARPS + lane] : 0) >> 23), 15);
            float by = __uint_as_float((word)(268 - exponent) << 23);
            for (int from = 0; from < K / 8; from += THREADS) {
                int at = from + thread;
                Four* place = (Four*)(rows + (long)m * stride + at * 16);
                float sum = 0;
                if (at < K / 8) {
                    Four eight = *place;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        float a = low(eight.at[j]) * by, b = high(eight.at[j]) * by;
                        sum += a + b, eight.at[j] = halves(a, b);
                    }
                    *place = eight;
                }
#pragma unroll
                for (int far = 8; far; far /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, far);
                if (lane % 16 == 0 && at < K / 8) sums[at / 16 * 8 + m] = sum;
            }
        }
        if (thread == m) {
            float square = 0, back = __uint_as_float((word)(exponent - 14) << 23);
            for (int i = 0; norm && i < WARPS; i++) square += shared.squares[m * WARPS + i];
            shared.factors[m] = norm ? rsqrtf(square / K + eps) * back : back;
        }
    }
    if (BITS == 4) meet_threads<THREADS>();
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1 + exp2_of(-1.4426950408889634f * gate)) * up; }

// The sums of what a warp has had of a tile, for `finish`, which wants them of each warp and each of the program's `num` tiles.
__device__ __forceinline__ void keep_part(float* sums, int num, int warp, int tile, int lane, int M, const float (&c)[4]) {
    float* to = sums + (warp * num + tile) * M * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int m = lane % 4 * 2 + j;
        if (m < M) to[m * 16] = c[j], to[m * 16 + 8] = c[j + 2];
    }
}

// The results of a program's tiles, `results` of each row, once `sums` are there: `write(m, at, value, is_real)` by all threads.
template <class Write>
__device__ __forceinline__ void finish(const float* sums, const float* factors, int num, bool is_gated, int results, int M,
                                       Write write) {
    for (int m = 0; m < M; m++)
        for (int at = threadIdx.x; at - (int)threadIdx.x < results; at += THREADS) {
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
