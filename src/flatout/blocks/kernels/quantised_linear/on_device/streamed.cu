// A product of up to 8 rows with a weight packed for MMA, after steps.cu.
//
// M rows, N outputs, K inputs. A program takes some tiles, and its WARPS warps take their steps in turn. Each warp has DEPTH
// steps on their way into shared memory, the first of them from before the launch before this one has ended: it must not write
// weights. A lane reads only what it has copied itself.

constexpr int SLOT = 1024 + 4 * SCALES;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_linear(
    const char* x, const char* codes, const char* scales, const char* norm, const unsigned short* bias,
    const unsigned short* residual, unsigned short* y, int M, int N, int K, float eps) {
    extern __shared__ __align__(16) char shared_memory[];
    __shared__ Staging shared;
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    int steps = K / STEP, tiles = (N + 15) / 16, P = gridDim.x, p = blockIdx.x;
    int first_tile = tiles / P * p + min(p, tiles % P), num = tiles / P + (p < tiles % P);
    char *rows = shared_memory + WARPS * DEPTH * SLOT, *mine = shared_memory + warp * DEPTH * SLOT + lane * 16;
    float* sums = (float*)(rows + M * row_bytes(K));

    let_the_next_begin();
    const char *one = codes + ((long)first_tile * steps + warp) * 1024 + lane * 16;
    const char *two = scales + ((long)first_tile * steps + warp) * 32 + lane / 4 * 4;
    int left = num * steps - warp;
    auto ask = [&](char* slot) {
        if (left > 0) {
            begin_copy(slot, one);
            begin_copy(slot + 512, one + 512);
            if (BITS == 4) begin_word_copy(slot + 1024 - lane * 12, two);
            left -= WARPS, one += WARPS * 1024, two += WARPS * 32;
        }
        copies_begun();
    };
    for (int d = 0; d < DEPTH; d++) ask(mine + d * SLOT);
    Four norms[AT_ONCE];
    read_first_norms(norms, norm, thread, K);
    int result = GATED ? 8 : 16, width = GATED ? N / 2 : N, first = first_tile * result, results = min(num * result, width - first);

    wait_for_the_launch_before();
    unsigned short first_residual = residual && thread < results ? read_shared_half(residual + first + thread) : 0;
    stage(rows, shared, norm, norms, M, K, eps, [&](Four(&eights)[AT_ONCE], int m, int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (from + i * THREADS < K / 8) eights[i] = read_shared_result(x + ((long)m * K + (from + i * THREADS) * 8) * 2);
    });

    float c[PASSES][4] = {};
    int d = 0, in = warp;
    for (int tile = 0; tile < num; tile++) {
        for (; in < steps; in += WARPS) {
            wait_for_copies<DEPTH - 1>();
            char* slot = mine + d * SLOT;
            d = d + 1 == DEPTH ? 0 : d + 1;
            Codes step[1];
            step[0].half[0] = *(const Four*)slot, step[0].half[1] = *(const Four*)(slot + 512);
            if (BITS == 4) step[0].scales = *(const word*)(slot + 1024 - lane * 12);
            ask(slot);
            take_all<1>(c, step, rows, M, K, in, lane);
        }
        in -= steps;
        keep_part(sums, num, warp, tile, lane, M, c);
    }
    meet_threads<THREADS>();
    finish(sums, shared.factors, num, GATED, results, M, [&](int m, int at, float value, bool is_real) {
        if (!is_real) return;
        long to = (long)m * width + first + at;
        if (bias) value += low(bias[first + at]);
        if (residual) value += low(m || at != thread ? read_shared_half(residual + to) : first_residual);
        y[to] = (unsigned short)rounded(value, 0);
    });
}
