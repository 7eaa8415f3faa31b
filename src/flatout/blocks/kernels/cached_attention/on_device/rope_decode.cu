// One new token's attention, from what the product for queries, keys and values gives: turns queries and keys, writes the cache,
// attends to all places up to the position.
//
// N heads of queries, G heads of keys, S places, H = 128 numbers of a head. A program is a head of queries and a part of the
// places, 64 at a time: 16 lanes take a place, eight numbers each. Keys and values of STAGES times 64 places are on their way
// into shared memory, the first of them from before the launch before this one has ended: it must not write older places than
// the position, nor the position. A lane reads only what it has copied itself. The parts of a head are joined in a fixed order:
// by the programs of a cluster, each some of the numbers (CLUSTERS), or by the last program of a head.

constexpr int PLACES = 64, TEAMS = 16, EACH = PLACES / TEAMS, STAGE = 2 * PLACES * H * 2;

extern "C" __global__ void __launch_bounds__(256, 4) rope_decode_attention(
    const char* qkv, const float* cosines, const float* sines, char* keys, char* values, const long long* position, char* out,
    float* parts, unsigned int* counters, int heads, int shared, int S, int P, float scale) {
    extern __shared__ __align__(16) char shared_memory[];
    __shared__ float tops[TEAMS], totals[TEAMS], accs[TEAMS][H], part_of_head[H + 2];
    __shared__ Four newest[2][TEAMS];
    __shared__ unsigned int order;
    int head = blockIdx.x, part = blockIdx.y, batch = blockIdx.z, thread = threadIdx.x, team = thread / 16, lane = thread % 16;
    int groups = heads / shared, group = head / shared;

    let_the_next_begin();
    int place = (int)*position, num = place + 1;  // `place` is the new one's
    int stretch = ((num + P - 1) / P + TEAMS - 1) / TEAMS * TEAMS, first = part * stretch, end = min(first + stretch, num);
    long row = ((long)batch * groups + group) * S * H;
    const char *my_keys = keys + row * 2 + lane * 16, *my_values = values + row * 2 + lane * 16;
    char* mine = shared_memory + thread * 16;  // a place of each team is 4 KiB further
    auto ask = [&](int stage, int start) {
        char* to = mine + stage * STAGE;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = start + i * TEAMS + team;
            if (at < min(end, place)) {
                begin_copy(to + i * 4096, my_keys + (long)at * H * 2);
                begin_copy(to + STAGE / 2 + i * 4096, my_values + (long)at * H * 2);
            }
        }
        copies_begun();
    };
    for (int s = 0; s < STAGES; s++) ask(s, first + s * PLACES);

    wait_for_the_launch_before();
    const char* fresh = qkv + (long)batch * (heads + 2 * groups) * H * 2;
    const float *my_cosines = cosines + (long)place * (H / 2), *my_sines = sines + (long)place * (H / 2);
    float query[8];
    auto rotate_head = [&](float(&result)[8], const char* head) {
        Four here = read_shared_result(head + lane * 16), there = read_shared_result(head + (lane ^ 8) * 16);
        rotate(result, here, there, my_cosines, my_sines, lane);
    };
    rotate_head(query, fresh + head * H * 2);
    widen(query, narrowed(query));  // rounded as what a tensor would hold
