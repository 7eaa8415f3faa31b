// Products of up to 8 rows with a weight that lies in the order in which the matrix units take it (laying.py).
//
// M rows, N outputs, K inputs. A tile is 16 outputs; a step is 1 KiB of codes of a tile, 128 inputs with 4 bits and 32 with 16.
// A program takes TILES tiles; its WARPS warps each take a stretch of the steps, and add up in a fixed order. DEPTH steps are on
// their way at a time. The first of them are asked for before the launch before this one has ended: it must not write weights.

constexpr int STEP = BITS == 4 ? 128 : 32;
constexpr int THREADS = 32 * WARPS;

struct Step { Four codes[2]; word scales; };

__device__ __forceinline__ Step step_at(const char* codes, const word* scales, long at, int lane) {
    Step made;
    made.codes[0] = read_once(codes + at * 1024 + lane * 16);
    made.codes[1] = read_once(codes + at * 1024 + 512 + lane * 16);
    if (BITS == 4) made.scales = read_word_once(scales + at * 8 + lane / 4);
    return made;
}

// c += a step of the weight times that of x; `x` is where this lane's sixteen bytes of the step begin.
__device__ __forceinline__ void take(float (&c)[4], const Step& step, const char* x) {
    if (BITS == 16) {
        Four columns = *(const Four*)x;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            word a[4] = {step.codes[0].at[2 * h], step.codes[1].at[2 * h], step.codes[0].at[2 * h + 1],
                         step.codes[1].at[2 * h + 1]};
            multiply(c, a, columns.at[2 * h], columns.at[2 * h + 1]);
        }
        return;
    }
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Four columns = *(const Four*)(x + 64 * j);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            word codes = step.codes[j / 2].at[2 * (j % 2) + h], a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = less_136(over_128(codes >> 4 * i));
            multiply(sums, a, columns.at[2 * h], columns.at[2 * h + 1]);
        }
    }
    float upper = low(step.scales), lower = high(step.scales);
    c[0] += upper * sums[0];
    c[1] += upper * sums[1];
    c[2] += lower * sums[2];
    c[3] += lower * sums[3];
}

// x into shared memory, times `norm` where there is one; gives each row's 1 / sqrt(mean square + eps) in `factors`, or 1.
__device__ __forceinline__ void stage(char* kept, float* factors, float* squares, const char* x, const char* norm, int M, int K,
                                      int stride, float eps) {
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    for (int m = 0; m < M; m++) {
        float square = 0;
        for (int at = thread; at < K / 8; at += THREADS) {
            Four eight = read_shared_result(x + ((long)m * K + at * 8) * 2);
            if (NORM) {
                Four by = read_shared_result(norm + at * 16);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float a = low(eight.at[i]), b = high(eight.at[i]);
                    square += a * a + b * b;
                    eight.at[i] = times(eight.at[i], by.at[i]);
                }
            }
            *(Four*)(kept + (long)m * stride + at * 16) = eight;
        }
        if (NORM) {
#pragma unroll
            for (int far = 16; far; far /= 2) square += __shfl_xor_sync(0xffffffffu, square, far);
            if (lane == 0) squares[m * WARPS + warp] = square;
        }
    }
    __syncthreads();
    if (thread < M) {
        float square = 0;
        if (NORM)
            for (int i = 0; i < WARPS; i++) square += squares[thread * WARPS + i];
        factors[thread] = NORM ? rsqrtf(square / K + eps) : 1.0f;
    }
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1 + exp2_of(-1.4426950408889634f * gate)) * up; }

// The sums of a tile's warps, times the row's factor.
__device__ __forceinline__ float total(const float* sums, const float* factors, int tile, int row, int m) {
    float made = 0;
    for (int i = 0; i < WARPS; i++) made += sums[((i * TILES + tile) * 16 + row) * 8 + m];
    return made * factors[m];
}

extern "C" __global__ void __launch_bounds__(THREADS) laid_linear(
    const char* x, const char* codes, const word* scales, const char* norm, const unsigned short* bias,
    const unsigned short* residual, unsigned short* y, int M, int N, int K, float eps) {
    extern __shared__ __align__(16) char kept[];
    __shared__ float sums[WARPS * TILES * 16 * 8], squares[8 * WARPS], factors[8];
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int steps = K / STEP, tiles = (N + 15) / 16, first_tile = blockIdx.x * TILES;
    int begin = (int)((long)steps * warp / WARPS), count = (int)((long)steps * (warp + 1) / WARPS) - begin;
    int stride = 2 * K + 16;  // 16 more, so that rows begin in other banks

    let_the_next_begin();
    long from[TILES];
    Step ring[DEPTH][TILES];
#pragma unroll
    for (int r = 0; r < TILES; r++) from[r] = (long)min(first_tile + r, tiles - 1) * steps + begin;
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < count)
#pragma unroll
            for (int r = 0; r < TILES; r++) ring[d][r] = step_at(codes, scales, from[r] + d, lane);

    wait_for_the_launch_before();
    stage(kept, factors, squares, x, norm, M, K, stride, eps);

    float c[TILES][4] = {};
    // Columns past the last row are the last row again: each column of the result is made of its own alone.
    const char* mine = kept + min(lane / 4, M - 1) * stride + begin * STEP * 2 + lane % 4 * 16;
    for (int step = 0; step < count; step += DEPTH)
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (step + d < count) {
#pragma unroll
                for (int r = 0; r < TILES; r++) {
                    take(c[r], ring[d][r], mine + (step + d) * STEP * 2);
                    if (step + d + DEPTH < count) ring[d][r] = step_at(codes, scales, from[r] + step + d + DEPTH, lane);
                }
            }

    for (int r = 0; r < TILES; r++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, m = lane % 4 * 2 + i % 2;
            if (m < M) sums[((warp * TILES + r) * 16 + row) * 8 + m] = c[r][i];
        }
    __syncthreads();

    int made = GATED ? 8 : 16;  // results of a tile: a gate lies 8 outputs before what it gates
    for (int at = thread; at < TILES * made * M; at += THREADS) {
        int row = at % made, r = at / made % TILES, m = at / (made * TILES);
        int n = (first_tile + r) * made + row, width = GATED ? N / 2 : N;
        if (n >= width) continue;
        float value = total(sums, factors, r, row, m);
        if (GATED) value = gated(value, total(sums, factors, r, row + 8, m));
        if (bias) value += low(bias[n]);
        if (residual) value += low(residual[(long)m * width + n]);
        y[(long)m * width + n] = (unsigned short)rounded(value, 0);
    }
}
