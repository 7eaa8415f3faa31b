// One new token's attention, from what the product for queries, keys and values gives: turns queries and keys, writes the cache,
// attends to all places up to the position.
//
// N heads of queries, G heads of keys, S places, H = 128 numbers of a head. A program is a head of queries and a part of the
// places, 64 at a time: 16 lanes take a place, eight numbers each. Keys and values of older places are asked for before the launch
// before this one has ended: it must not write them, nor the position.

constexpr int H = 128, PLACES = 64, TEAMS = 16, EACH = PLACES / TEAMS;
constexpr float NONE = -1e38f;

__device__ __forceinline__ void widen(float (&to)[8], const Four& from) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = low(from.at[i]), to[2 * i + 1] = high(from.at[i]);
}

__device__ __forceinline__ Four narrowed(const float (&from)[8]) {
    Four made;
#pragma unroll
    for (int i = 0; i < 4; i++) made.at[i] = rounded(from[2 * i], from[2 * i + 1]);
    return made;
}

// This lane's eight numbers of a head, turned by the angles of the position: those of a half with those of the other.
__device__ __forceinline__ void turned(float (&made)[8], const char* head, const float* cosines, const float* sines, int lane) {
    float here[8], there[8];
    widen(here, read_shared_result(head + lane * 16));
    widen(there, read_shared_result(head + (lane ^ 8) * 16));
    float sign = lane < 8 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int at = lane % 8 * 8 + i;
        made[i] = here[i] * cosines[at] + sign * there[i] * sines[at];
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) turned_attention(
    const char* qkv, const float* cosines, const float* sines, char* keys, char* values, const long long* position, char* out,
    float* parts, unsigned int* counters, int heads, int shared, int S, int P, float scale) {
    __shared__ float tops[TEAMS], totals[TEAMS], accs[TEAMS][H];
    __shared__ unsigned int order;
    int head = blockIdx.x, part = blockIdx.y, batch = blockIdx.z, thread = threadIdx.x, team = thread / 16, lane = thread % 16;
    int groups = heads / shared, group = head / shared;

    let_the_next_begin();
    int place = (int)*position, num = place + 1;  // `place` is the new one's
    int stretch = ((num + P - 1) / P + PLACES - 1) / PLACES * PLACES, first = part * stretch, end = min(first + stretch, num);
    long row = ((long)batch * groups + group) * S * H;
    const char *my_keys = keys + row * 2 + lane * 16, *my_values = values + row * 2 + lane * 16;
    Four k[EACH], v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int at = first + team * EACH + i;
        if (at < min(end, place)) {
            k[i] = read_once(my_keys + (long)at * H * 2);
            v[i] = read_once(my_values + (long)at * H * 2);
        }
    }

    wait_for_the_launch_before();
    const char* mine = qkv + (long)batch * (heads + 2 * groups) * H * 2;
    const float *my_cosines = cosines + (long)place * (H / 2), *my_sines = sines + (long)place * (H / 2);
    float query[8], fresh_key[8];
    turned(query, mine + head * H * 2, my_cosines, my_sines, lane);
    turned(fresh_key, mine + (heads + group) * H * 2, my_cosines, my_sines, lane);
    Four new_query = narrowed(query), new_key = narrowed(fresh_key);
    Four new_value = read_shared_result(mine + (heads + groups + group) * H * 2 + lane * 16);
    widen(query, new_query);  // rounded as what a tensor would hold
#pragma unroll
    for (int i = 0; i < 8; i++) query[i] *= scale * 1.4426950408889634f;  // in base 2: exp2 is what the device has
    if (head % shared == 0 && first <= place && place < end && team == 0) {
        *(Four*)(keys + (row + (long)place * H) * 2 + lane * 16) = new_key;
        *(Four*)(values + (row + (long)place * H) * 2 + lane * 16) = new_value;
    }

    float top = NONE, total = 0, acc[8] = {};
    for (int start = first; start < end; start += PLACES) {
        float scores[EACH], above = top;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = start + team * EACH + i;
            if (at == place) k[i] = new_key, v[i] = new_value;
            float wide[8], score = 0;
            widen(wide, k[i]);
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
        for (int i = 0; i < EACH; i++) {
            int at = start + team * EACH + i;
            if (at < end) {
                float weight = exp2_of(scores[i] - above), wide[8];
                widen(wide, v[i]);
                total += weight;
#pragma unroll
                for (int j = 0; j < 8; j++) acc[j] += weight * wide[j];
            }
            at += PLACES;
            if (at < min(end, place)) {
                k[i] = read_once(my_keys + (long)at * H * 2);
                v[i] = read_once(my_values + (long)at * H * 2);
            }
        }
        top = above;
    }

    // The teams of this program, then the programs of this head: always in the same order.
#pragma unroll
    for (int j = 0; j < 8; j++) accs[team][lane * 8 + j] = acc[j];
    if (lane == 0) tops[team] = top, totals[team] = total;
    __syncthreads();
    long whole = (long)batch * heads + head;
    float *my_parts = parts + (whole * P + part) * (H + 2), joined = 0, all = 0, highest = NONE;
    if (thread < H) {
        for (int i = 0; i < TEAMS; i++) highest = fmaxf(highest, tops[i]);
        for (int i = 0; i < TEAMS; i++) {
            float by = exp2_of(tops[i] - highest);
            joined += accs[i][thread] * by;
            all += totals[i] * by;
        }
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
        ((unsigned short*)out)[whole * H + thread] = (unsigned short)rounded(joined / all, 0);
    }
    if (thread == 0) counters[whole] = 0;
}