#pragma unroll
    for (int i = 0; i < 8; i++) query[i] *= scale * 1.4426950408889634f;  // in base 2: exp2 is what the device has
    if (first <= place && place < end && (place - first) % TEAMS == team) {
        float fresh_key[8];
        rotate_head(fresh_key, fresh + (heads + group) * H * 2);
        Four new_key = narrowed(fresh_key), new_value = read_shared_result(fresh + (heads + groups + group) * H * 2 + lane * 16);
        newest[0][lane] = new_key, newest[1][lane] = new_value;
        if (head % shared == 0) {
            *(Four*)(keys + (row + (long)place * H) * 2 + lane * 16) = new_key;
            *(Four*)(values + (row + (long)place * H) * 2 + lane * 16) = new_value;
        }
    }

    float top = NONE, total = 0, acc[8] = {};
    int stage = 0;
    for (int start = first; start < end; start += PLACES) {
        wait_for_copies<STAGES - 1>();
        char* from = mine + stage * STAGE;
        float scores[EACH], above = top;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = start + i * TEAMS + team;
            if (at == place) {  // this lane's part of the new one, where an older one's would be
                *(Four*)(from + i * 4096) = newest[0][lane];
                *(Four*)(from + STAGE / 2 + i * 4096) = newest[1][lane];
            }
            float wide[8], score = 0;
            widen(wide, *(Four*)(from + i * 4096));
#pragma unroll
            for (int j = 0; j < 8; j++) score += query[j] * wide[j];
#pragma unroll
            for (int far = 8; far; far /= 2) score += __shfl_xor_sync(0xffffffffu, score, far);
            scores[i] = at < end ? score : NONE;
            above = fmaxf(above, scores[i]);
        }
        float shrink = exp2_of(top - above);
        total *= shrink;
#pragma unroll
        for (int j = 0; j < 8; j++) acc[j] *= shrink;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (start + i * TEAMS + team < end) {
                float weight = exp2_of(scores[i] - above), wide[8];
                widen(wide, *(Four*)(from + STAGE / 2 + i * 4096));
                total += weight;
#pragma unroll
                for (int j = 0; j < 8; j++) acc[j] += weight * wide[j];
            }
        ask(stage, start + STAGES * PLACES);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        top = above;
    }

    // The teams of this program, then the programs of this head.
#pragma unroll
    for (int j = 0; j < 8; j++) accs[team][lane * 8 + j] = acc[j];
    if (lane == 0) tops[team] = top, totals[team] = total;
    __syncthreads();
    long whole = (long)batch * heads + head;
    float joined = 0, all = 0, highest = NONE;
    if (thread < H) {
        for (int i = 0; i < TEAMS; i++) highest = fmaxf(highest, tops[i]);
        for (int i = 0; i < TEAMS; i++) {
            float by = exp2_of(tops[i] - highest);
            joined += accs[i][thread] * by;
            all += totals[i] * by;
        }
    }
    unsigned short* result = (unsigned short*)out + whole * H + thread;
    if (CLUSTERS) {
        if (thread < H) part_of_head[thread] = joined;
        if (thread == 0) part_of_head[H] = highest, part_of_head[H + 1] = all;
        meet_cluster();
        if (thread < H && thread * P / H == part) {
            highest = NONE, joined = 0, all = 0;
            for (int p = 0; p < P; p++) highest = fmaxf(highest, read_of_program(part_of_head + H, p));
            for (int p = 0; p < P; p++) {
                float by = exp2_of(read_of_program(part_of_head + H, p) - highest);
                joined += read_of_program(part_of_head + thread, p) * by;
                all += read_of_program(part_of_head + H + 1, p) * by;
            }
            *result = (unsigned short)rounded(joined / all, 0);
        }
        meet_cluster();  // what others read must stay until they have
        return;
    }
    float* my_parts = parts + (whole * P + part) * (H + 2);
    if (thread < H) {
        my_parts[thread] = joined;
        if (thread == 0) my_parts[H] = highest, my_parts[H + 1] = all;
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) order = atomicAdd(counters + whole, 1u);
    __syncthreads();
    if (order != P - 1) return;
    __threadfence();
    if (thread < H) {
        volatile float* every = parts + whole * P * (H + 2);
        highest = NONE, joined = 0, all = 0;
        for (int p = 0; p < P; p++) highest = fmaxf(highest, every[p * (H + 2) + H]);
        for (int p = 0; p < P; p++) {
            float by = exp2_of(every[p * (H + 2) + H] - highest);
            joined += every[p * (H + 2) + thread] * by;
            all += every[p * (H + 2) + H + 1] * by;
        }
        *result = (unsigned short)rounded(joined / all, 0);
    }
    if (thread == 0) counters[whole] = 0;
}
